"""Defines one rank's share of a program. How it is computed: ranks.py and shares.py.

Knows nothing of tensors, processes or memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from baton.engine.program import ops as p
from baton.engine.program.program import Program
from baton.engine.program.sites import expert_sites, head_site

PANEL = 64  # rows that a kernel multiplies by together: ranks' parts begin with a panel unless one would be empty
MOST = 64  # ranks, as many as collective.h takes
BY_COLUMNS, BY_ROWS, BY_LAYERS = range(3)  # step/ranks/ranks.h: DealKind
Rows = tuple[tuple[int, int], ...]  # ranges [begin, end) of a stacked weight's rows


class Rank(msgspec.Struct, frozen=True):
    """Identifies rank ``index`` of ``count``, with room for ``spare`` copies of other ranks' experts per layer."""

    index: int = 0
    count: int = 1
    spare: int = 0

    def part(self, total: int) -> tuple[int, int]:
        """Returns the rank's range [begin, end) of ``total`` rows; ranks' ranges differ by a panel of 64 rows at
        most.
        """
        grain = PANEL if total >= PANEL * self.count else 1
        grains = -(-total // grain)
        begin, end = (grains * at // self.count * grain for at in (self.index, self.index + 1))
        return begin, min(end, total)

    def experts(self, total: int) -> tuple[int, int]:
        """Returns the rank's range [begin, end) of a layer's ``total`` experts."""
        begin, end = (total * at // self.count for at in (self.index, self.index + 1))
        return begin, end

    def heads(self, heads: int, kv_heads: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Returns the rank's range [begin, end) of query heads, and of the KV heads that they read.

        A rank has some KV heads and all query heads that read them; if there are fewer KV heads than ranks, it has
        one, and divides the query heads that read it with the other ranks that have it. ``heads`` must be ``count``
        or more.
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
    """Says that a rank's register is columns ``first`` … ``first + width - 1`` of register ``whole``.

    ``by_rows`` says that the rank writes only the rows of its own tokens.
    """

    whole: str
    first: int
    width: int
    by_rows: bool = False


class Residual(msgspec.Struct, frozen=True):
    """Names the registers of the residual stream that a rank hands on, and their ``widths`` in floats; ``first`` is
    the number of floats per row before them among those of all ranks.
    """

    registers: tuple[str, ...] = ()
    widths: tuple[int, ...] = ()
    first: int = 0


class LastOps(msgspec.Struct, frozen=True):
    """Names what a rank's ops from ``begin`` on read before they write it, registers and weights: ``read``. Among
    them are the registers ``shared``, which ranks have filled together and none of these ops writes.
    """

    begin: int
    read: frozenset[str]
    shared: frozenset[str]


class RankProgram(msgspec.Struct, frozen=True):
    """Holds one rank's share of a program.

    ``program`` counts the rank's query heads and all KV heads. Ranks are arranged in ``stages`` of ``columns``
    ranks: those of a stage have the same layers. ``sites`` names the weight at each adapter site that the rank has,
    by the site's number in the whole program. If ranks share layers, a stage reads the registers ``given`` and
    leaves the registers ``handed``; the head reads ``last``.
    """

    rank: Rank
    program: Program
    own_kv: tuple[int, int]  # range of the rank's own KV heads
    rows: dict[str, Rows]  # the rank's rows of each weight that is split
    parts: dict[str, Part]  # registers that are columns of a shared one
    widths: dict[str, int]  # columns of each register that the ranks fill together
    vocab: tuple[int, int]  # the rank's range of token ids
    head: p.LmHead  # of the whole program
    sites: dict[int, str]
    head_site: int  # number of the head's adapter site; those of experts come after it
    deal: int = BY_COLUMNS  # what ranks share: BY_COLUMNS, BY_ROWS or BY_LAYERS (``shares.py``)
    given: Residual = Residual()
    handed: Residual = Residual()
    last: Residual = Residual()
    carried: int = 0  # floats per row that are handed on in all stages
    adapts_before: int = 0  # adapter sites before the rank's own
    columns: int = 1
    crosses: bool = False  # a stage reads K and V that an earlier one has written
    shared_floats: int = 0  # floats per row of registers that ranks fill together, in all stages
    first_shared: int = 0  # those of the stages before the rank's own
    expert_layers: int = 0  # layers of the whole program whose experts are divided

    @classmethod
    def undivided(cls, program: Program, rank: Rank) -> RankProgram:
        """Returns all of ``program`` as the share of ``rank``: nothing is split."""
        kv, vocab, site = (0, program.kv_heads), (0, program.vocab_size), head_site(program)
        sites, columns = weights_at(program), rank.count
        return cls(rank, program, kv, {}, {}, {}, vocab, head_of(program), sites, site, columns=columns)

    @property
    def stages(self) -> int:
        """Returns the number of groups into which layers are divided; 1 if ranks don't share layers."""
        return self.rank.count // self.columns

    @property
    def expert_sites(self) -> dict[str, int]:
        """Returns the numbers of the adapter sites of the rank's experts, by the weight's name."""
        return {name: number for number, name in self.sites.items() if number > self.head_site}

    @property
    def last_ops(self) -> LastOps | None:
        """Returns the ops that need only run for rows whose results are read: those of the rank that leads to the
        head, behind the last one that stores anything. ``None`` if there are none, or if they write a register of
        all ranks that they have read.
        """
        ops = self.program.ops
        begin = len(self.program.divided[0])
        while begin < len(ops) and isinstance(ops[begin], p.Meet):  # what the ranks have just computed for all rows
            begin += 1
        if begin == len(ops) or not isinstance(ops[-1], p.LmHead):
            return None
        read, written = _read_first(ops[begin:])
        shared = read & self.shared
        if read & self.parts.keys() or shared & {self.whole_of(name) for name in written}:
            return None
        return LastOps(begin, read, shared)

    def whole_of(self, register: str) -> str:
        """Returns the register of which ``register`` is a part, or else itself."""
        return self.parts[register].whole if register in self.parts else register

    @property
    def shared(self) -> frozenset[str]:
        """Returns the registers that the ranks fill together."""
        return frozenset(self.widths)


def kv_share(kv_heads: int, count: int) -> float:
    """Returns the largest share of a page's KV heads that one of ``count`` ranks has."""
    return -(-kv_heads // count) / kv_heads


def head_of(program: Program) -> p.LmHead:
    """Returns the op that computes the logits, the last of ``program``."""
    last = program.ops[-1]
    assert isinstance(last, p.LmHead)
    return last


def weights_at(program: Program) -> dict[int, str]:
    """Returns the weight's name at each adapter site of a program, by the site's number."""
    adapts = [op.weight for op in program.ops if isinstance(op, p.Adapt)]
    experts = {number: name for name, number in expert_sites(program).items()}
    return dict(enumerate([*adapts, head_of(program).weight])) | experts


def _read_first(ops: tuple[p.Op, ...]) -> tuple[frozenset[str], set[str]]:
    """Returns the names that ``ops`` may read before they write them, and the registers that they write."""
    read, written = set[str](), set[str]()
    for op in ops:
        fields = set(op.__struct_fields__) - set(_outs(op))
        read |= {name for field in fields for name in _names(getattr(op, field))} - written
        written |= set(_written((op,)))
    return frozenset(read), written


def _names(value: object) -> Iterator[str]:
    """Yields the names in an op's field."""
    for each in value if isinstance(value, tuple) else (value,):
        if isinstance(each, str):
            yield each


def _written(ops: tuple[p.Op, ...]) -> Iterator[str]:
    """Yields the registers into which ``ops`` write their results."""
    for op in ops:
        for field in _outs(op):
            yield from _names(getattr(op, field, ""))


def _outs(op: p.Op) -> tuple[str, ...]:
    """Returns the fields of ``op`` that name the registers of its results."""
    if isinstance(op, p.Exchange):
        return "rows", "routes"
    return ("outs",) if isinstance(op, p.Divide) else ("out",)


def dealt_experts(program: Program, own: RankProgram) -> tuple[tuple[int, int], ...]:
    """Returns the range [begin, end) of experts in each layer for every rank of ``own``'s stage; empty if each rank
    has all experts.
    """
    if not program.experts or not own.shared_floats:
        return ()
    ranks = (Rank(index, own.columns) for index in range(own.columns))
    return tuple(rank.experts(program.experts[0].experts) for rank in ranks)


def hidden_of(program: Program) -> int:
    """Returns the width of the residual stream, which is that of the head's norm."""
    name = head_of(program).norm
    return next(weight.shapes[0][0] for weight in program.weights if weight.name == name)


def rewritten(program: Program) -> Iterator[str]:
    """Yields the registers that each rank writes as a whole in some layers, in place or by an op of its own."""
    for op in program.ops:
        if isinstance(op, p.Moe | p.Combine | p.Center | p.ScaleRows | p.LayerInputs | p.MatchSize | p.Sparsen):
            yield op.out
        elif isinstance(op, p.Add):
            yield op.x
