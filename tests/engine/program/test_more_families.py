"""Tests what is special in smaller families: multipliers, wrappers, layers without rope, stacked experts,
refusals.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from baton.engine.checkpoints.safetensors import Checkpoint
from baton.engine.models import program_for
from baton.engine.program.config import ModelConfig
from baton.engine.program.ops import HalveHeads, LmHead, RmsNorm, TemperQueries
from baton.engine.program.program import NO_ROPE
from baton.protos.errors import CheckpointError
from tests.conformance.checkpoints import BASE, make
from tests.conformance.kinds import KINDS
from tests.conformance.small_kinds import SMALL, SMALL_BASE
from tests.engine.test_models import SIZES, program


def test_granites_multipliers_go_into_what_is_there_already() -> None:
    of = {"embedding_multiplier": 12.0, "residual_multiplier": 0.25, "attention_multiplier": 0.125}
    found = program("granite", **of, logits_scaling=8.0, rms_norm_eps=1e-6)
    norms = [op for op in found.ops if isinstance(op, RmsNorm)]
    assert found.ops[0].scale == 48.0  # type: ignore[union-attr]
    assert {op.eps for op in norms} == {1e-6 * 16}
    assert found.scale == 0.125
    last = found.ops[-1]
    assert isinstance(last, LmHead)
    assert last.scale == 0.125
    assert {weight.times for weight in found.weights if weight.name == last.norm} == {0.125}


def test_a_model_inside_a_larger_one_is_its_own() -> None:
    inside = (("mistral3", "mistral"), ("mistral3", "ministral3"), ("llama4", "llama4_text"), ("qwen3_vl", "qwen3"))
    for outer, inner in inside:
        text = SIZES | {"num_experts_per_tok": 1, "model_type": inner}
        assert program(outer, text_config=text) == program(inner, num_experts_per_tok=1)


def test_kimi_k2_is_deepseek_v3_with_other_sizes() -> None:
    assert program("kimi_k2") == program("deepseek_v3")


def test_layers_without_rope_turn_nothing_and_are_neither_halved_nor_untempered() -> None:
    found = program("llama4_text", num_hidden_layers=4)
    assert [rope.kind for rope in found.ropes] == ["default", NO_ROPE]
    assert [sum(isinstance(op, kind) for op in found.ops) for kind in (HalveHeads, TemperQueries)] == [3, 1]
    assert found.max_position == 8192


def test_experts_in_one_tensor_are_read_as_those_that_lie_apart(tmp_path: Path) -> None:
    apart = make(tmp_path / "apart", "olmoe", num_hidden_layers=1)
    tensors, whole = load_file(apart / "model.safetensors"), dict[str, list[torch.Tensor]]()
    at = "model.layers.0.mlp.experts"
    for expert in range(5):
        gate, up, down = (tensors.pop(f"{at}.{expert}.{part}_proj.weight") for part in ("gate", "up", "down"))
        whole.setdefault("gate_up_proj", []).append(torch.cat((gate, up)))
        whole.setdefault("down_proj", []).append(down)
    stacked = {f"{at}.{name}": torch.stack(each) for name, each in whole.items()}
    (tmp_path / "stacked").mkdir()
    save_file(tensors | stacked, tmp_path / "stacked" / "model.safetensors")
    wanted = program_for(ModelConfig.read(apart)).weights
    one, other = (Checkpoint(path).weights(wanted, torch.float32, "cpu") for path in (apart, tmp_path / "stacked"))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("kind", "changes", "named"),
    [
        ("granite", {"residual_multiplier": 0.0}, "residual_multiplier"),
        ("smollm3", {"no_rope_layers": [1, 2, 0]}, "no_rope_layers"),
        ("smollm3", {"use_sliding_window": True}, "use_sliding_window"),
        ("mistral3", {"text_config": SIZES | {"model_type": "pixtral"}}, "text_config"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv"),
        ("qwen2", {"is_causal": False}, "is_causal"),
        ("deepseek_v2", {"mlp_bias": True}, "mlp_bias"),
        ("qwen2", {"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": {"type": "yarn"}}, "rope_scaling"),
        ("cohere", {"use_qk_norm": True}, "use_qk_norm"),
        ("llama4_text", {"num_experts_per_tok": 2}, "num_experts_per_tok"),
        ("granitemoehybrid", {"layer_types": ["mamba"] * 3}, "layer_types"),
        ("ministral3", {"rope_parameters": {"rope_type": "default"}}, "rope_parameters"),
        ("nemotron_h", {"hybrid_override_pattern": "M*E"}, "layer_types"),
        ("nemotron_h", {"hybrid_override_pattern": "M-M"}, "layer_types"),
        ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act"),
        ("nemotron_h", {"mamba_hidden_act": "gelu"}, "mamba_hidden_act"),
        ("nemotron_h", {"tie_word_embeddings": True}, "tie_word_embeddings"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        (
            "bert",
            {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "a", "1": "b"}},
            "id2label",
        ),
        ("modernbert", {"norm_bias": True}, "norm_bias"),
    ],
)
def test_what_is_not_known_is_refused_by_name(kind: str, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        program(kind, **changes)
    assert caught.value.param == named


@pytest.mark.parametrize("kind", sorted({**KINDS, **SMALL}))
def test_norms_and_ropes_that_a_config_leaves_out_are_those_of_transformers_class(kind: str) -> None:
    stated = BASE | (KINDS[kind] if kind in KINDS else SMALL_BASE | SMALL[kind])
    left_out = ("rms_norm_eps", "norm_epsilon", "rope_parameters")
    fields = {name: value for name, value in stated.items() if name not in left_out and value is not None}
    sizes = {name: value for name, value in fields.items() if name != "model_type"}
    whole = transformers.AutoConfig.for_model(fields["model_type"], **sizes).to_json_string(use_diff=False)
    at = Path("config.json")
    theirs = program_for(ModelConfig(at, json.loads(whole) | {"model_type": fields["model_type"]}, ()))
    ours = program_for(ModelConfig(at, fields, ()))
    assert ours.ops == theirs.ops
    assert [(rope.kind, rope.theta) for rope in ours.ropes] == [(rope.kind, rope.theta) for rope in theirs.ropes]
