"""Checkpoints that come quantized, on several ranks: own rows, or layers, of what is packed have the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.kernels.abi import native
from tests.engine.backends.ranks.same_bits import same_bits
from tests.engine.quant import forms
from tests.thorough import first_now

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native kernels here")

FORMS = {
    "gptq desc_act": forms.gptq(order=True),
    "gptq desc_act apart": forms.gptq(order=True, alike=False),
    "awq": forms.awq(),
    "gptq": forms.gptq(),
    "gptq asymmetric": forms.gptq(symmetric=False),
    "gptq desc_act 8 bits": forms.gptq(bits=8, order=True, symmetric=False),
    "int8 channel": forms.compressed("int8", "channel"),
    "fp8 blocks": forms.fp8_blocks(),
    "int4 packed": forms.compressed("int4", "group"),
}
BLOCKS = ["Q4_K", "IQ4_NL", "MXFP4", "Q8_0", "Q6_K", "Q4_0"]
SHARES = ["tp", "cp", "pp"]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("BATON_CACHE_DIR", str(Path(native.built(native.isa())).parents[1]))
    return str(tmp_path / "cache")


@pytest.mark.parametrize("form", first_now(list(FORMS), 1))
def test_a_quantized_checkpoint_has_the_bits_of_one_rank(tmp_path: Path, cache: str, form: str) -> None:
    coded, _ = forms.write(forms.base(tmp_path / "base"), tmp_path, FORMS[form])
    for share in SHARES:
        same_bits(coded, 2, share, cache_dir=cache)


@pytest.mark.parametrize("kind", first_now(BLOCKS, 1))
def test_a_gguf_has_the_bits_of_one_rank(tmp_path: Path, cache: str, kind: str) -> None:
    coded, _ = forms.write_gguf(forms.gguf_base(tmp_path / "base"), tmp_path, kind)
    for share in SHARES:
        same_bits(coded, 2, share, cache_dir=cache)


@pytest.mark.thorough
@pytest.mark.parametrize("form", ["awq", "gptq", "gptq desc_act apart", "fp8 blocks"])
def test_quantized_experts_have_the_bits_of_one_rank(tmp_path: Path, cache: str, form: str) -> None:
    coded, _ = forms.write(forms.experts_base(tmp_path / "base"), tmp_path, FORMS[form])
    for share in SHARES:
        same_bits(coded, 2, share, cache_dir=cache)
