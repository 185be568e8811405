"""The layer of experts on the CPU: float64 oracle, bitwise company, ties, planted bugs."""

from __future__ import annotations

import ctypes

import pytest
import torch

from baton.kernels.abi import build, native
from baton.kernels.linear.packed import beside, one_of, quantize
from baton.kernels.moe.native import Experts, PackedExperts, moe
from baton.kernels.moe.reference import moe as reference
from baton.kernels.moe.reference import route
from tests.kernels import expert_adapters_suite
from tests.kernels import moe_suite as suite
from tests.kernels.conftest import needs_native
from tests.kernels.linear_suite import in_any_order
from tests.kernels.mutants import is_caught, mutant
from tests.thorough import first_now

pytestmark = needs_native


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("shape", [*suite.SHAPES, (600, 24, 16, 6, 2)], ids=str)
def test_experts_are_those_of_the_float64_oracle(
    library: ctypes.CDLL, shape: tuple[int, int, int, int, int], renormalise: bool
) -> None:
    suite.it_is_the_oracles(library, shape, renormalise)


@pytest.mark.parametrize("check", suite.CHECKS, ids=lambda check: check.__name__)
def test_checks_hold(library: ctypes.CDLL, check: suite.Check) -> None:
    check(library)


def test_biased_experts_are_those_of_the_float64_oracle(library: ctypes.CDLL) -> None:
    suite.biased_experts_are_the_oracles(library)


@pytest.mark.thorough
def test_a_limit_of_one_side_is_caught() -> None:
    assert is_caught(
        mutant("MOE_LIMIT", ("moe", "linear", "dense", "lora")), [suite.biased_experts_are_the_oracles]
    )


@pytest.mark.parametrize("check", expert_adapters_suite.CHECKS, ids=lambda check: check.__name__)
def test_checks_with_adapters_beside_experts_hold(library: ctypes.CDLL, check: expert_adapters_suite.Check) -> None:
    check(library)


@pytest.mark.thorough
def test_an_adapter_of_another_row_is_caught() -> None:
    bug = mutant("MOE_ADAPTER", ("moe", "linear", "dense", "lora"))
    assert is_caught(bug, expert_adapters_suite.CHECKS)


def test_threads_change_no_bit(library: ctypes.CDLL) -> None:
    case, before, found = suite.Case(2, (40, 72, 96, 6, 2)), native._threads, []
    for count in (1, 2, 5):
        native.set_threads(count)
        found.append(moe(library, case.experts, case.x, case.logits))
    native.set_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("shape", suite.SHAPES[1:4], ids=str)
def test_float32_experts_round_nothing(library: ctypes.CDLL, shape: tuple[int, int, int, int, int]) -> None:
    case = suite.Case(9, shape)
    case.experts = Experts(case.experts.gate_up.float(), case.experts.down.float(), shape[4])
    found = moe(library, case.experts, case.x, case.logits)
    assert bool(((found - case.oracle()).norm(dim=-1) <= 2e-6 * case.oracle().norm(dim=-1)).all())
    assert torch.equal(moe(library, case.experts, case.x[1:2], case.logits[1:2]), found[1:2])


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("shape", suite.SHAPES[1:4], ids=str)
def test_packed_experts_are_the_references(
    library: ctypes.CDLL, shape: tuple[int, int, int, int, int], bits: int
) -> None:
    """Rows are rounded alike, so that only float32 sums differ; each row alone has the same bits."""
    case, group = suite.Case(9, shape), 0 if bits == 8 else 16
    layers = case.experts.gate_up.nan_to_num().float(), case.experts.down.nan_to_num().float()
    packed = [beside([quantize(one, bits, group) for one in layer]) for layer in layers]
    assert all(weight is not None for weight in packed)
    experts = PackedExperts(*packed, shape[4], True, shape[3])  # type: ignore[arg-type]
    found = moe(library, experts, case.x, case.logits)
    wanted = reference(case.x, case.logits, *experts.singly(), shape[4])
    assert bool(((found - wanted).norm(dim=-1) <= 2e-2 * wanted.norm(dim=-1)).all())
    assert float((found - wanted).norm() / wanted.norm()) < 4e-3
    for row in (0, 2):
        alone = moe(library, experts, case.x[row : row + 1], case.logits[row : row + 1].contiguous())
        assert torch.equal(alone, found[row : row + 1])


