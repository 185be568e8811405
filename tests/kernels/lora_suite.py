"""The checks of lora, as functions of a library: the CPU's, or one with a planted bug.

Knows nothing of pytest. The oracle is ``reference.py`` in float64; NaN lies wherever nobody may read or write.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from baton.kernels.abi.native import BF16, F32, I64, P, declare
from baton.kernels.lora.reference import AdaptedRows, LoraMatrices, lora
from baton.kernels.lora.structs import LoraGroup, LoraPart, LoraSite, pack_b, panelled

Check = Callable[[ctypes.CDLL], None]
Group = tuple[Sequence[int], tuple[LoraMatrices, ...]]

CLOSE = 2e-6  # on the error's share of the largest output: sums of float32 products in another order
# rows, inputs, outputs, rank
SHAPES = ((1, 16, 64, 4), (3, 40, 72, 8), (9, 33, 130, 5), (70, 200, 96, 16), (5, 129, 24, 64), (2, 24, 320, 256))


class Rows:
    """Holds what the op's structs point at for some groups of rows. Each adapter has sites 0 (nothing) and 1."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._kept: list[object] = []
        found = [self._group(rows, parts) for rows, parts in groups]
        self.array = (LoraGroup * max(1, len(found)))(*found)
        self.count = len(found)

    def _group(self, rows: Sequence[int], parts: tuple[LoraMatrices, ...]) -> LoraGroup:
        structs = (LoraPart * max(1, len(parts)))(*[self._part(part) for part in parts])
        sites = (LoraSite * 2)(LoraSite(None, 0), LoraSite(ctypes.addressof(structs), len(parts)))
        which = np.array(rows, np.int32)
        self._kept += [structs, sites, which]
        return LoraGroup(ctypes.addressof(sites), which.ctypes.data, len(which))

    def _part(self, part: LoraMatrices) -> LoraPart:
        stored = torch.int16 if part.b.dtype == torch.bfloat16 else torch.float32
        a, (n, rank) = part.a.contiguous(), part.b.shape
        b = torch.full((panelled(n) // 64, rank, 64), 1e30 if stored.is_floating_point else 32000, dtype=stored)
        pack_b(part.b.view(stored).numpy(), b.numpy())
        self._kept += [a, b]
        k, code = a.shape[0 if part.looked_up else 1], BF16 if stored == torch.int16 else F32
        return LoraPart(a.data_ptr(), b.data_ptr(), k, part.first, n, rank, code, part.scale, int(part.looked_up))


def run(library: ctypes.CDLL, groups: Sequence[Group], out: Tensor, x: Tensor, site: int = 1) -> Tensor:
    """The op over a copy of ``out``; ``x`` are rows, or tokens of the embedding's form."""
    call = declare(library, "lora", P, I64, I64, P, I64, P, P, I64)
    found, tokens, rows = out.clone(), x if x.dim() == 1 else None, Rows(groups)
    call(
        ctypes.addressof(rows.array), rows.count, site,
        *((x.data_ptr(), x.stride(0)) if tokens is None else (None, 0)),
        None if tokens is None else tokens.data_ptr(), found.data_ptr(), found.stride(0),
    )  # fmt: skip
    return found


def matrices(rank: int, k: int, n: int, dtype: torch.dtype = torch.float32, first: int = 0) -> LoraMatrices:
    return LoraMatrices(torch.randn(rank, k).to(dtype), torch.randn(n, rank).to(dtype), 1.5, first)


def wanted(groups: Sequence[Group], out: Tensor, x: Tensor) -> Tensor:
    wide = [
        AdaptedRows(torch.tensor(rows), tuple(p._replace(a=p.a.double(), b=p.b.double()) for p in parts))
        for rows, parts in groups
    ]
    return lora(out.double(), x, wide)


def close(found: Tensor, oracle: Tensor) -> bool:
    return bool((found - oracle).abs().max() <= CLOSE * oracle.abs().max().clamp_min(1) * 20)


def it_is_the_references(library: ctypes.CDLL) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for rows, k, n, rank in SHAPES:
            x, out = torch.randn(rows, k), torch.randn(rows, n)
            groups = [(list(range(rows)), (matrices(rank, k, n, dtype),))]
            assert close(run(library, groups, out, x), wanted(groups, out, x)), (dtype, rows, k, n, rank)


def parts_keep_to_their_outputs(library: ctypes.CDLL) -> None:
    x, out = torch.randn(6, 48), torch.randn(6, 200)
    parts = matrices(8, 48, 70, first=3), matrices(4, 48, 33, torch.bfloat16, first=150)
    found = run(library, [(range(6), parts)], out, x)
    assert close(found, wanted([(list(range(6)), parts)], out, x))
    same = [*range(3), *range(73, 150), *range(183, 200)]
    assert torch.equal(found[:, same], out[:, same])


def rows_without_an_adapter_are_untouched(library: ctypes.CDLL) -> None:
    x, out = torch.randn(9, 40), torch.randn(9, 72)
    x[[0, 4, 8]] = torch.nan
    found = run(library, [([1, 5], (matrices(8, 40, 72),)), ([7, 2], (matrices(4, 40, 72),))], out, x)
    assert torch.equal(found[[0, 3, 4, 6, 8]], out[[0, 3, 4, 6, 8]])
    assert not bool((found[[1, 2, 5, 7]] == out[[1, 2, 5, 7]]).any())
    assert torch.equal(run(library, [([1, 5], (matrices(8, 40, 72),))], out, x, site=0), out)


def company_changes_no_bit(library: ctypes.CDLL) -> None:
    for k, n, dtype in ((40, 72, torch.float32), (257, 130, torch.bfloat16)):
        x, out = torch.randn(75, k), torch.randn(75, n)
        adapters = [(matrices(rank, k, n, dtype),) for rank in (4, 7, 16)]
        of = [row % 4 for row in range(75)]  # 3: none
        groups = [([row for row in range(75) if of[row] == i], parts) for i, parts in enumerate(adapters)]
        found = run(library, groups, out, x)
        for row in (0, 1, 2, 30, 33, 74):
            alone = run(library, [([0], adapters[of[row]])], out[row : row + 1], x[row : row + 1])
            assert torch.equal(alone[0], found[row]), row
        backwards = [(rows[::-1], parts) for rows, parts in groups[::-1]]
        assert torch.equal(run(library, backwards, out, x), found)


def a_nan_stays_in_its_row(library: ctypes.CDLL) -> None:
    x, out, parts = torch.randn(4, 40), torch.randn(4, 72), (matrices(8, 40, 72),)
    calm = run(library, [(range(4), parts)], out, x)
    x[2, 39] = torch.nan
    found = run(library, [(range(4), parts)], out, x)
    assert bool(torch.isnan(found[2]).all())
    assert torch.equal(found[[0, 1, 3]], calm[[0, 1, 3]])


def tokens_are_looked_up(library: ctypes.CDLL) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        part = LoraMatrices(torch.randn(37, 6).to(dtype), torch.randn(72, 6).to(dtype), 0.5, 0, looked_up=True)
        tokens, out = torch.tensor([36, 0, 5, 5], dtype=torch.int32), torch.randn(4, 72)
        groups: list[Group] = [([3, 0, 1], (part,))]
        found = run(library, groups, out, tokens)
        assert close(found, wanted(groups, out, tokens))
        assert torch.equal(found[2], out[2])


CHECKS: tuple[Check, ...] = (
    it_is_the_references,
    parts_keep_to_their_outputs,
    rows_without_an_adapter_are_untouched,
    company_changes_no_bit,
    a_nan_stays_in_its_row,
    tokens_are_looked_up,
)
