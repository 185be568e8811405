"""Divides a model among a worker's ranks, by its columns, a step's rows or its layers, and computes each rank's
share.

Knows nothing of tensors, processes or memory. ``ranks.py`` splits columns (tensor parallel). By rows (context
parallel) every rank has all weights and computes some rows of each step; ranks meet once per layer, when keys and
values are written. Expert parallel ranks divide rows too, but each has only some experts, which run over all ranks'
rows. By layers (pipeline parallel) each stage has the weights of its own layers and hands on the residual stream; a
stage is one rank, or several that divide its columns.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import msgspec

from baton.engine.program import ops as p
from baton.engine.program.program import Program
from baton.engine.program.rank_experts import EXPERTS, deal_experts, few_experts, rows_of
from baton.engine.program.rank_program import (
    BY_LAYERS,
    BY_ROWS,
    MOST,
    Part,
    Rank,
    RankProgram,
    Residual,
    Rows,
    head_of,
    hidden_of,
)
from baton.engine.program.ranks import SPLIT_OPS, possible_widths, require_splittable, split
from baton.protos.errors import ConfigError

ROWS, ROUTES = "rows of all", "routes of all"  # registers that hold all ranks' rows, on every rank


class Widths(msgspec.Struct, frozen=True):
    """Holds the numbers of ranks that divide a model.

    ``tp`` combines with ``pp``: each of ``pp`` stages then has ``tp`` ranks. ``ep`` beside ``tp`` must equal it,
    because ranks that divide columns divide whole experts. Other combinations aren't supported.
    """

    tp: int = 1  # ranks that divide columns
    cp: int = 1  # ranks that divide a step's rows
    pp: int = 1  # stages that divide layers
    ep: int = 1  # ranks that divide experts

    @property
    def count(self) -> int:
        """Returns the total number of ranks."""
        return max(self.tp, self.ep) * self.cp * self.pp

    @property
    def several(self) -> tuple[str, ...]:
        """Returns the names of the settings that are above 1."""
        return tuple(field for field in self.__struct_fields__ if getattr(self, field) > 1)

    @property
    def field(self) -> str:
        """Returns the name of the first setting above 1; ``tp`` if there is none."""
        return (*self.several, "tp")[0]

    def __str__(self) -> str:
        """Returns the settings above 1 with their values, for messages."""
        return " and ".join(f"{field} is {getattr(self, field)}" for field in self.several or ("tp",))

    def require_known(self) -> None:
        """Checks that the numbers are in range and can be combined. Raises ConfigError naming the field."""
        for field in self.__struct_fields__:
            if not 1 <= getattr(self, field) <= MOST:
                raise ConfigError(f"{field} is {getattr(self, field)}; use 1 to {MOST}", field)
        if self.count > MOST:
            raise ConfigError(f"{self}: that is {self.count} ranks; use {MOST} at most", self.several[-1])
        if len(self.several) > 1 and ("cp" in self.several or self.ep not in (1, self.tp)):
            text = f"{self}: cp goes with no other number of ranks, ep with an equal tp only; set the others to 1"
            raise ConfigError(text, self.several[-1])

    def require(self, program: Program) -> None:
        """Checks that ``program`` runs on these ranks. Raises ConfigError, which names the numbers that work."""
        self.require_known()
        if self.tp > 1:
            require_splittable(program, self.tp)
        if (problem := next(_obstacles(program, self), None)) is not None:
            raise ConfigError(f"{self}, and {problem}", self.several[-1])

    def require_on_cards(self, program: Program | None = None) -> None:
        """Checks that ranks on cards can divide a model so, and ``program`` if it is given. Raises ConfigError
        naming the field.
        """
        others = [field for field in self.several if field != "tp"]
        if others:
            text = f"{self}: ranks on cards share a model's columns alone; set {', '.join(others)} to 1"
            raise ConfigError(f"{text} and tp to the number of cards, or use device cpu", others[0])
        if program is not None and program.experts:
            raise ConfigError(f"{self}: layers of experts run on one card; use 1, or device cpu", "tp")

    def possible(self, program: Program, most: int = MOST) -> tuple[int, ...]:
        """Returns the numbers of ranks up to ``most`` on which ``program`` runs if ``field`` is varied, 1 first."""
        if self.field == "tp":
            return possible_widths(program, most)
        counts = (msgspec.structs.replace(self, **{self.field: count}) for count in range(1, most + 1))
        return tuple(each.count for each in counts if not any(_obstacles(program, each)))

    def share(self, program: Program, index: int, spare: int = 0) -> RankProgram:
        """Returns the share of ``program`` that rank ``index`` runs, with room for ``spare`` copies of other ranks'
        experts per layer.
        """
        rank = Rank(index, self.count, spare)
        if self.pp > 1:
            return _by_layers(program, rank, self.tp)
        return split(program, rank) if self.tp > 1 else _by_rows(program, rank, self.ep > 1)


def _obstacles(program: Program, widths: Widths) -> Iterator[str]:
    if widths.count == 1:
        return
    unknown = {type(op) for op in program.ops} - SPLIT_OPS
    if unknown:
        yield f"{min(op.__name__ for op in unknown)} runs on one rank only; use 1"
    if program.states and (widths.cp > 1 or widths.ep > widths.tp):
        yield "a recurrent state isn't shared by rows; use 1, or tp or pp"
    latent = any(isinstance(op, p.LatentAttention) for op in program.ops)
    if latent and (widths.cp > 1 or widths.ep > widths.tp):
        yield "latent attention isn't shared by rows; use 1, or tp or pp"
    layers = len(_starts(program))
    if widths.pp > layers:
        yield f"the model has {layers} layers; use 1 to {layers}"
    if widths.ep > 1 and not program.experts:
        yield "the model has no layers of experts; use 1"
    elif widths.ep > 1 and (few := next(few_experts(program, widths.ep), None)):
        yield f"{few}; use 1 to {program.experts[0].experts}"


def _by_rows(program: Program, rank: Rank, deals: bool) -> RankProgram:
    """Returns all of the program with a meeting where a layer's KV is written; if ``deals``, with the rank's own
    experts alone.
    """
    whole, head, rows, columns = RankProgram.undivided(program, rank), head_of(program), dict[str, Rows](), 0
    ops = list[p.Op]()
    for op in program.ops:
        if isinstance(op, p.Moe) and deals:
            dealt = deal_experts(program, rank, op, ROWS, ROUTES)
            rows, columns = rows | dealt.rows, dealt.columns
            ops += (p.Exchange(op.x, op.logits, ROWS, ROUTES), *dealt.ops)
        else:
            ops += _then_meets(op)
    widths = _exchanged(program, columns) if deals else {}
    hidden = hidden_of(program)
    last = Residual((head.x, head.delta), (hidden, hidden))
    return msgspec.structs.replace(
        whole,
        program=msgspec.structs.replace(program, ops=tuple(ops)),
        rows=rows,
        parts={f"{EXPERTS}@": Part(EXPERTS, 0, 0)} if deals else {},
        widths=widths,
        shared_floats=sum(widths.values()),
        deal=BY_ROWS,
        handed=last,
        last=last,
        carried=2 * hidden,
        expert_layers=len(program.experts) if deals else 0,
    )


def _exchanged(program: Program, columns: int) -> dict[str, int]:
    """Returns the registers in which ranks exchange rows, and their widths in floats."""
    layer = program.experts[0]
    return {ROWS: columns // layer.chosen, ROUTES: layer.experts, EXPERTS: columns}


def _then_meets(op: p.Op) -> tuple[p.Op, ...]:
    return (op, p.Meet(op.qkv, op.qkv)) if isinstance(op, p.RopeAppend) else (op,)


def _by_layers(program: Program, rank: Rank, columns: int) -> RankProgram:
    """Returns the ops of the rank's own layers and columns; the last registers of the whole stay readable after the
    last stage.
    """
    whole = RankProgram.undivided(program, rank)
    if columns > 1:
        whole = split(program, Rank(rank.index % columns, columns, rank.spare))
    all_ops, stage, stages = whole.program.ops, rank.index // columns, rank.count // columns
    between, cuts = _handed(whole, stages, program)
    begin, end = (0, *cuts, len(all_ops))[stage : stage + 2]
    ops = all_ops[begin:end]
    head = whole.head
    used = {
        *_names(ops),
        head.norm,
        *((head.norm_bias,) if head.norm_bias else ()),
    }  # the lead norms asked-for states
    weights = tuple(weight for weight in program.weights if weight.name in used)
    parts = {name: part for name, part in whole.parts.items() if name in used}
    ours = {part.whole for part in parts.values()}
    return msgspec.structs.replace(
        whole,
        rank=rank,
        program=msgspec.structs.replace(whole.program, ops=ops, weights=weights),
        rows={name: rows for name, rows in whole.rows.items() if name in used},
        parts=parts,
        widths={name: width for name, width in whole.widths.items() if name in ours},
        sites={number: name for number, name in whole.sites.items() if name in used},
        deal=BY_LAYERS,
        given=between[stage],
        handed=between[stage + 1],
        last=between[-1],
        carried=sum(sum(residual.widths) for residual in between),
        adapts_before=sum(isinstance(op, p.Adapt) for op in all_ops[:begin]),
        columns=columns,
        crosses=_crosses(all_ops, cuts),
        shared_floats=stages * whole.shared_floats,
        first_shared=stage * whole.shared_floats,
    )


def _handed(whole: RankProgram, stages: int, program: Program) -> tuple[tuple[Residual, ...], tuple[int, ...]]:
    """Returns the registers that each of ``stages`` is given, and last those that the head reads; and the ops at
    which stages begin. ``whole`` is a rank's columns of ``program``.
    """
    starts, alive = _starts(whole.program), _alive(whole.program)
    cuts = tuple(starts[len(starts) * at // stages] for at in range(1, stages))
    lives = [*(tuple(sorted(alive[cut])) for cut in cuts), (whole.head.x, whole.head.delta)]
    linear, hidden = (op for op in program.ops if isinstance(op, p.Linear)), hidden_of(program)
    known = {op.out: rows_of(program, op.weight) for op in linear}
    widths = [tuple(known.get(name, hidden) for name in live) for live in lives]
    firsts = itertools.accumulate(map(sum, widths), initial=0)
    return (Residual(), *map(Residual, lives, widths, firsts)), cuts


def _crosses(ops: tuple[p.Op, ...], cuts: tuple[int, ...]) -> bool:
    """Returns whether a stage reads K and V that an earlier one has written; stages begin at ``cuts``."""
    written, stage = dict[int, int](), 0
    for at, op in enumerate(ops):
        stage += at in cuts
        if isinstance(op, p.RopeAppend):
            written[op.layer] = stage
        elif isinstance(op, p.PagedAttention) and written[op.layer] != stage:
            return True
    return False


def _starts(program: Program) -> tuple[int, ...]:
    """Returns the index of each layer's first op: the last place before attention, or before a recurrent op, where
    only the residual stream is alive.
    """
    adding = p.RmsNorm | p.LayerNorm | p.Add | p.LmHead
    residual = {"x"} | {op.delta for op in program.ops if isinstance(op, adding) and op.delta}
    residual |= {op.streams for op in program.ops if isinstance(op, p.PredictStreams)}
    residual |= {op.inputs for op in program.ops if isinstance(op, p.GateInputs)}
    attended = p.RopeAppend | p.RotateQueries | p.LatentAttention
    alive, found = _alive(program), list[int]()
    least = 1  # behind the embedding
    for at, op in enumerate(program.ops):
        if isinstance(op, attended | p.GatedDelta | p.StateSpace | p.Convolve):
            found.append(max(i for i in range(least, at + 1) if alive[i] <= residual))
            least = at + 1
    return tuple(found)


def _alive(program: Program) -> list[frozenset[str]]:
    """Returns, for each op, the registers that it and later ops read before they are written again."""
    registers = {op.out for op in program.ops if hasattr(op, "out")}
    found, alive = list[frozenset[str]](), frozenset[str]()
    for op in reversed(program.ops):
        adds = isinstance(op, p.Adapt)  # to what is in ``out``
        reads = [getattr(op, field) for field in op.__struct_fields__ if field != "out" or adds]
        reads += op.xs if isinstance(op, p.SumRows) else ()
        alive = alive - {getattr(op, "out", "")} | {name for name in reads if isinstance(name, str)} & registers
        found.append(alive)
    return found[::-1]


def _names(ops: tuple[p.Op, ...]) -> set[str]:
    """Returns every name in the ops, of weights and of registers, which never coincide."""
    found = set[str]()
    for op in ops:
        fields = [getattr(op, field) for field in op.__struct_fields__]
        gates = [gate for gate in fields if isinstance(gate, p.MoeGate)]
        found |= {name for name in fields if isinstance(name, str)}
        found |= {name for gate in gates for name in (gate.gate_up_bias, gate.down_bias)}
    return found
