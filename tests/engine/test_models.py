"""The contract of every file in ``engine/models``: named as its model_type, and a program that hangs together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from baton.engine.backends.encoder.ops import _BINDERS as ENCODER_BINDERS
from baton.engine.backends.torch.interpreter import _BINDERS
from baton.engine.models import architectures, program_for
from baton.engine.program.config import ModelConfig
from baton.engine.program.ops import (
    GatedDelta,
    LatentAttention,
    Op,
    PagedAttention,
    RopeAppend,
    SelectiveScan,
    StateSpace,
)
from baton.engine.program.program import Program
from baton.engine.program.rope import RopeTables, for_context
from baton.kv.layout.page import keeps_tokens, layout_for
from baton.protos.errors import CheckpointError
from baton.protos.nouns import BLOCK_TOKENS

SIZES = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "full_attention_interval": 2,
    "attn_layer_indices": [1],
    "mamba_n_heads": 8,
}

ONE_EXPERT = {"num_experts_per_tok": 1}
FULL, LOCAL = "full_attention", "sliding_attention"
SHARING = {"layer_types": [FULL, LOCAL, FULL], "num_kv_shared_layers": 1}
OWN: dict[str, dict[str, Any]] = {
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": [2, 2, 2], "moe_intermediate_size": [96, 96, 96]},
    "jamba": {"attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 4},
    "gemma3n": {"text_config": SIZES | SHARING},
    "gemma3n_text": SHARING,
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba"]},
    "llama4": {"text_config": SIZES | ONE_EXPERT},
    "llama4_text": ONE_EXPERT,
    "nemotron_h": {"hybrid_override_pattern": "M-*", "mlp_hidden_act": "relu2"},
}


def program(model_type: str, **changes: Any) -> Program:
    fields = SIZES | {"model_type": model_type, "text_config": SIZES} | OWN.get(model_type, {}) | changes
    return program_for(ModelConfig(Path("config.json"), fields, ()))


@pytest.mark.parametrize("model_type", architectures())
def test_every_weight_an_op_names_is_declared_once_and_used(model_type: str) -> None:
    found = program(model_type)
    names = [weight.name for weight in found.weights]
    gates = [op.gate for op in found.experts if op.gate is not None]
    values = [getattr(each, field) for each in (*found.ops, *gates) for field in each.__struct_fields__]
    named = {value for value in values if isinstance(value, str)}
    assert len(names) == len(set(names))
    assert set(names) == {name for name in named if name in set(names)}
    biases = {op.bias for op in found.ops if getattr(op, "bias", None)}
    assert biases <= set(names)


@pytest.mark.parametrize("model_type", architectures())
def test_every_op_has_a_binder_and_every_layer_a_place_of_its_own(model_type: str) -> None:
    found = program(model_type)
    if found.is_encoder:
        assert {type(op) for op in found.ops} <= set(ENCODER_BINDERS)
        assert keeps_tokens(layout_for("uint8", found.groups))
        return
    assert {type(op) for op in found.ops} <= set(_BINDERS)
    latent = [op.layer for op in found.ops if isinstance(op, LatentAttention)]
    places = [op.layer for op in found.ops if isinstance(op, RopeAppend)]
    kept = [op.layer for op in found.ops if isinstance(op, GatedDelta | StateSpace | SelectiveScan)]
    assert sorted(places or latent) == list(range(found.layers))
    assert all(sorted(kept) == list(range(plane.layers)) for plane in found.states)
    attends = [op.layer for op in found.ops if isinstance(op, PagedAttention)]
    assert attends[: len(places)] == places
    assert set(attends) == set(places), "layers without K and V of their own read another's"


@pytest.mark.parametrize("model_type", architectures())
def test_a_program_is_data(model_type: str) -> None:
    ops = program(model_type).ops
    assert msgspec.json.decode(msgspec.json.encode(ops), type=tuple[Op, ...]) == ops


def test_defaults_are_the_architectures() -> None:
    assert program("qwen3").head_dim == 128
    assert program("minimax_m2", rotary_dim=64).rope.parameters == {"partial_rotary_factor": 0.5}
    layers = program("glm4_moe_lite", mlp_layer_types=["sparse", "dense", "sparse"]).experts
    assert [op.gate_up for op in layers] == ["0.experts_gate_up", "2.experts_gate_up"]
    assert program("llama").head_dim == 16
    assert program("mistral").windows == (4096,)
    assert program("mistral", sliding_window=None).windows == (0,)
    assert program("qwen2", sliding_window=8).windows == (0,)


def test_layers_with_and_without_a_window_form_two_groups_of_the_page() -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    found = program("qwen3", use_sliding_window=True, sliding_window=8, layer_types=kinds)
    assert [(group.kind, group.layers, group.window) for group in found.groups] == [
        ("full", 1, 0),
        ("window", 2, 8),
    ]
    assert [op.layer for op in found.ops if isinstance(op, RopeAppend)] == [1, 0, 2]


def test_pages_have_no_place_for_layers_that_read_the_k_and_v_of_others() -> None:
    kinds = [LOCAL, FULL, LOCAL, FULL, LOCAL]
    sizes = {"num_hidden_layers": 5, "layer_types": kinds, "sliding_window": 8}
    found, apart = (program("gemma3n_text", **sizes, num_kv_shared_layers=count) for count in (2, 0))
    assert [(group.kind, group.layers) for group in found.groups] == [("full", 1), ("window", 2)]
    assert [(group.kind, group.layers) for group in apart.groups] == [("full", 2), ("window", 3)]
    assert [op.layer for op in found.ops if isinstance(op, RopeAppend)] == [1, 0, 2]
    assert [op.layer for op in found.ops if isinstance(op, PagedAttention)] == [1, 0, 2, 0, 2]
    sizes = [layout_for("bfloat16", each.groups).page_bytes for each in (found, apart)]
    assert sizes[0] * 5 == sizes[1] * 3
    assert not [weight.name for weight in found.weights if weight.name in ("3.k_norm", "3.qkv", "4.qkv")]


def test_tied_embeddings_need_no_head() -> None:
    names = [weight.name for weight in program("llama", tie_word_embeddings=True).weights]
    assert "head" not in names


def test_latents_are_one_plane_of_one_head_and_a_small_part_of_full_keys_and_values() -> None:
    (group,) = program("deepseek_v3").groups
    assert (group.planes, group.kv_heads, group.head_dim) == (("latent",), 1, 512 + 64)
    kept = layout_for("bfloat16", [group]).page_bytes / group.layers / BLOCK_TOKENS
    assert kept * 56 < 2 * 128 * (192 + 128), "K and V of DeepSeek-V3's 128 heads"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"n_group": 3}, "n_group"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace"),
        ({"moe_layer_freq": 2}, "moe_layer_freq"),
        ({"model_type": "deepseek_v2", "topk_method": "noaux_tc"}, "topk_method"),
    ],
)
def test_what_a_latent_decoder_cannot_be_is_refused_by_field(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        program(**({"model_type": "deepseek_v3"} | changes))


def test_windows_alternate_as_each_family_has_them() -> None:
    def windows(model_type: str, **changes: Any) -> list[int]:
        return [op.window for op in program(model_type, **changes).ops if isinstance(op, PagedAttention)]

    assert windows("gemma2") == [4096, 0, 4096]
    assert windows("gpt_oss") == [128, 0, 128]
    assert windows("gemma3_text", sliding_window=8, sliding_window_pattern=3) == [8, 8, 0]
    assert windows("gemma2", layer_types=["full_attention"] * 3) == [0, 0, 0]


@pytest.mark.parametrize(
    ("model_type", "changes", "said"),
    [
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor must be 1"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1"),
        ("gemma2", {"hidden_activation": "relu"}, "hidden_activation is 'relu'; only 'gelu_pytorch_tanh'"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ("gemma2", {"attn_logit_softcapping": -2}, "attn_logit_softcapping is -2"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        ("minimax_m2", {"attn_type_list": [1, 0, 1]}, "attn_type_list must be 1"),
        ("minimax_m2", {"attn_type_list": 1}, "attn_type_list must be 1"),
        ("minimax_m2", {"qk_norm_type": "per_head"}, "qk_norm_type is 'per_head'"),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias is True"),
        ("ernie4_5_moe", {"moe_norm_min": 0.9}, "moe_norm_min is 0.9"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense", "sparse"]}, "mlp_layer_types must name 3 layers"),
        (
            "glm4_moe_lite",
            {"mlp_layer_types": [["dense"], "sparse", "sparse"]},
            "mlp_layer_types must name 3 layers",
        ),
        ("glm4_moe_lite", {"n_group": 2, "topk_group": 3}, "topk_group is 3"),
        ("deepseek_v3", {"n_routed_experts": 8, "n_group": 8}, "n_group is 8"),
        (
            "deepseek_v2",
            {"topk_method": "group_limited_greedy", "topk_group": 1, "num_experts_per_tok": 3},
            "topk_group is 1; 3 experts of a row are chosen, and these groups have 2",
        ),
        ("gemma3n_text", {"altup_active_idx": 1}, "altup_active_idx is 1"),
        ("gemma3n_text", {"altup_num_inputs": 1}, "altup_num_inputs is 1; 2 to 16"),
        ("gemma3n_text", {"num_kv_shared_layers": 2}, "num_kv_shared_layers is 2 of 3 layers"),
        ("gemma3n_text", {"num_kv_shared_layers": 3}, "num_kv_shared_layers is 3 of 3 layers"),
        ("gemma3n_text", {"intermediate_size": [96, 96]}, "intermediate_size must be a whole number"),
        ("gemma3n_text", {"activation_sparsity_pattern": [0.5, 1.0, 0]}, "activation_sparsity_pattern must be 3"),
        ("phi3", {"rope_scaling": {"type": "llama3"}}, "rope type 'llama3'; default and longrope"),
        ("phi3", {"rope_scaling": {"type": "longrope", "short_factor": "x"}}, "short_factor must be a list"),
        ("phimoe", {"rope_scaling": {"type": "longrope", "short_mscale": 1.1}}, "lacks long_mscale, original_max"),
        ("phimoe", {"num_experts_per_tok": 3}, "num_experts_per_tok is 3"),
        ("starcoder2", {"hidden_act": "relu"}, "hidden_act is 'relu'; only 'gelu_pytorch_tanh'"),
        ("hunyuan_v1_dense", {"use_cla": True}, "use_cla is True"),
        ("hunyuan_v1_moe", {"num_shared_expert": [2, 2, 2]}, "num_shared_expert must be 1"),
        ("jamba", {"attn_layer_offset": 8}, "attn_layer_offset is 8"),
        ("jamba", {"attn_layer_period": 1, "attn_layer_offset": 0}, "attn_layer_period must give"),
        ("jamba", {"mamba_d_conv": 1}, "mamba_d_conv is 1"),
    ],
    ids=str,
)
def test_a_field_that_would_change_the_arithmetic_is_refused_by_name(
    model_type: str, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(CheckpointError, match=said):
        program(model_type, **changes)


def test_gemma3s_older_spelling_of_its_two_ropes_is_the_newer_one() -> None:
    scaled = {"rope_type": "linear", "factor": 8.0}
    old = program("gemma3_text", rope_theta=1e5, rope_local_base_freq=500.0, rope_scaling=scaled)
    both = {
        "full_attention": {**scaled, "rope_theta": 1e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    }
    assert program("gemma3_text", rope_parameters=both).ropes == old.ropes
    assert [rope.theta for rope in program("gemma3_text").ropes] == [1e6, 1e4]
    assert [op.rope for op in old.ops if isinstance(op, RopeAppend)] == [1, 1, 1]


def test_longrope_has_its_short_factors_up_to_the_original_context_alone() -> None:
    rope = {"type": "su", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    fields = {"rope_scaling": rope, "original_max_position_embeddings": 64, "max_position_embeddings": 256}
    found = program("phi3", **fields)
    assert found.plain_context == 64
    assert for_context(found, None) == for_context(found, 64) == found
    long = for_context(found, 65)
    assert long.plain_context == 0
    tables = [RopeTables(each.ropes, 16, 256).by_position(9) for each in (found, long)]
    assert not torch.equal(*tables)


def test_phi_moes_longrope_has_a_factor_of_its_own_on_either_side_of_the_original_context() -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [1.0] * 8, "original_max_position_embeddings": 64}
    found = program("phimoe", rope_scaling={"type": "longrope", "short_mscale": 1.5, "long_mscale": 3.0, **factors})
    short, long = (RopeTables(for_context(found, n).ropes, 16, 256).by_position(9) for n in (64, 65))
    assert torch.equal(long, short * 2)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"layer_types": ["linear_attention"] * 3}, "layer_types"),
        ({"layer_types": ["linear_attention", "full_attention", "magic"]}, "layer_types"),
        ({"linear_num_value_heads": 3, "linear_num_key_heads": 2}, "linear_num_value_heads"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim"),
    ],
)
def test_what_a_hybrid_cannot_be_is_refused_by_field(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        program("qwen3_next", **changes)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"attn_layer_indices": None}, "attn_layer_indices"),
        ({"attn_layer_indices": [0, 1, 2]}, "attn_layer_indices"),
        ({"mamba_n_heads": 7}, "mamba_n_heads"),
        ({"mamba_n_groups": 3}, "mamba_n_groups"),
        ({"mamba_d_conv": 1}, "mamba_d_conv"),
        ({"time_step_limit": [0.0, 0.1]}, "time_step_limit"),
        ({"time_step_limit": 3.0}, "time_step_limit is 3.0"),
        ({"rope_theta": "big"}, "rope_theta is 'big'"),
    ],
)
def test_what_a_state_space_hybrid_cannot_be_is_refused_by_field(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        program("bamba", **changes)


def test_a_config_with_pythons_infinity_is_read(tmp_path: Path) -> None:
    fields = {"model_type": "bamba", **SIZES, "time_step_limit": [0.0, float("inf")]}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert program_for(ModelConfig.read(tmp_path)).states
