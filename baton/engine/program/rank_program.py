"""Defines what one of several ranks has of a program, and who it is. How it comes to that: ranks.py and shares.py.

Knows nothing of tensors, processes or memory.
"""

from __future__ import annotations

import msgspec

from baton.engine.program import ops as p
from baton.engine.program.program import Program
from baton.engine.program.sites import head_site

PANEL = 64  # rows that a kernel multiplies by together: parts begin with one where that leaves none empty
MOST = 64  # ranks, as many as collective.h takes
BY_COLUMNS, BY_ROWS, BY_LAYERS = range(3)  # step/ranks.h: DealKind
Rows = tuple[tuple[int, int], ...]  # ranges [begin, end) of a stacked weight's rows


class Rank(msgspec.Struct, frozen=True):
    """Names one of ``count`` ranks."""

    index: int = 0
    count: int = 1

    def part(self, total: int) -> tuple[int, int]:
        """Returns the rank's range of ``total`` rows; ranges differ by a panel at most."""
        grain = PANEL if total >= PANEL * self.count else 1
        grains = -(-total // grain)
        begin, end = (grains * at // self.count * grain for at in (self.index, self.index + 1))
        return begin, min(end, total)

    def experts(self, total: int) -> tuple[int, int]:
        """Returns the rank's range of ``total`` experts of a layer."""
        begin, end = (total * at // self.count for at in (self.index, self.index + 1))
        return begin, end

    def heads(self, heads: int, kv_heads: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Returns the rank's range of query heads, and of the KV heads that they read.

        A rank has some KV heads and all that read them; where there are fewer KV heads than ranks it has one, and
        shares those that read it with the other ranks that have it. ``heads`` is ``count`` or more.
        """
        group = heads // kv_heads
        if kv_heads >= self.count:
            first, end = (kv_heads * at // self.count for at in (self.index, self.index + 1))
            return (first * group, end * group), (first, end)
        kv = self.index * kv_heads // self.count
        first, end = (-(-at * self.count // kv_heads) for at in (kv, kv + 1))  # ranks that have this KV head
        own = (kv * group + group * (at - first) // (end - first) for at in (self.index, self.index + 1))
        return (next(own), next(own)), (kv, kv + 1)


class Part(msgspec.Struct, frozen=True):
    """Says that a rank's register is ``width`` columns of ``whole``'s, from ``first`` on."""

    whole: str
    first: int
    width: int


class Residual(msgspec.Struct, frozen=True):
    """Names registers of the residual stream that a rank hands on; ``first`` is their place among all such."""

    registers: tuple[str, ...] = ()
    first: int = 0


class RankProgram(msgspec.Struct, frozen=True):
    """Holds one rank's share of a program.

    ``program`` counts own query heads and all KV heads; ``own_kv`` is the range of own ones. ``rows`` has the own
    rows of each weight that is split, ``parts`` the registers that are columns of one that all ranks share,
    ``widths`` the widths of these. ``vocab`` is the own range of tokens; ``head`` is the whole program's.

    ``sites`` names the weight at each place where an adapter may stand beside what the rank has, by the place's
    number in the whole program, ``adapts_before`` of which are before its own; ``head_site`` is the head's.

    ``deal`` is what ranks share (``shares.py``). By layers a rank takes what it is ``given`` and leaves what it has
    ``handed`` on; what the head reads is ``last`` of these, which come to ``carried`` registers. ``columns`` ranks
    are a stage and have the same layers; without stages that is all of them. The registers that ranks fill together
    have ``shared_floats`` per row in all stages, ``first_shared`` of them in those before its own.
    """

    rank: Rank
    program: Program
    own_kv: tuple[int, int]
    rows: dict[str, Rows]
    parts: dict[str, Part]
    widths: dict[str, int]
    vocab: tuple[int, int]
    head: p.LmHead
    sites: dict[int, str]
    head_site: int
    deal: int = BY_COLUMNS
    given: Residual = Residual()
    handed: Residual = Residual()
    last: Residual = Residual()
    carried: int = 0
    adapts_before: int = 0
    columns: int = 1
    shared_floats: int = 0
    first_shared: int = 0

    @classmethod
    def undivided(cls, program: Program, rank: Rank) -> RankProgram:
        """Returns all of ``program`` as what ``rank`` has: its rows, registers and sites are whole."""
        kv, vocab, site = (0, program.kv_heads), (0, program.vocab_size), head_site(program)
        sites, columns = weights_at(program), rank.count
        return cls(rank, program, kv, {}, {}, {}, vocab, head_of(program), sites, site, columns=columns)

    @property
    def stages(self) -> int:
        """Returns into how many groups of layers the ranks are put; 1 where they don't share layers."""
        return self.rank.count // self.columns

    @property
    def shared(self) -> frozenset[str]:
        """Returns the registers that the ranks fill together."""
        return frozenset(self.widths)


def head_of(program: Program) -> p.LmHead:
    """Returns the op that ends ``program``."""
    last = program.ops[-1]
    assert isinstance(last, p.LmHead)
    return last


def weights_at(program: Program) -> dict[int, str]:
    """Returns the weight at each site of a program, by number; the head's is the last."""
    adapts = [op.weight for op in program.ops if isinstance(op, p.Adapt)]
    return dict(enumerate([*adapts, head_of(program).weight]))


def dealt_experts(program: Program, own: RankProgram) -> tuple[tuple[int, int], ...]:
    """Returns which experts of each layer every rank of ``own``'s stage has; empty where each has all of them."""
    if not program.experts or not own.shared_floats:
        return ()
    ranks = (Rank(index, own.columns) for index in range(own.columns))
    return tuple(rank.experts(program.experts[0].experts) for rank in ranks)
