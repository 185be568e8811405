"""Says how a worker's ranks share a model: by its columns, a step's rows or its layers; and what each rank has.

Knows nothing of tensors, processes or memory. ``ranks.py`` splits columns. By rows (context parallel) every rank
has all weights and computes some rows of each step; ranks meet once per layer, where keys and values are written.
By layers (pipeline parallel) each rank has the weights of its own layers and hands on what the residual stream is.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from baton.engine.program import ops as p
from baton.engine.program.program import Program
from baton.engine.program.ranks import (
    BY_LAYERS,
    BY_ROWS,
    MOST,
    SPLIT_OPS,
    Rank,
    RankProgram,
    Residual,
    head_of,
    possible_widths,
    require_splittable,
    split,
    weights_at,
)
from baton.engine.program.sites import head_site
from baton.protos.errors import ConfigError

ANYWHERE = {*SPLIT_OPS, p.NormPart}  # ops of one row by itself, which the native step knows


class Widths(msgspec.Struct, frozen=True):
    """Counts the ranks of a worker by what they share: columns (``tp``), rows (``cp``) or layers (``pp``).

    One of them at most is more than 1.
    """

    tp: int = 1
    cp: int = 1
    pp: int = 1

    @property
    def count(self) -> int:
        """Returns the number of ranks."""
        return self.tp * self.cp * self.pp

    @property
    def field(self) -> str:
        """Returns the setting that makes several ranks; ``tp`` where none does."""
        return next((field for field in ("cp", "pp") if getattr(self, field) > 1), "tp")

    def __str__(self) -> str:
        """Returns the setting and its value, as messages name it."""
        return f"{self.field} is {getattr(self, self.field)}"

    def require_one_kind(self) -> None:
        """Checks that each is 1 to 64, and one of them at most more than 1. Raises ConfigError naming the field."""
        for field in self.__struct_fields__:
            if not 1 <= getattr(self, field) <= MOST:
                raise ConfigError(f"{field} is {getattr(self, field)}; use 1 to {MOST}", field)
        several = [field for field in self.__struct_fields__ if getattr(self, field) > 1]
        if len(several) > 1:
            text = " and ".join(f"{field} is {getattr(self, field)}" for field in several)
            raise ConfigError(f"{text}: ranks share a model in one way; set the others to 1", several[-1])

    def require(self, program: Program) -> None:
        """Checks that ``program`` runs on these ranks. Raises ConfigError, which names what works."""
        self.require_one_kind()
        if self.count == 1:
            return None
        if self.tp > 1:
            return require_splittable(program, self.tp)
        if (problem := next(_obstacles(program, self), None)) is not None:
            raise ConfigError(f"{self}, and {problem}", self.field)
        return None

    def possible(self, program: Program, most: int = MOST) -> tuple[int, ...]:
        """Returns the numbers of ranks up to ``most`` that ``program`` runs on in this way, 1 first."""
        if self.field == "tp":
            return possible_widths(program, most)
        counts = (msgspec.structs.replace(self, **{self.field: count}) for count in range(1, most + 1))
        return tuple(each.count for each in counts if not any(_obstacles(program, each)))

    def share(self, program: Program, index: int) -> RankProgram:
        """Returns what rank ``index`` of ``program`` has."""
        rank = Rank(index, self.count)
        if self.tp > 1:
            return split(program, rank)
        return _by_rows(program, rank) if self.cp > 1 else _by_layers(program, rank)


def _obstacles(program: Program, widths: Widths) -> Iterator[str]:
    if widths.count == 1:
        return
    unknown = next((type(op).__name__ for op in program.ops if type(op) not in ANYWHERE), None)
    if unknown is not None:
        yield f"{unknown} runs on one rank only; use 1"
    layers = len(_starts(program))
    if widths.pp > layers:
        yield f"the model has {layers} layers; use 1 to {layers}"


def _by_rows(program: Program, rank: Rank) -> RankProgram:
    """All of the program, with a meeting where keys and values of a layer are there."""
    ops = tuple(part for op in program.ops for part in _then_meets(op))
    head = head_of(program)
    whole = msgspec.structs.replace(program, ops=ops)
    last = Residual((head.x, head.delta), 0)
    return RankProgram(
        rank,
        whole,
        (0, program.kv_heads),
        {},
        {},
        {},
        (0, program.vocab_size),
        head,
        weights_at(program),
        head_site(program),
        BY_ROWS,
        handed=last,
        last=last,
        carried=2,
    )


def _then_meets(op: p.Op) -> tuple[p.Op, ...]:
    return (op, p.AllGather(op.qkv, op.qkv)) if isinstance(op, p.RopeAppend) else (op,)


def _by_layers(program: Program, rank: Rank) -> RankProgram:
    """Own layers' ops; the last registers of the whole stay readable behind the last rank."""
    starts, head = _starts(program), head_of(program)
    layers = len(starts)
    cuts = [starts[layers * at // rank.count] for at in range(1, rank.count)]
    alive = _alive(program)
    lives = [*(tuple(sorted(alive[cut])) for cut in cuts), (head.x, head.delta)]
    firsts = [sum(len(each) for each in lives[:at]) for at in range(len(lives))]
    between = [Residual(), *(Residual(live, first) for live, first in zip(lives, firsts, strict=True))]
    begin, end = (0, *cuts, len(program.ops))[rank.index : rank.index + 2]
    ops = program.ops[begin:end]
    used = {*_names(ops), head.norm}  # the lead norms states that are asked for
    weights = tuple(weight for weight in program.weights if weight.name in used)
    own = msgspec.structs.replace(program, ops=ops, weights=weights)
    return RankProgram(
        rank,
        own,
        (0, program.kv_heads),
        {},
        {},
        {},
        (0, program.vocab_size),
        head,
        {number: name for number, name in weights_at(program).items() if name in used},
        head_site(program),
        BY_LAYERS,
        given=between[rank.index],
        handed=between[rank.index + 1],
        last=between[-1],
        carried=sum(map(len, lives)),
        adapts_before=sum(isinstance(op, p.Adapt) for op in program.ops[:begin]),
    )


def _starts(program: Program) -> tuple[int, ...]:
    """Where each layer's ops begin: the last place before attention where the residual stream is all there is."""
    residual = {"x"} | {op.delta for op in program.ops if isinstance(op, p.RmsNorm | p.Add | p.LmHead) and op.delta}
    alive, found = _alive(program), list[int]()
    least = 1  # behind the embedding
    for at, op in enumerate(program.ops):
        if isinstance(op, p.RopeAppend):
            found.append(max(i for i in range(least, at + 1) if alive[i] <= residual))
            least = at + 1
    return tuple(found)


def _alive(program: Program) -> list[frozenset[str]]:
    """Of each op the registers that it and those behind it read before they are written again."""
    registers = {getattr(op, "out", "") for op in program.ops}
    found, alive = list[frozenset[str]](), frozenset[str]()
    for op in reversed(program.ops):
        adds = isinstance(op, p.Adapt)  # to what is in ``out``
        reads = (getattr(op, field) for field in op.__struct_fields__ if field != "out" or adds)
        alive = alive - {getattr(op, "out", "")} | {name for name in reads if isinstance(name, str)} & registers
        found.append(alive)
    return found[::-1]


def _names(ops: tuple[p.Op, ...]) -> set[str]:
    """Every name in the ops: of weights, and of registers, which are none of them."""
    found = set[str]()
    for op in ops:
        fields = [getattr(op, field) for field in op.__struct_fields__]
        gates = [gate for gate in fields if isinstance(gate, p.MoeGate)]
        found |= {name for name in fields if isinstance(name, str)}
        found |= {name for gate in gates for name in (gate.gate_up_bias, gate.down_bias)}
    return found
