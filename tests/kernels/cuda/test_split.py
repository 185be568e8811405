"""Products of few tiles, split along K (linear/many/split.cuh) on the SIMT shim: results, bits, planted bugs.

A product of one tile is split into as many parts as the device is said to have multiprocessors: 8, 4 or 2.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from baton.kernels.abi.native import I64, P, declare
from baton.kernels.linear import cpu, reference
from baton.kernels.linear.packed import PackedWeight
from tests.kernels import linear_suite as suite
from tests.kernels.cuda import test_linear as few
from tests.kernels.cuda import test_prefill as many
from tests.kernels.mutants import is_caught
from tests.thorough import first_now

CARD = 132
PARTS = (8, 4, 2)
BY_WARP_GROUPS = {"bf16": 0, "int8": 1, "e4m3": 4, "fp8 row": 0}
BY_TILES = {
    "int4 g32": "wide<2, 1>",
    "int4 row": "wide<2, 0>",
    "int8 g16": "wide<1, 2>",
    "int4 g64 mins": "wide<2, 2>",
}
FORMS = (*BY_WARP_GROUPS, *BY_TILES)


def kernel_of(form: str) -> str:
    return BY_TILES[form] if form in BY_TILES else f"prefill<{BY_WARP_GROUPS[form]}>"


def multiplied(
    library: ctypes.CDLL, parts: int, x: Tensor, weight: PackedWeight, bias: Tensor | None = None
) -> tuple[Tensor, set[str]]:
    """Returns the result where the device has ``parts`` multiprocessors, guarded, and the kernels launched."""
    with library.rehearsal.dispatching(parts) as seen:  # type: ignore[attr-defined]
        found = suite.guarded(library, x, weight, bias)
    return found, {each.removeprefix("linear ") for each in seen.launched() if "round_rows" not in each}


def rows_of(form: str, m: int, k: int) -> Tensor:
    """Returns rows that rounding leaves as they are, because a tie may be rounded otherwise than in the oracle."""
    if form == "e4m3":
        x, most = (torch.randn(m, k) * 50).to(torch.float8_e4m3fn).float(), 448.0
    elif form.startswith("int"):
        x, most = torch.randint(-127, 128, (m, k)).float(), 127.0
    else:
        return torch.randn(m, k)
    x[:, 0] = most
    return x


def wanted(form: str, x: Tensor, weight: PackedWeight, bias: Tensor) -> Tensor:
    if form != "e4m3":
        return suite.exact(x, weight, bias)
    q, scale = reference.e4m3_rows(x)
    return (q.double() @ weight.dequantized(torch.float64).T) * scale.double() + bias.double()


@pytest.mark.parametrize("parts", first_now(PARTS))
@pytest.mark.parametrize("form", first_now(FORMS, 2))
def test_a_product_in_parts_is_the_float64_oracles(form: str, parts: int) -> None:
    torch.manual_seed(51)
    wide = form in BY_TILES and parts == 2  # two tiles of five processors: one tile would fill half of two
    for n, k, m in ((194, 1000, 70), (255, 1536, 128)) if wide else ((66, 1000, 70), (127, 1536, 128)):
        weight, bias, x = many.made(form, n, k), torch.randn(n), rows_of(form, m, k)
        found, kernels = multiplied(few.library(), 5 if wide else parts, x, weight, bias)
        assert kernels == {kernel_of(form), f"add_parts<{parts}>"}
        assert suite.off(found, wanted(form, x, weight, bias)) < 2e-6


@pytest.mark.parametrize("form", first_now(FORMS, 2))
def test_eight_parts_have_the_bits_of_one_piece_and_integers_always_do(form: str) -> None:
    torch.manual_seed(52)
    weight, x, checked = many.made(form, 100, 1000), torch.randn(128, 1000), few.library()
    whole, kernels = multiplied(checked, 1, x, weight)
    assert kernels == {kernel_of(form)}
    for parts in (8, 4) if form in ("int8", "int4 row") else (8,):
        assert torch.equal(multiplied(checked, parts, x, weight)[0], whole)


def test_slices_that_end_within_a_stage_are_split_where_they_can_be() -> None:
    """Slices of 96 inputs: eight parts of the warp groups', four of the tiles', whose stages hold 64 inputs."""
    torch.manual_seed(53)
    for form, kernels in (
        ("bf16", {"prefill<0>", "add_parts<8>"}),
        ("int8", {"prefill<1>", "add_parts<8>"}),
        ("int4 g32", {"skinny<2, 1, 8>"}),
    ):
        weight, x = many.made(form, 40, 760), rows_of(form, 65, 760)
        found, launched = multiplied(few.library(), 8, x, weight)
        assert launched == kernels
        assert suite.off(found, suite.exact(x, weight)) < 2e-6
    weight, x = many.made("int4 g32", 40, 760), rows_of("int4", 65, 760)
    found, launched = multiplied(few.library(), 4, x, weight)
    assert launched == {"wide<2, 1>", "add_parts<4>"}
    assert suite.off(found, suite.exact(x, weight)) < 2e-6


def test_an_inner_size_of_fewer_slices_stays_whole() -> None:
    torch.manual_seed(54)
    weight, x = many.made("bf16", 40, 72), torch.randn(65, 72)  # three slices
    found, launched = multiplied(few.library(), 8, x, weight)
    assert launched == {"skinny<0, 0, 8>"}
    assert suite.off(found, suite.exact(x, weight)) < 2e-6


@pytest.mark.parametrize("form", first_now(FORMS, 2))
def test_a_gate_is_applied_behind_all_parts(form: str) -> None:
    torch.manual_seed(55)
    checked, inner, m = few.library(), 64, 100
    weight, bias, x = many.made(form, 2 * inner, 1000), torch.randn(2 * inner), torch.randn(m, 1000)
    both, out = multiplied(checked, 8, x, weight, bias)[0], torch.empty(m, inner)
    declare(checked, "swiglu", P, I64, I64, P)(both.data_ptr(), m, inner, out.data_ptr())
    with checked.rehearsal.dispatching(8) as seen:  # type: ignore[attr-defined]
        assert torch.equal(few.run(checked, "linear_swiglu", x, weight, bias, inner), out)
    assert "linear add_parts<8>" in seen.launched()


@pytest.mark.parametrize("form", first_now(["bf16", "int8", "int4 g32"], 2))
def test_bfloat16_rows_in_and_out_of_parts(form: str) -> None:
    torch.manual_seed(56)
    weight, x = many.made(form, 66, 1000), torch.randn(70, 1000).bfloat16()
    for parts in PARTS:
        found, _ = multiplied(few.library(), parts, x, weight)
        assert suite.off(found, suite.exact(x, weight)) < 4e-3


def test_parts_of_an_earlier_product_are_never_added() -> None:
    """Memory keeps what a larger product left there, also what was not a number."""
    torch.manual_seed(57)
    checked, x = few.library(), torch.randn(70, 1000)
    weight = many.made("bf16", 66, 1000)
    clean = multiplied(checked, 8, x, weight)[0]
    for parts in (8, 4):
        multiplied_nan = torch.full((128, 2000), torch.nan)
        with checked.rehearsal.dispatching(parts):  # type: ignore[attr-defined]
            assert bool(cpu.run(suite.bound(checked), multiplied_nan, many.made("bf16", 256, 2000)).isnan().all())
        assert torch.equal(multiplied(checked, 8, x, weight)[0], clean)


def test_rows_that_are_not_numbers_stay_alone_in_parts() -> None:
    torch.manual_seed(58)
    checked = few.library()
    for form in ("bf16", "int8"):
        weight, x = many.made(form, 66, 1000), torch.randn(100, 1000)
        clean = multiplied(checked, 4, x, weight)[0]
        x[2, 999], x[64, 11] = torch.nan, torch.inf
        with checked.rehearsal.dispatching(4):  # type: ignore[attr-defined]
            found = cpu.run(suite.bound(checked), x, weight)
        rest = [i for i in range(100) if i not in (2, 64)]
        assert torch.equal(found[rest], clean[rest])
        assert not bool(found[[2, 64]].isfinite().any())


@pytest.mark.parametrize("form", ["bf16", "int4 g32"])
def test_no_schedule_changes_a_bit_of_parts_and_none_races(form: str) -> None:
    torch.manual_seed(59)
    weight, x = many.made(form, 40, 512), torch.randn(65, 512)
    first = multiplied(few.library(), 4, x, weight)[0]
    for seed in few.SEEDS:
        for other in (few.library(seed=seed, preempt=100), few.library(seed=seed, races=True)):
            assert torch.equal(multiplied(other, 4, x, weight)[0], first)


# n of an 8B's narrowest matrices; a short K, so that the shim computes them.
CARD_CASES = (
    ("bf16", 4096, 65, {"prefill<0>", "add_parts<8>"}),
    ("bf16", 4096, 129, {"prefill<0>", "add_parts<4>"}),
    ("bf16", 6144, 65, {"prefill<0>", "add_parts<4>"}),
    ("int4 g32", 4096, 65, {"wide<2, 1>", "add_parts<4>"}),
    ("int4 g32", 4096, 129, {"wide<2, 1>", "add_parts<2>"}),
)


@pytest.mark.parametrize(("form", "n", "m", "kernels"), first_now(CARD_CASES))
def test_a_cards_narrow_matrices_are_split_above_64_rows(form: str, n: int, m: int, kernels: set[str]) -> None:
    torch.manual_seed(60)
    k = 256 if form == "bf16" else 512
    weight, x = many.made(form, n, k), rows_of(form, m, k)
    found, launched = multiplied(few.library(), CARD, x, weight)
    assert launched == kernels
    assert suite.off(found, suite.exact(x, weight)) < 2e-6


def in_parts_and_in_one_piece(lib: ctypes.CDLL) -> None:
    torch.manual_seed(61)
    weight, x = many.made("bf16", 40, 1000), torch.randn(70, 1000)
    whole = multiplied(lib, 1, x, weight)[0]
    assert suite.off(whole, suite.exact(x, weight)) < 2e-6
    assert torch.equal(multiplied(lib, 8, x, weight)[0], whole)


# A part left out, at another's place, from another's inputs; parts added last to first.
BUGS = ("LAST", "PLACE", "BEGIN", "ORDER")


def planted(bug: str) -> ctypes.CDLL:
    """Built for bf16 and many rows alone."""
    return few.library(f"-DBATON_MUTATION_CUDA_LINEAR_SPLIT_{bug}", "-DBATON_MUTATION_CUDA_LINEAR_MANY")


def test_without_a_bug_parts_and_one_piece_agree() -> None:
    in_parts_and_in_one_piece(planted("NONE"))


@pytest.mark.parametrize("bug", first_now(BUGS))
def test_a_planted_bug_of_parts_is_caught(bug: str) -> None:
    checks: list[Callable[[ctypes.CDLL], None]] = [in_parts_and_in_one_piece]
    assert is_caught(planted(bug), checks)
