"""The native step's small ops and its head: float64 oracles, the reference's sampling, chi-square, planted bugs."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from baton.engine.plan import SampleSpec
from baton.engine.sampling import choose
from baton.kernels.abi import native
from baton.kernels.abi.native import I32, I64, P, declare
from baton.kernels.dense.packed import pack_f32
from baton.kernels.linear.packed import PackedWeight, pack_bf16, quantize
from baton.kernels.registry import kernels
from baton.kernels.rms_norm.reference import normed
from baton.kernels.step.structs import CHOICE
from baton.protos.nouns import Sampling
from tests.kernels.mutants import is_caught, mutant
from tests.kernels.rows_suite import embedding_widens, norms_are_right, rms_norm, swiglu_is_exact

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native kernels here")
K = kernels()


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    found = native.library()
    assert found is not None
    return found


def dense(library: ctypes.CDLL, weight: PackedWeight, x: Tensor, bias: Tensor | None = None) -> Tensor:
    call = declare(library, "dense", P, P, I64, I64, P, P, I64)
    out = torch.full((len(x), weight.n + 3), torch.nan)
    at_bias = None if bias is None else bias.data_ptr()
    call(weight.address, x.data_ptr(), x.stride(0), len(x), at_bias, out.data_ptr(), out.stride(0))
    assert bool(torch.isnan(out[:, weight.n :]).all()), "it wrote past its columns"
    return out[:, : weight.n]


def test_norms_are_those_of_float64(library: ctypes.CDLL) -> None:
    norms_are_right(library)


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="torch sums in other lanes here")
@pytest.mark.parametrize("hidden", [8, 40, 96, 257, 1000, 2048, 5000, 16384])
def test_norms_have_the_bits_of_the_reference(library: ctypes.CDLL, hidden: int) -> None:
    x, weight = torch.randn(50, hidden) * 3, torch.rand(hidden) + 0.5
    assert torch.equal(rms_norm(library, x.clone(), None, weight, 1e-5), normed(x, weight, 1e-5))


def test_a_norm_without_its_epsilon_is_caught() -> None:
    assert is_caught(mutant("NORM", ("rms_norm",)), [norms_are_right])


def test_swiglu_is_exact_at_any_size_and_sign(library: ctypes.CDLL) -> None:
    swiglu_is_exact(library)


def test_embedding_widens_its_table(library: ctypes.CDLL) -> None:
    embedding_widens(library)


@pytest.mark.parametrize(("n", "k"), [(1, 1), (63, 24), (64, 256), (65, 257), (200, 1000)])
def test_dense_float32_is_close_to_float64_and_a_rows_bits_are_its_own(
    library: ctypes.CDLL, n: int, k: int
) -> None:
    weight, bias = torch.randn(n, k), torch.randn(n)
    packed, x = pack_f32(weight), torch.randn(400, k)
    whole = dense(library, packed, x, bias)
    exact = x.double() @ weight.double().T + bias
    assert float((whole - exact).norm() / exact.norm()) < 1e-6
    for begin, end in ((0, 1), (7, 13), (390, 400), (191, 194)):
        assert torch.equal(dense(library, packed, x[begin:end], bias), whole[begin:end])


@pytest.mark.parametrize("k", [1, 192, 193, 240, 383, 384, 600, 1200])
@pytest.mark.parametrize("biased", [False, True])
def test_dense_float32_adds_bias_and_chains_in_order(library: ctypes.CDLL, k: int, biased: bool) -> None:
    """Chains of 192 inputs, of fewer than 384 the half: each multiply-add rounds once, each chain is added once."""
    weight, x = torch.randn(70, k), torch.randn(9, k)
    bias = torch.randn(70) if biased else None
    chain = k // 2 if 192 < k < 384 else 192
    wanted = torch.zeros(9, 70) if bias is None else bias.expand(9, 70)
    for begin in range(0, k, chain):
        total = torch.zeros(9, 70)
        for at in range(begin, min(begin + chain, k)):
            total = (total.double() + x[:, at, None].double() * weight[:, at].double()).float()
        wanted = wanted + total
    same = (dense(library, pack_f32(weight), x, bias) == wanted).float().mean()
    assert float(same) > 0.99, "rounding by way of double may differ from a fused multiply-add, hardly ever"


# ---- the head ----


def ask(**fields: Any) -> SampleSpec:
    history = fields.pop("history", [1, 2, 3])
    prompt, banned = fields.pop("prompt", 1), fields.pop("banned", ())
    allowed = fields.pop("allowed", None)
    sampling = Sampling(**({"temperature": 0.0} | fields))
    return SampleSpec(sampling, 0, len(history), history, prompt, banned, allowed)


def drawn(library: ctypes.CDLL, weight: PackedWeight, x: Tensor, specs: list[SampleSpec]) -> list[int]:
    from baton.engine.native_batch import fill

    choices, kept = np.zeros(len(specs), CHOICE), []
    for row, spec in enumerate(specs):
        kept += fill(choices[row], spec, weight.n)
    call = declare(library, "lm_head", P, P, I64, I32, P)
    call(weight.address, x.data_ptr(), x.stride(0), len(specs), choices.ctypes.data)
    return choices["token"].tolist()


EDITS: list[dict[str, Any]] = [
    {},
    {"banned": (3, 9, 5000)},
    {"logit_bias": {7: 4.0, 40: -100.0, 900: 1.0}},
    {"repetition_penalty": 1.7, "history": [4, 8, 15, 16, 23, 42, 42]},
    {"frequency_penalty": 0.4, "presence_penalty": 0.9, "history": [2, 2, 2, 71, 71], "prompt": 2},
    {"allowed": lambda vocab: np.arange(vocab) % 3 == 0},
]
DRAWS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 3.0},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 0.8, "top_p": 0.7},
    {"temperature": 1.3, "min_p": 0.2},
    {"temperature": 1.0, "top_k": 50, "top_p": 0.9, "min_p": 0.02},
]


@pytest.mark.parametrize("vocab", [5, 64, 777, 3001])
def test_tokens_are_those_of_the_reference_with_the_same_seed(library: ctypes.CDLL, vocab: int) -> None:
    torch.manual_seed(vocab)
    weight, k = torch.randn(vocab, 40), pack_f32
    specs = [
        ask(**edit, **draw, seed=seed)
        for edit in EDITS
        for draw in DRAWS
        for seed in range(3)
        if max(edit.get("history", [0])) < vocab
    ]
    x = torch.randn(len(specs), 40) * 0.5
    packed = k(weight)
    logits = dense(library, packed, x)
    wanted = [found.token_id for found in choose(logits.clone(), range(len(specs)), specs, K.sample)]
    found = drawn(library, packed, x, specs)
    assert sum(a != b for a, b in zip(found, wanted, strict=True)) <= len(specs) // 200


@pytest.mark.parametrize("pack", [pack_bf16, lambda w: quantize(w, 8, 0), lambda w: quantize(w, 4, 32)])
def test_a_rows_choice_is_the_same_alone_whatever_the_weights(library: ctypes.CDLL, pack: Any) -> None:
    packed, x = pack(torch.randn(1500, 64)), torch.randn(len(DRAWS) * 4, 64)
    specs = [ask(**draw, seed=seed) for draw in DRAWS for seed in range(4)]
    together = drawn(library, packed, x, specs)
    for row, spec in enumerate(specs):
        assert drawn(library, packed, x[row : row + 1], [spec]) == [together[row]]


@pytest.mark.parametrize("fields", [{}, {"top_k": 20}, {"top_p": 0.8}, {"min_p": 0.1}], ids=str)
def test_frequencies_follow_the_softmax(library: ctypes.CDLL, fields: dict[str, Any]) -> None:
    """Chi-square over 100,000 draws of 100 tokens."""
    torch.manual_seed(4)
    weight, x, draws = torch.randn(100, 8), torch.randn(1, 8), 100_000
    packed = pack_f32(weight)
    logits = dense(library, packed, x)[0].double()
    probs = logits.softmax(-1)
    if "top_k" in fields:
        probs[logits < logits.topk(20).values[-1]] = 0
    if "top_p" in fields:
        falling, order = probs.sort(descending=True)
        probs[order[falling.cumsum(0) - falling >= 0.8]] = 0
    if "min_p" in fields:
        probs[probs < 0.1 * probs.max()] = 0
    probs /= probs.sum()
    counts = torch.zeros(100, dtype=torch.int64)
    many = x.expand(1000, 8).contiguous()
    for batch in range(draws // 1000):
        specs = [ask(temperature=1.0, seed=batch * 1000 + i, **fields) for i in range(1000)]
        counts += torch.bincount(torch.tensor(drawn(library, packed, many, specs)), minlength=100)
    assert bool((counts[probs == 0] == 0).all())
    likely = probs * draws >= 5
    expected = probs[likely] * draws
    chi = float(((counts[likely] - expected).square() / expected).sum())
    freedom = int(likely.sum()) - 1
    assert chi < freedom + 5 * math.sqrt(2 * freedom)


def test_a_row_without_a_finite_logit_is_reported_and_its_neighbours_are_not_touched(library: ctypes.CDLL) -> None:
    packed, x = pack_f32(torch.randn(300, 16)), torch.randn(3, 16)
    fine = drawn(library, packed, x, [ask(), ask(), ask()])
    x[1] = torch.nan
    assert drawn(library, packed, x, [ask(), ask(), ask()]) == [fine[0], -1, fine[2]]
    x[1] = 0
    assert drawn(library, packed, x, [ask(), ask(allowed=lambda n: np.zeros(n, bool)), ask()])[1] == -1


def test_ties_take_the_first_token(library: ctypes.CDLL) -> None:
    weight = torch.zeros(200, 8)
    weight[[70, 130, 199]] = 1
    assert drawn(library, pack_f32(weight), torch.ones(1, 8), [ask()]) == [70]
