"""The checks of cascade_attention, as functions of a library: the CPU's, the shim's, or one with a planted bug.

Knows nothing of pytest. The oracle is flat attention in float64 over the bytes in the pages, sequence by sequence.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from baton.kernels.cascade_attention.native import Group, cascade
from baton.kernels.paged_attention.native import attend
from tests.kernels.attention_suite import ROUNDED, Case, oracle, rounds_queries

DTYPES = ("bfloat16", "int8", "fp8_e4m3")
# A float beside bf16 keys has 16 bits in the prefix, beside f16 22; see attention_suite for what the rest has.
CLOSE = {"float32": 8e-6, "bfloat16": 3e-5, "float16": 8e-6, "int8": 1e-3, "fp8_e4m3": 2e-5}
# heads, kv_heads, head_dim: groups of 1 to 16 heads, every width of the kernels
SHAPES = ((1, 1, 16), (4, 4, 64), (6, 2, 48), (16, 1, 32), (8, 4, 128), (5, 1, 80), (4, 2, 256))
# keys shared by a group of how many, and each sequence's own: (keys, [(own keys before, new tokens), …])
Family = tuple[int, list[tuple[int, int]]]
FAMILIES: tuple[list[Family], ...] = (
    [(16, [(0, 1)]), (272, [(0, 1), (14, 1), (15, 1), (16, 1)])],
    [(0, [(300, 1)]), (560, [(0, 3), (1, 1), (17, 2)]), (0, [(0, 5)]), (256, [(258, 1), (30, 9)])],
    [(528, [(-1, 1), (3, 1), (-1, 2), (255, 1), (0, 4), (15, 1), (16, 1), (1, 1)])],
)


class Shared(Case):
    """A case in which the sequences of a family begin with the same pages."""

    def __init__(self, seed: int, dtype: str, shape: tuple[int, int, int], families: Sequence[Family]) -> None:
        sizes = [(keys + own, new) for keys, each in families for own, new in each]
        super().__init__(seed, dtype, shape, sizes)
        angles = torch.rand(max(start + new for start, new in sizes), self.head_dim // 2) * 6
        self.rope_angles = torch.cat((angles.cos(), angles.sin()), -1).contiguous()
        self.groups: list[Group] = []
        at = 0
        for keys, each in families:
            for i in range(at + 1, at + len(each)):
                self.qkv[i][:keys] = self.qkv[at][:keys]
                pages, start, queries = self.items[i]
                self.items[i] = ([*self.items[at][0][: keys // 16], *pages[keys // 16 :]], start, queries)
            if keys:
                self.groups.append((at, len(each), keys))
            at += len(each)


def prepared(
    library: ctypes.CDLL, seed: int, dtype: str, shape: tuple[int, int, int], families: Sequence[Family]
) -> Shared:
    """A case whose pages are written: what is no longer anyone's is NaN, as are unused slots."""
    case = Shared(seed, dtype, shape, families)
    case.write(library)
    return case


def _close(library: ctypes.CDLL, dtype: str) -> float:
    return 4 * ROUNDED if dtype == "bfloat16" and rounds_queries(library) else CLOSE[dtype]


def _error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).double().square().mean(-1).sqrt().max())


def it_is_the_oracles(library: ctypes.CDLL, dtype: str, shape: tuple[int, int, int], which: int = 1) -> None:
    """Compares with the oracle and with flat attention of the same library; rows in between stay as they are."""
    case = prepared(library, which, dtype, shape, FAMILIES[which])
    wide = torch.full((len(case.q), case.heads + 1, case.head_dim), torch.nan)
    found, wanted = cascade(library, case.q, case.kv, case.items, case.groups, wide[:, :-1]), oracle(case, 0)
    assert bool(torch.isfinite(found).all())
    assert bool(torch.isnan(wide[:, -1]).all()), "it wrote between its rows"
    assert _error(found, wanted) <= _close(library, dtype), (dtype, shape, which, _error(found, wanted))
    flat = attend(library, case.q, case.kv, case.items)
    assert _error(found, flat) <= _close(library, dtype), (dtype, shape, which, _error(found, flat))
    assert bool((case.kv.memory[case.guards] == 0xFF).all())


def company_changes_no_bit(library: ctypes.CDLL, dtype: str) -> None:
    """A row is bitwise the same in a group of one, of some or of all, in any order, and beside a NaN sequence."""
    case = prepared(library, 3, dtype, (6, 2, 64), FAMILIES[2])
    keys, firsts = case.groups[0][2], [0]
    for _, _, queries in case.items:
        firsts.append(firsts[-1] + queries)

    def run(order: Sequence[int], q: Tensor) -> dict[int, Tensor]:
        rows = [q[firsts[i] : firsts[i + 1]] for i in order]
        found = cascade(library, torch.cat(rows), case.kv, [case.items[i] for i in order], [(0, len(order), keys)])
        return dict(zip(order, found.split([len(part) for part in rows]), strict=True))

    whole = run(range(8), case.q)
    for order in ([7, 2, 4, 0, 1, 3, 6, 5], [4], [5, 6], [2, 0, 1]):
        part = run(order, case.q)
        assert all(torch.equal(part[i], whole[i]) for i in order), order
    poisoned = case.q.clone()
    poisoned[firsts[3]] = torch.nan
    beside = run(range(8), poisoned)
    assert bool(torch.isnan(beside[3]).all())
    assert all(torch.equal(beside[i], whole[i]) for i in range(8) if i != 3)


def one_group_or_many(library: ctypes.CDLL) -> None:
    """45 sequences over one prefix, more rows than a block takes; some sequences' rows fall to two blocks."""
    families: list[Family] = [(48, [(i % 19, 1) for i in range(45)]), (32, [(3, 1), (0, 2)]), (0, [(5, 1)] * 3)]
    case = prepared(library, 4, "int8", (6, 2, 32), families)
    wanted = oracle(case, 0)
    assert _error(cascade(library, case.q, case.kv, case.items, case.groups), wanted) <= CLOSE["int8"]
    assert _error(cascade(library, case.q, case.kv, case.items, []), wanted) <= CLOSE["int8"]


Check = Callable[[ctypes.CDLL], None]
QUICK: tuple[Check, ...] = (
    *(lambda lib, d=dtype: it_is_the_oracles(lib, d, (6, 2, 48)) for dtype in DTYPES),
    lambda lib: company_changes_no_bit(lib, "int8"),
)
