"""Quantized checkpoints of every form: the values that they stand for, and the engine's answers from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from baton.engine.checkpoints.weights import LoadedWeights, load_weights
from baton.engine.config import EngineConfig
from baton.engine.models import program_for
from baton.engine.program.config import ModelConfig
from baton.engine.quant.ggml.blocks import KINDS as GGML_KINDS
from baton.engine.quant.gguf import gguf_name
from baton.kernels.linear.packed import CODES, E4M3_A16, W4, W4_ORDERED, W8, W8_ORDERED, PackedWeight, one_of
from baton.protos.errors import CheckpointError, ConfigError
from tests.engine.quant import forms

HALF = 6e-4  # of float16 scales that the checkpoint has in float32, or as a product
CASES = {
    "gptq": (forms.gptq(), W4, 1e-6),
    "gptq g128": (forms.gptq(group=128), W4, 1e-6),
    "gptq asymmetric": (forms.gptq(symmetric=False), W4, HALF),
    "gptq v2": (forms.gptq(symmetric=False, version=2), W4, HALF),
    "gptq 8 bits": (forms.gptq(bits=8), W8, 1e-6),
    "gptq 3 bits": (forms.gptq(bits=3), W4, 1e-6),
    "gptq 2 bits asymmetric": (forms.gptq(bits=2, symmetric=False), W4, HALF),
    "gptq desc_act": (forms.gptq(order=True), W4_ORDERED, 1e-6),
    "gptq desc_act 8 bits asymmetric": (forms.gptq(bits=8, order=True, symmetric=False), W8_ORDERED, HALF),
    "gptq desc_act apart": (forms.gptq(order=True, alike=False), W4_ORDERED, 1e-6),
    "awq": (forms.awq(), W4, HALF),
    "awq g64": (forms.awq(group=64), W4, HALF),
    "int8 channel": (forms.compressed("int8", "channel"), W8, 1e-6),
    "int8 group": (forms.compressed("int8", "group"), W8, 1e-6),
    "int8 asymmetric": (forms.compressed("int8_asymmetric", "channel"), W8, HALF),
    "fp8 tensor": (forms.compressed("fp8", "tensor"), E4M3_A16, 1e-6),
    "fp8 channel": (forms.compressed("fp8", "channel"), E4M3_A16, 1e-6),
    "fp8 blocks": (forms.fp8_blocks(), E4M3_A16, HALF),
    "int4 packed": (forms.compressed("int4", "group"), W4, 1e-6),
    "int4 packed by act-order": (forms.compressed("int4", "group", order=True), W4_ORDERED, 1e-6),
}
KINDS = {
    "Q4_0": (W4, 1e-6),
    **dict.fromkeys(("Q4_1", "Q2_K", "Q3_K", "Q4_K"), (W4, HALF)),
    "Q8_0": (W8, 1e-6),
    "Q5_0": (W8, 1e-6),
    **dict.fromkeys(("Q5_1", "Q5_K", "Q6_K"), (W8, HALF)),
    **dict.fromkeys(("IQ4_NL", "MXFP4"), (CODES, 1e-6)),
    "IQ4_XS": (CODES, HALF),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return forms.base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def gguf_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return forms.gguf_base(tmp_path_factory.mktemp("gguf"))


def loaded(directory: Path, cache: Path, **settings: object) -> LoadedWeights:
    config = EngineConfig(str(directory), cache_dir=str(cache), **settings)  # type: ignore[arg-type]
    read = ModelConfig.read(directory)
    return load_weights(config, directory, read, program_for(read), torch.float32)


def same_values(coded: Path, plain: Path, cache: Path, kind: int, most: float) -> None:
    found, twin = loaded(coded, cache), loaded(plain, cache)
    for name, wanted in twin.weights.items():
        assert isinstance(wanted, torch.Tensor)
        weight = found.weights[name]
        if isinstance(weight, PackedWeight):
            assert name == "head" or weight.kind == kind, name
            weight = weight.dequantized()
            bound = 4e-3 if name == "head" else most
            assert float((weight - wanted).norm() / wanted.norm()) <= bound, name
        else:
            assert torch.equal(weight, wanted), name
    assert found.fingerprint != twin.fingerprint
    assert loaded(coded, cache).fingerprint == found.fingerprint


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_holds_its_twins_values(base: Path, tmp_path: Path, case: str) -> None:
    form, kind, most = CASES[case]
    coded, plain = forms.write(base, tmp_path, form)
    same_values(coded, plain, tmp_path, kind, most)


@pytest.mark.parametrize(
    "case",
    ["gptq", "gptq desc_act", "gptq desc_act apart", "awq", "int8 channel", "fp8 blocks", "int4 packed"],
)
def test_experts_hold_their_twins_values(tmp_path: Path, case: str) -> None:
    form, kind, most = CASES[case]
    coded, plain = forms.write(forms.experts_base(tmp_path / "base"), tmp_path, form)
    found, twin = loaded(coded, tmp_path), loaded(plain, tmp_path)
    assert found.program.experts
    for op in found.program.experts:
        for name in (op.gate_up, op.down):
            packed, wanted = found.weights[name], twin.weights[name]
            assert isinstance(packed, PackedWeight)
            assert isinstance(wanted, torch.Tensor)
            assert packed.kind == kind
            for index, one in enumerate(wanted.unflatten(0, (op.experts, -1))):
                value = one_of(packed, index, op.experts, len(one)).dequantized()
                assert float((value - one).norm() / one.norm()) <= most


@pytest.mark.parametrize("kind", KINDS)
def test_a_gguf_holds_its_twins_values(gguf_base: Path, tmp_path: Path, kind: str) -> None:
    coded, plain = forms.write_gguf(gguf_base, tmp_path, kind)
    same_values(coded, plain, tmp_path, *KINDS[kind])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 5}, "bits is 5; GPTQ with 2, 3, 4 or 8"),
        ({"checkpoint_format": "marlin"}, "'marlin'; gptq and gptq_v2"),
        ({"quant_method": "awq", "bits": 8}, "bits is 8; AWQ with 4"),
        ({"quant_method": "awq", "version": "gemv"}, "'gemv'; gemm is known"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "'marlin-24'; known are int-quantized"),
        ({"quant_method": "hqq"}, "'hqq'; known are awq, bitsandbytes, compressed-tensors, fp8, gguf, gptq"),
    ],
)
def test_a_variant_that_is_not_known_is_refused_by_name(
    base: Path, tmp_path: Path, change: dict[str, object], message: str
) -> None:
    coded, _ = forms.write(base, tmp_path, forms.gptq())
    config = json.loads((coded / "config.json").read_text())
    config["quantization_config"] |= change
    (coded / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        loaded(coded, tmp_path)


def test_a_quantized_checkpoint_is_not_rounded_again(base: Path, tmp_path: Path) -> None:
    coded, _ = forms.write(base, tmp_path, forms.gptq())
    with pytest.raises(ConfigError, match="quantized already"):
        loaded(coded, tmp_path, quantization="int8")


def test_a_gguf_of_another_kind_or_damaged_is_refused_by_name(
    gguf_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coded, _ = forms.write_gguf(gguf_base, tmp_path, "Q8_0")
    whole = (coded / "model.gguf").read_bytes()
    (coded / "model.gguf").write_bytes(whole[:100])
    with pytest.raises(CheckpointError, match=r"model\.gguf is damaged or no GGUF \(100 bytes\)"):
        loaded(coded, tmp_path)
    (coded / "model.gguf").write_bytes(whole)
    monkeypatch.delitem(GGML_KINDS, "Q8_0")
    with pytest.raises(CheckpointError, match=r"model\.gguf: tensor blk\.0\.attn_q\.weight is Q8_0; known are F32"):
        loaded(coded, tmp_path)


def test_names_are_spelled_as_llama_cpp_spells_them() -> None:
    names = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    layer = ("input_layernorm.weight", "self_attn.q_proj.weight", "self_attn.q_proj.bias", "mlp.down_proj.weight")
    for name in [*names, *(f"model.layers.1.{part}" for part in layer)]:
        assert gguf_name(name) == forms.gguf_spelling(name)
