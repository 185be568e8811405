"""The checks of moe with adapters beside its experts, as functions of a library, perhaps one with a planted bug.

Knows nothing of pytest. The oracle is ``reference.py`` in float64. Adapters have sites 0 (gate_up) and 1 (down).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from baton.kernels.abi.native import I64, P, declare
from baton.kernels.lora.reference import AdaptedRows, LoraMatrices
from baton.kernels.lora.structs import LoraGroup, LoraSite
from baton.kernels.moe.native import ExpertAdaptersStruct, Experts, adapted
from baton.kernels.moe.reference import ExpertAdapters, ExpertGate
from baton.kernels.moe.reference import moe as reference
from tests.kernels.lora_suite import Rows
from tests.kernels.moe_suite import Case, close

Check = Callable[..., None]  # of a library, and of the kinds of weights that it has a form for
Kind = Callable[[Case], Experts]
SHAPE = (41, 40, 24, 5, 2)  # rows, hidden, inner, experts, chosen


class Adapter:
    """Random matrices beside the gate, the up and the output of experts ``of``, or of fewer parts."""

    def __init__(self, experts: Experts, of: Sequence[int], rank: int, dtype: torch.dtype = torch.float32) -> None:
        _, hidden, inner = experts.down.shape
        gates = [self._pair(rank, hidden, inner, 2 * inner * e, dtype) for e in of]
        ups = [self._pair(rank + 1, hidden, inner, 2 * inner * e + inner, dtype) for e in of if e % 2]
        self.gate_up = tuple(sorted((*gates, *ups), key=lambda part: part.first))
        self.down = tuple(self._pair(rank, inner, hidden, hidden * e, dtype) for e in of[1:])

    def _pair(self, rank: int, k: int, n: int, first: int, dtype: torch.dtype) -> LoraMatrices:
        return LoraMatrices(torch.randn(rank, k).to(dtype), torch.randn(n, rank).to(dtype), 0.7, first)


Given = Sequence[tuple[Sequence[int], Adapter]]


def run(
    library: ctypes.CDLL, experts: Experts, x: Tensor, logits: Tensor, given: Given, gate: ExpertGate | None = None
) -> Tensor:
    """The op over rows ``x``; ``given`` says which rows have which adapter."""
    both = [Rows([(rows, one.gate_up) for rows, one in given]), Rows([(rows, one.down) for rows, one in given])]
    groups, kept = _joined(both, [np.array(rows, np.int32) for rows, _ in given])
    struct, beneath = adapted(experts, gate, (0, 1))
    of = ExpertAdaptersStruct(ctypes.addressof(groups), len(given), 0, 1)
    out = torch.full((len(x), experts.down.shape[1]), torch.nan)
    call = declare(library, "adapted_moe", P, P, P, I64, P, I64, P, I64)
    call(
        ctypes.addressof(struct), ctypes.addressof(of), x.data_ptr(), x.stride(0), logits.data_ptr(), len(x),
        out.data_ptr(), out.stride(0),
    )  # fmt: skip
    del kept, beneath
    return out


def _joined(both: list[Rows], rows: list[np.ndarray]) -> tuple[ctypes.Array[LoraGroup], list[object]]:
    """Groups whose adapters have site 1 of the first at 0 and that of the second at 1."""
    kept: list[object] = [*both, rows]
    groups = (LoraGroup * max(1, len(rows)))()
    for at, which in enumerate(rows):
        sites = (LoraSite * 2)(*[(LoraSite * 2).from_address(one.array[at].sites)[1] for one in both])
        kept.append(sites)
        groups[at] = LoraGroup(ctypes.addressof(sites), which.ctypes.data, len(which))
    return groups, kept


def oracle(experts: Experts, x: Tensor, logits: Tensor, given: Given, gate: ExpertGate | None = None) -> Tensor:
    """Computes the same in float64."""
    beside = ExpertAdapters(
        [AdaptedRows(torch.tensor(rows), _wide(one.gate_up)) for rows, one in given],
        [AdaptedRows(torch.tensor(rows), _wide(one.down)) for rows, one in given],
    )
    of = experts
    return reference(x.double(), logits.double(), of.gate_up, of.down, of.chosen, of.renormalise, gate, beside)


def _wide(parts: tuple[LoraMatrices, ...]) -> tuple[LoraMatrices, ...]:
    return tuple(part._replace(a=part.a.double(), b=part.b.double()) for part in parts)


def plain(case: Case) -> Experts:
    """The case's experts in float32, whose products nothing rounds."""
    of = case.experts
    return Experts(of.gate_up.nan_to_num().float(), of.down.nan_to_num().float(), of.chosen, of.renormalise)


