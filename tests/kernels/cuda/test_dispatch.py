"""Which kernels a library launches for how many multiprocessors: by count, by form, with the same results.

A card has 132 where the shim has 3, so that each takes others for the same shape.
"""

from __future__ import annotations

import pytest
import torch

from baton.kernels.abi.build import BuildError
from baton.kernels.cuda import library, names
from baton.kernels.linear import cpu
from tests.kernels import linear_suite as suite
from tests.kernels.cuda import test_linear as few
from tests.kernels.cuda import test_prefill as many
from tests.thorough import first_now

FEWEST, SHIM, CARD, MOST = 1, 3, 132, 1_000_000
# n, k, m: three tiles of 128 rows by 256 outputs, of which ``wide`` makes six of 128 by 128.
SHAPE = (300, 200, 130)
FORMS = {"bf16": 0, "int8": 1, "e4m3": 4}


def kernels(launched: frozenset[str]) -> set[str]:
    return {each for each in launched if not each.startswith("linear round_rows")}


@pytest.mark.parametrize("form", first_now(list(FORMS), 2))
def test_each_count_takes_its_kernel_and_the_results_are_the_same(form: str) -> None:
    """These are the three ways of a product of many rows; the shim alone never takes two of them at this shape."""
    torch.manual_seed(41)
    n, k, m = SHAPE
    weight, x, checked, number = many.made(form, n, k), torch.randn(m, k), few.library(), FORMS[form]
    ways = {
        SHIM: f"linear prefill<{number}>",
        6: f"linear wide<{number}, 0>",
        CARD: f"linear skinny<{number}, 0, 8>",
    }
    found = {}
    for count, kernel in ways.items():
        with checked.rehearsal.dispatching(count) as seen:  # type: ignore[attr-defined]
            found[count] = cpu.run(suite.bound(checked), x, weight)
        assert kernels(seen.launched()) == {kernel}
    assert suite.off(found[CARD], suite.exact(x, weight)) < 2e-6 or form == "e4m3"
    for count in ways:
        assert torch.equal(found[count], found[CARD])


@pytest.mark.parametrize("form", ["int4 g32", "int8 g16"])
def test_groups_take_tiles_of_few_rows_on_a_card_and_are_right(form: str) -> None:
    torch.manual_seed(42)
    weight, x, checked = suite.FORMS[form](torch.randn(300, 200)), torch.randn(70, 200), few.library()
    found = {}
    for count, kernel in ((SHIM, "wide"), (CARD, "skinny")):
        with checked.rehearsal.dispatching(count) as seen:  # type: ignore[attr-defined]
            found[count] = cpu.run(suite.bound(checked), x, weight)
        assert {each.split()[1].split("<")[0] for each in kernels(seen.launched())} == {kernel}
    assert torch.equal(found[SHIM], found[CARD])
    assert suite.off(found[CARD], suite.exact(x, weight)) < 2e-6


@pytest.mark.thorough
@pytest.mark.parametrize("check", suite.SHARED_CHECKS, ids=lambda check: check.__name__)
def test_the_cpus_suite_holds_for_as_many_as_a_card_has(check) -> None:  # type: ignore[no-untyped-def]
    checked = few.library()
    with checked.rehearsal.dispatching(CARD) as seen:  # type: ignore[attr-defined]
        check(checked)
    assert not {each for each in seen.launched() if each.startswith("linear prefill")}


@pytest.mark.thorough
@pytest.mark.parametrize(("form", "n", "k", "m"), many.CASES)
def test_many_rows_are_right_for_as_many_as_a_card_has(form: str, n: int, k: int, m: int) -> None:
    checked = few.library()
    with checked.rehearsal.dispatching(CARD):  # type: ignore[attr-defined]
        suite.is_the_exact_oracles(checked, form, n, k, m, torch.float32)


def test_the_count_is_what_it_was_behind_the_block() -> None:
    torch.manual_seed(43)
    weight, x, checked = many.made("bf16", 300, 72), torch.randn(130, 72), few.library()
    found = []
    for _ in range(2):
        checked.rehearsal.note()  # type: ignore[attr-defined]
        cpu.run(suite.bound(checked), x, weight)
        found.append(kernels(checked.rehearsal.launched()))  # type: ignore[attr-defined]
        count = FEWEST if "linear skinny<0, 0, 8>" in found[0] else MOST
        with pytest.raises(ZeroDivisionError), checked.rehearsal.dispatching(count):  # type: ignore[attr-defined]
            raise ZeroDivisionError
    assert found[0] == found[1]


def test_a_count_by_the_environment_holds_from_the_start_and_no_other_word_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(44)
    weight, x = many.made("bf16", 300, 72), torch.randn(130, 72)
    monkeypatch.setenv(library.PROCESSORS_ENV, str(CARD))
    checked = few.library()
    try:
        checked.rehearsal.note()  # type: ignore[attr-defined]
        cpu.run(suite.bound(checked), x, weight)
        assert kernels(checked.rehearsal.launched()) == {"linear skinny<0, 0, 8>"}  # type: ignore[attr-defined]
    finally:
        checked.rehearsal.processors(0)  # type: ignore[attr-defined]
    monkeypatch.setenv(library.PROCESSORS_ENV, "many")
    with pytest.raises(BuildError, match="BATON_CUDA_PROCESSORS: 'many' is no number of multiprocessors"):
        few.library()


def test_launches_of_a_bug_that_may_be_caught_show_nothing_of_the_kernel() -> None:
    torch.manual_seed(45)
    weight, x = many.made("bf16", 40, 200), torch.randn(130, 200)
    broken = many.planted("NONE")
    broken.rehearsal.note()  # type: ignore[attr-defined]
    cpu.run(suite.bound(broken), x, weight)
    assert broken.rehearsal.launched() == frozenset()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("baton::{anonymous}::wide<0, 1>", "wide<0, 1>"),
        (
            "baton::_GLOBAL__N__464b9a8c_4_cuda_cu_main::rr<short unsigned int, 3, true>",
            "rr<unsigned short, 3, true>",
        ),
        ("baton::{anonymous}::swiglu<float4>", "swiglu<float4>"),
        ("{anonymous}::route", "route"),
    ],
)
def test_what_either_compiler_calls_a_kernel_becomes_the_ledgers_name(said: str, name: str) -> None:
    line = f"/x/kernels/linear/prefill.cuh\tconst char* baton::kernel_name() [with auto Kernel = {said}]"
    assert names.noted(line) == f"linear {name}"