@pytest.mark.parametrize("shape", suite.SHAPES[1:3], ids=str)
def test_experts_take_their_inputs_each_in_its_own_order(
    library: ctypes.CDLL, shape: tuple[int, int, int, int, int]
) -> None:
    """The first expert's inputs are in order, the second one's gates and ups have two orders, others one."""
    case, counts = suite.Case(9, shape), (0, 2, *[1] * shape[3])
    layers = case.experts.gate_up.nan_to_num().float(), case.experts.down.nan_to_num().float()
    packed = []
    for layer in layers:
        each = (quantize(one, 4, 16) for one in layer)
        packed.append(beside([in_any_order(one, n) if n else one for one, n in zip(each, counts, strict=False)]))
    assert all(weight is not None and weight.is_ordered for weight in packed)
    experts = PackedExperts(*packed, shape[4], True, shape[3])  # type: ignore[arg-type]
    found = moe(library, experts, case.x, case.logits)
    wanted = reference(case.x, case.logits, *experts.singly(), shape[4])
    assert float((found - wanted).norm() / wanted.norm()) < 4e-3


def test_experts_beside_each_other_are_taken_apart_again() -> None:
    weights = [quantize(torch.randn(40, 64), 4, 32) for _ in range(3)]
    whole = beside(weights)
    assert whole is not None
    assert whole.n == 3 * 64
    for at, weight in enumerate(weights):
        assert torch.equal(one_of(whole, at, 3, 40).dequantized(), weight.dequantized())
    assert beside([weights[0], quantize(torch.randn(40, 64), 8, 0)]) is None


def test_weights_are_a_softmax_over_the_chosen_or_over_all() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0]])
    experts, weights = route(logits, 2, True)
    assert experts.tolist() == [[1, 3]]
    assert weights.tolist() == [[0.5, 0.5]]
    assert torch.equal(route(logits, 2, False)[1], logits.softmax(-1)[:, [1, 3]])


@pytest.mark.parametrize("bug", first_now(["MOE_TIES", "MOE_PLACE"], 0))
def test_a_planted_bug_is_caught(bug: str) -> None:
    assert is_caught(mutant(bug, ("moe", "linear", "dense", "lora")), suite.QUICK)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "isa", [name for name in native.testable() if name != native.isa() and not name.startswith("amx")]
)
def test_experts_of_many_rows_have_the_same_bits_on_each_isa(library: ctypes.CDLL, isa: str) -> None:
    """Rows and outputs that are multiples of neither of those taken at once, with adapters beside some rows."""
    other, case = native.load(build.built(isa)), suite.Case(3, (91, 137, 39, 3, 2))
    for experts in (case.experts, expert_adapters_suite.plain(case)):
        given = [(list(range(0, 70, 2)), expert_adapters_suite.Adapter(experts, (0, 1, 2), 4))]
        for beside_rows in ([], given):
            mine, theirs = (
                expert_adapters_suite.run(each, experts, case.x, case.logits, beside_rows)
                for each in (library, other)
            )
            assert torch.equal(mine, theirs)


@pytest.mark.thorough
@pytest.mark.parametrize("isa", [name for name in native.testable() if name != native.isa()])
def test_other_instruction_sets_agree_with_the_oracle(isa: str) -> None:
    other = native.load(build.built(isa))
    suite.it_is_the_oracles(other, suite.SHAPES[2])
    suite.company_changes_no_bit(other)