def narrow(case: Case) -> Experts:
    """The case's experts as they are, in bf16."""
    return case.experts


BOTH: tuple[Kind, ...] = (plain, narrow)


def two(experts: Experts, rows: int) -> Given:
    """Two adapters, of some experts each, and rows without any."""
    few, many = Adapter(experts, (1, 2, 4), 4), Adapter(experts, range(5), 9, torch.bfloat16)
    return [(list(range(0, rows, 3)), few), (list(range(1, rows, 3)), many)]


def they_are_the_oracles(library: ctypes.CDLL, kinds: Sequence[Kind] = BOTH) -> None:
    case = Case(4, SHAPE)
    for experts in (kind(case) for kind in kinds):
        given = two(experts, SHAPE[0])
        found, wanted = (
            run(library, experts, case.x, case.logits, given),
            oracle(experts, case.x, case.logits, given),
        )
        assert close(found, wanted)
        bare = oracle(experts, case.x, case.logits, [])
        assert not bool((wanted[::3] == bare[::3]).all(-1).all())
        assert torch.equal(wanted[2::3], bare[2::3])


def gates_with_biases_come_after_them(library: ctypes.CDLL) -> None:
    case = Case(6, SHAPE)
    experts, gate = plain(case), case.gate()
    given = two(experts, SHAPE[0])
    found = run(library, experts, case.x, case.logits, given, gate)
    assert close(found, oracle(experts, case.x, case.logits, given, gate))


def company_changes_no_bit(library: ctypes.CDLL, kinds: Sequence[Kind] = BOTH) -> None:
    """Takes more rows than a part of the step has; a row without an adapter has the bits of a step without any."""
    case = Case(5, (300, *SHAPE[1:]))
    for experts in (kind(case) for kind in kinds):
        given = two(experts, 300)
        found, bare = (run(library, experts, case.x, case.logits, one) for one in (given, []))
        assert torch.equal(found[2::3], bare[2::3])
        for row in (0, 1, 2, 150, 256, 298):
            own = [([0], adapter) for rows, adapter in given if row in rows]
            alone = run(library, experts, case.x[row : row + 1], case.logits[row : row + 1].contiguous(), own)
            assert torch.equal(alone[0], found[row]), row


def ranks_to_256_and_parameters_beside_layers(library: ctypes.CDLL, kinds: Sequence[Kind] = (narrow,)) -> None:
    """The most parts that an expert's layer can have: gate, up, and the parameter of both under its two names."""
    case = Case(8, (9, 16, 8, 3, 2))
    for experts in (kind(case) for kind in kinds):
        most = Adapter(experts, range(3), 255)
        both = tuple(most._pair(256, 16, 16, 16 * e, torch.bfloat16) for e in range(3) for _ in range(2))
        most.gate_up = tuple(sorted((*most.gate_up, *both), key=lambda part: part.first))
        given = [(list(range(0, 9, 2)), most)]
        found, wanted = (
            of(*at, case.x, case.logits, given) for of, at in ((run, (library, experts)), (oracle, (experts,)))
        )
        assert close(found, wanted)


NARROW: tuple[Check, ...] = (
    they_are_the_oracles,
    company_changes_no_bit,
    ranks_to_256_and_parameters_beside_layers,
)
CHECKS: tuple[Check, ...] = (*NARROW, gates_with_biases_come_after_them)
