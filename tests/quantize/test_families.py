"""Tests that decoders of every family are quantized: what is written is read back, and moved factors cancel out."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor
from transformers import GptOssForCausalLM
from transformers.utils.quantization_config import Mxfp4Config

from baton.engine.backends.torch.batch import BatchBuilder
from baton.engine.backends.torch.interpreter import Interpreter
from baton.engine.checkpoints.weights import own_head
from baton.engine.config import EngineConfig
from baton.engine.load import load_runner
from baton.engine.models import program_for
from baton.engine.plan import SequenceStep, StepPlan
from baton.engine.program.config import ModelConfig
from baton.kernels.registry import kernels
from baton.kv.layout.page import layout_for
from baton.kv.layout.state import state_pages
from baton.protos.errors import ConfigError
from baton.protos.nouns import Sampling
from baton.quantize import run as running
from baton.quantize.layer_quantizer import quantized_names
from baton.quantize.layers import layers_of, outside_layers, page_views, plain_products
from baton.quantize.run import quantize
from baton.quantize.schemes import COMPRESSED, Recipe
from baton.quantize.source import Source
from tests.conformance.checkpoints import BASE, make
from tests.conformance.drive import Driver
from tests.conformance.encoders import make_encoder
from tests.conformance.kinds import KINDS
from tests.conformance.small_kinds import SMALL, SMALL_BASE
from tests.quantize.test_run import Moved, loaded
from tests.thorough import first_now, later

SIZES = {  # that blocks of 64 and packs of 8 divide
    "hidden_size": 128,
    "intermediate_size": 256,
    "head_dim": 32,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "intermediate_size_mlp": 128,
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 4,
    "mamba_head_dim": 32,
    "mamba_num_heads": 8,
    "ssm_state_size": 32,
    "mamba_d_state": 32,
    "mamba_dt_rank": 64,
    "shared_intermediate_size": 64,
    "laurel_rank": 64,
    "hidden_size_per_layer_input": 64,
}
STACKED = ("gpt_oss", "granite_hybrid", "llama4")  # whose tensors hold all experts of a layer
HEADS = {  # of those whose sizes depend on one another
    **{
        kind: {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
        for kind in ("llama3", "gemma2", "olmo2", "bamba")
    },
    "mistral": {"head_dim": 64},
    "phimoe": {"num_attention_heads": 8},
}
FIRST = ("deepseek_v3", "qwen3_next", "gemma3", "gemma3n", "jamba", *STACKED)
WITHOUT_TEXT = ("rtn", "nf4", "fp8", "mxfp4")  # what takes a model whose layers read the K and V of others
FAMILIES = sorted({*KINDS, *SMALL}, key=lambda kind: (kind not in FIRST, kind))
METHODS = {  # and how far a weight may be off, as a share of its largest; some move factors to other weights
    "rtn": 0.09, "gptq": 0.8, "awq": 4.0, "smoothquant": 4.0, "nf4": 0.2, "fp8": 0.04, "mxfp4": 0.3,
}  # fmt: skip
MOVED = ("starcoder2", "gemma3", "cohere2", "olmo3", "glm4", "qwen3_next", "deepseek_v3", "jamba")


def products(source: Source) -> set[str]:
    """Returns the names of the weights that are quantized."""
    plain = plain_products(source.program, Recipe("rtn"))
    return {name for ops in layers_of(source.program) for name in quantized_names(ops, plain)}


def checkpoint(folder: Path, kind: str) -> Path:
    fields = BASE | KINDS[kind] if kind in KINDS else SMALL_BASE | SMALL[kind]
    sizes: dict[str, Any] = {name: size for name, size in SIZES.items() if fields.get(name) is not None}
    return make(folder, kind, **sizes | HEADS.get(kind, {}))


def logits(folder: Path, weights: dict[str, Tensor], ids: list[int]) -> Tensor:
    """Returns the logits of each of ``ids`` in float32, computed by torch's ops from ``weights``."""
    program = program_for(ModelConfig.read(folder))
    program = own_head(program) if "head" in weights else program
    layout = layout_for("float32", program.groups, states=program.states)
    pages, state = -(-len(ids) // 16), state_pages(layout)
    kv = page_views(program, layout, pages + state)
    step = SequenceStep(
        0, ids[:-1], 0, range(pages), is_prefill=True, targets=ids[1:], state_to=range(pages, pages + state)
    )
    batch = BatchBuilder(program, torch.float32, "cpu").build(StepPlan((step,)))
    return Interpreter(program, weights, kernels(), layout).logits(batch, kv)[: len(ids) - 1]


@pytest.mark.parametrize("kind", first_now(FAMILIES, len(FIRST)))
def test_weights_are_read_as_they_were_written_and_others_stay(kind: str, tmp_path: Path) -> None:
    source = Source(str(checkpoint(tmp_path / "plain", kind)))
    quantize(source, Recipe("rtn", bits=8, group=32).checked(), (), tmp_path / "out")
    found, plain = loaded(tmp_path / "out"), source.wide(source.weights)
    rounded = products(source)
    assert rounded
    for name, weight in plain.items():
        if name in rounded:
            assert 0 < float((found[name] - weight).abs().max() / weight.abs().max()) < 0.006, name
        else:
            narrow = name == "head" or name in outside_layers(source.program)  # which run in bf16 here
            stays = weight.bfloat16().float() if narrow else weight
            assert torch.equal(found[name], stays), name


@pytest.mark.parametrize("kind", first_now(MOVED, 2))
def test_factors_moved_into_any_norm_leave_the_answers_alone(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, errors = checkpoint(tmp_path / "plain", kind), list[float]()
    source, samples = Source(str(folder)), torch.randint(3, 300, (8, 32)).tolist()
    exact = logits(folder, source.wide(source.weights), samples[0])
    for reach in (0.0, 0.7):
        monkeypatch.setattr(running, "scheme_of", lambda recipe, reach=reach: Moved(reach))
        out = tmp_path / str(reach)
        quantize(
            source, Recipe("rtn", bits=8, group=32, symmetric=False, format=COMPRESSED).checked(), samples, out
        )
        errors.append(float((logits(out, loaded(out), samples[0]) - exact).abs().mean()))
    assert errors[1] < 4 * errors[0] + 1e-3, "factors that were moved changed the answers"


@pytest.mark.parametrize(
    ("kind", "methods"),
    first_now(
        [*zip(STACKED, [["gptq"], ["nf4"], ["mxfp4"]], strict=True), *((kind, METHODS) for kind in FAMILIES)],
        len(STACKED),
    ),
)
def test_every_method_takes_every_family(kind: str, methods: Iterable[str], tmp_path: Path) -> None:
    source = Source(str(checkpoint(tmp_path / "plain", kind)))
    samples, plain = torch.randint(3, 300, (4, 32)).tolist(), source.wide(source.weights)
    names = products(source)
    for method in methods if kind != "gemma3n" else WITHOUT_TEXT:
        out = tmp_path / method
        quantize(source, Recipe(method, group=32, symmetric=method != "awq").checked(), samples, out)
        found = loaded(out)
        for name in names:
            off = float((found[name] - plain[name]).abs().max() / plain[name].abs().max())
            assert 0 < off < METHODS[method], (method, name)
        assert bool(logits(out, found, samples[0]).isfinite().all()), method


def test_gpt_oss_in_its_own_format_has_the_answers_that_transformers_gives(tmp_path: Path) -> None:
    folder, out = checkpoint(tmp_path / "plain", "gpt_oss"), tmp_path / "out"
    source, ids = Source(str(folder)), torch.randint(3, 300, (33,)).tolist()
    quantize(source, Recipe("mxfp4", format="mxfp4").checked(), (), out)
    found, plain = loaded(out), source.wide(source.weights)
    changed = {name for name in plain if not torch.allclose(found[name], plain[name], rtol=0.004)}  # bf16's
    assert changed == {f"{at}.experts_{part}" for at in range(3) for part in ("gate_up", "down")}
    theirs = GptOssForCausalLM.from_pretrained(
        out, quantization_config=Mxfp4Config(dequantize=True), dtype=torch.float32
    )
    with torch.inference_mode():
        exact = theirs.eval()(torch.tensor([ids])).logits[0, : len(ids) - 1]
    own = logits(out, plain | {name: found[name] for name in changed}, ids)
    assert torch.allclose(own, exact, atol=1e-3 * float(exact.abs().max()))


def test_gpt_osss_format_is_refused_for_another_model(tmp_path: Path) -> None:
    source = Source(str(checkpoint(tmp_path / "plain", "llama4")))
    with pytest.raises(ConfigError, match="--format mxfp4 holds gpt-oss's experts, and this model has none"):
        quantize(source, Recipe("mxfp4", format="mxfp4").checked(), (), tmp_path / "out")


@pytest.mark.parametrize("kind", ["bert", later("modernbert")])
def test_an_encoder_is_refused_by_the_name_of_an_op(kind: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="baton quantize takes decoders"):
        Source(str(make_encoder(tmp_path, kind)))


def test_a_text_is_refused_for_a_model_whose_layers_read_the_k_and_v_of_others(tmp_path: Path) -> None:
    source = Source(str(checkpoint(tmp_path / "plain", "gemma3n")))
    with pytest.raises(ConfigError, match="layers of this model read the K and V of others; use --method rtn, nf4"):
        quantize(source, Recipe("gptq", group=32).checked(), [[5] * 32], tmp_path / "out")


def test_a_quantized_model_whose_layers_read_the_k_and_v_of_others_is_served(tmp_path: Path) -> None:
    source, out = Source(str(checkpoint(tmp_path / "plain", "gemma3n"))), tmp_path / "out"
    quantize(source, Recipe("rtn", bits=8, group=32).checked(), (), out)
    left = msgspec.json.decode((out / "config.json").read_bytes())["quantization_config"]
    assert "model.altup_projections.0" in str(left), "matrices outside of layers stay as they are"
    prompt, ids = [3, 5, 7] * 9, torch.randint(3, 300, (33,)).tolist()
    exact = logits(out, source.wide(source.weights), ids)
    off = (logits(out, loaded(out), ids) - exact).norm() / exact.norm()
    assert off < 0.1
    runner = load_runner(EngineConfig(str(out), threads=1))
    assert len(Driver(runner, pages=60).answer([prompt], Sampling(temperature=0.0, max_tokens=8))[0]) == 8
