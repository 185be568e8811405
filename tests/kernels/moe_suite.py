"""The checks of moe, as functions of a library: the CPU's, the SIMT shim's, or one with a planted bug.

Knows nothing of pytest. The oracle is ``reference.py`` in float64, which rounds where the kernels do.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from baton.kernels.moe.native import Experts, moe
from baton.kernels.moe.reference import ExpertGate, route
from baton.kernels.moe.reference import moe as reference

# On the error's share of the oracle's norm: float32 sums, at times a rounding to bf16 that goes the other way.
CLOSE = 5e-4
# rows, hidden, inner, experts, chosen
SHAPES = (
    (1, 8, 8, 1, 1),
    (3, 40, 24, 5, 2),
    (33, 64, 136, 8, 2),
    (70, 200, 72, 3, 3),
    (5, 136, 264, 64, 8),
    (9, 16, 8, 40, 16),
)


class Case:
    """Random experts, of which those that nobody chooses are NaN, and rows between which lies NaN."""

    def __init__(self, seed: int, shape: tuple[int, int, int, int, int], renormalise: bool = True) -> None:
        torch.manual_seed(seed)
        rows, hidden, inner, experts, chosen = shape
        self.x = torch.full((rows, hidden + 3), torch.nan)[:, :hidden].copy_(torch.randn(rows, hidden))
        self.logits = torch.randn(rows, experts) * 2
        gate_up = torch.randn(experts, 2 * inner, hidden).bfloat16()
        down = torch.randn(experts, hidden, inner).bfloat16()
        idle = torch.ones(experts, dtype=torch.bool)
        idle[route(self.logits, chosen, True)[0].flatten()] = False
        gate_up[idle], down[idle] = torch.nan, torch.nan
        self.experts = Experts(gate_up, down, chosen, renormalise)

    def oracle(self, gate: ExpertGate | None = None) -> Tensor:
        """Returns the result in float64."""
        of = self.experts
        x, logits = self.x.double(), self.logits.double()
        return reference(x, logits, of.gate_up, of.down, of.chosen, of.renormalise, gate)

    def gate(self) -> ExpertGate:
        """A gate with biases, whose limit many rows pass."""
        experts, hidden, inner = self.experts.down.shape
        return ExpertGate(torch.randn(experts * 2 * inner) * 3, torch.randn(experts * hidden), 1.702, 2.5)


def close(found: Tensor, wanted: Tensor) -> bool:
    """Returns whether each row is close to the wanted one."""
    return bool(((found - wanted).norm(dim=-1) <= CLOSE * wanted.norm(dim=-1)).all())


def it_is_the_oracles(
    library: ctypes.CDLL, shape: tuple[int, int, int, int, int], renormalise: bool = True
) -> None:
    """Compares with the oracle, and asserts that nothing is written between the rows."""
    case = Case(7, shape, renormalise)
    wide = torch.full((shape[0], shape[1] + 5), torch.nan)
    found = moe(library, case.experts, case.x, case.logits, wide[:, : shape[1]])
    assert close(found, case.oracle()), shape
    assert bool(torch.isnan(wide[:, shape[1] :]).all())


def biased_experts_are_the_oracles(library: ctypes.CDLL) -> None:
    """Compares experts with biases and limits in SwiGLU's place with the oracle; a row's bits don't depend on
    others.
    """
    for shape in SHAPES[1:4]:
        case = Case(6, shape)
        gate = case.gate()
        found = moe(library, case.experts, case.x, case.logits, gate=gate)
        assert close(found, case.oracle(gate)), shape
        alone = moe(library, case.experts, case.x[-1:], case.logits[-1:].contiguous(), gate=gate)
        assert torch.equal(alone, found[-1:])


def company_changes_no_bit(library: ctypes.CDLL) -> None:
    """A row is bitwise the same alone, among few, among many, and beside a row of NaN."""
    case = Case(3, (75, 72, 40, 4, 2))
    whole = moe(library, case.experts, case.x, case.logits)
    for rows in (slice(0, 1), slice(3, 4), slice(2, 19), slice(40, 75)):
        part = moe(library, case.experts, case.x[rows], case.logits[rows].contiguous())
        assert torch.equal(part, whole[rows]), rows
    x, logits = case.x.clone(), case.logits.clone()
    x[5], logits[9, 1] = torch.nan, torch.nan
    beside, kept = moe(library, case.experts, x, logits), [row for row in range(75) if row not in (5, 9)]
    assert bool(torch.isnan(beside[[5, 9]]).all())
    assert torch.equal(beside[kept], whole[kept])


def ties_go_to_the_lower_expert(library: ctypes.CDLL) -> None:
    """Equal logits, also of infinities, and ranks that reach down to what nobody wants."""
    case = Case(5, (4, 16, 8, 40, 3))
    torch.nn.init.normal_(case.experts.gate_up)
    torch.nn.init.normal_(case.experts.down)
    case.logits.zero_()
    case.logits[1, 33], case.logits[1, 38] = 1, 1
    case.logits[2] = -torch.inf
    case.logits[2, 39] = 0.5
    case.logits[3, ::7] = 2
    assert close(moe(library, case.experts, case.x, case.logits), case.oracle())


def no_rows_are_no_work(library: ctypes.CDLL) -> None:
    """A call without rows reads and writes nothing."""
    case = Case(1, (2, 8, 8, 2, 1))
    assert moe(library, case.experts, case.x[:0], case.logits[:0]).shape == (0, 8)


Check = Callable[[ctypes.CDLL], None]
CHECKS: tuple[Check, ...] = (company_changes_no_bit, ties_go_to_the_lower_expert, no_rows_are_no_work)
QUICK: tuple[Check, ...] = (
    ties_go_to_the_lower_expert,
    lambda lib: it_is_the_oracles(lib, SHAPES[1]),
    lambda lib: it_is_the_oracles(lib, (20, 136, 72, 3, 2)),
    lambda lib: it_is_the_oracles(lib, (90, 16, 8, 3, 2)),  # more choices than a block has threads
)
