"""Splits a program among ranks by columns (tensor parallel): which rows of each weight a rank has, and where the
ranks meet.

Knows nothing of tensors, processes or memory. A rank has some rows of every matrix and multiplies them by its whole
input, so that each result has the same bits as on one rank, whatever the weight's kind and however it was rounded;
then the ranks' columns are put together. Small weights are on every rank: norms, routers, the residual stream.

    embedding    rows of the vocabulary          -> Meet (a row is on one rank)
    q, k, v      own heads; KV heads that several ranks need are on each of them
    attention    own heads; of latents, own heads over latents that every rank has  -> Meet
    recurrence   own heads and their states      -> Meet
    first Mamba  own channels and their states   -> Meet, twice
    o, down      own outputs                     -> Meet
    gate, up     own inner columns, SwiGLU       -> Meet
    experts      own experts                     -> Meet, MixExperts
    head         rows of the vocabulary

If queries and keys are normed over all heads (OLMo 2), q, k and v are own outputs like any others, and each rank
has attention of all heads. What changes whole rows in place (several residual streams, layers' own inputs, gates of
which the lowest are cut) runs on a copy of all columns, on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from baton.engine.program import ops as p
from baton.engine.program.program import Program
from baton.engine.program.rank_experts import EXPERTS, deal_experts, few_experts, rows_of
from baton.engine.program.rank_program import MOST, Part, Rank, RankProgram, Rows, rewritten
from baton.engine.program.rank_states import own_heads, state_obstacles
from baton.protos.errors import ConfigError

PROJECTED = "projected"  # the register of all heads' q, k and v, which every rank copies


def possible_widths(program: Program, most: int = MOST) -> tuple[int, ...]:
    """Returns the numbers of ranks up to ``most`` that ``program`` can be split among, 1 first."""
    return tuple(count for count in range(1, most + 1) if not any(_obstacles(program, count)))


def require_splittable(program: Program, count: int) -> None:
    """Checks that ``program`` can be split among ``count`` ranks. Raises ConfigError, which names the numbers that
    work.
    """
    problem = next(_obstacles(program, count), None)
    if problem is not None:
        most = possible_widths(program)[-1]
        raise ConfigError(f"tp is {count}, and {problem}; use {f'1 to {most}' if most > 1 else 1}", "tp")


def split(program: Program, rank: Rank) -> RankProgram:
    """Returns the share of ``program`` that ``rank`` runs. Raises ConfigError if the program can't be split among
    so many ranks.
    """
    require_splittable(program, rank.count)
    return _Split(program, rank).done()


def _obstacles(program: Program, count: int) -> Iterator[str]:
    if not 1 <= count <= MOST:
        yield f"1 to {MOST} ranks are known"
        return
    if count == 1:
        return
    if program.heads < count and not norms_all_heads(program):
        yield f"the model has {program.heads} attention heads"
    unknown = next((type(op) for op in program.ops if type(op) not in _SPLITS), None)
    if unknown is not None:
        yield f"{unknown.__name__} runs on one rank only"
    yield from state_obstacles(program, count)
    few = min((rows_of(program, name) for name in _split_weights(program)), default=count)
    if few < count:
        yield f"a matrix has {few} rows only"
    yield from few_experts(program, count)


def norms_all_heads(program: Program) -> bool:
    """Returns whether queries and keys are normed over all heads, so that each rank computes attention of all
    heads.
    """
    parts = (op for op in program.ops if isinstance(op, p.NormPart))
    return any(op.first < _values_at(program.heads, program.kv_heads, program.head_dim) for op in parts)


def _values_at(heads: int, kv_heads: int, dim: int) -> int:
    """Returns the first column of values in a register of q, k and v."""
    return (heads + kv_heads) * dim


def _split_weights(program: Program) -> Iterator[str]:
    routers = program.routers
    for op in program.ops:
        if isinstance(op, p.Linear | p.Embedding | p.LmHead) and op.weight not in routers:
            yield op.weight


def _read(op: p.Op) -> set[object]:
    """Returns the registers that ``op`` reads, among its other settings."""
    names: set[object] = {getattr(op, field) for field in op.__struct_fields__ if field != "out"}
    return names | set(op.xs) if isinstance(op, p.SumRows) else names


class _Split:
    """Builds a rank's share in one pass over a program's ops; registers keep their names if the rank has all of
    them.
    """

    def __init__(self, program: Program, rank: Rank) -> None:
        self._program, self._rank = program, rank
        self._routers = program.routers
        self._rows: dict[str, Rows] = {}
        self._parts: dict[str, Part] = {}
        self._widths: dict[str, int] = {}
        self._into_heads = {op.qkv for op in program.ops if isinstance(op, p.RopeAppend)}
        self._into_gated = {op.x for op in program.ops if isinstance(op, p.GatedHeads)}
        self._gated = {op.x for op in program.ops if isinstance(op, p.Gate)}
        recurrent = (op for op in program.ops if isinstance(op, p.GatedDelta | p.StateSpace))
        self._into_states = {name: rows for op in recurrent for name, rows in own_heads(op, rank).inputs.items()}
        self._into_pairs = {op.gate_up for op in program.ops if isinstance(op, p.SwiGlu | p.GeGlu)}
        self._into_pairs |= {op.x for op in program.ops if isinstance(op, p.Convolve)}  # x and its gate
        self._into_own = {op.x for op in program.ops if isinstance(op, p.Activate)}
        self._into_own |= {op.dt for op in program.ops if isinstance(op, p.SelectiveScan)}
        self._into_latents = {op.q: op for op in program.ops if isinstance(op, p.LatentAttention)}
        self._into_queries = {op.x for op in program.ops if isinstance(op, p.RotateQueries)}
        self._sparse = {op.x for op in program.ops if isinstance(op, p.Sparsen)}  # gates, of which all are needed
        self._rewritten = frozenset(rewritten(program))
        self._inner: dict[str, int] = {}  # of a register of gates and ups, or of one of both: all ranks' columns
        self._whole_heads = norms_all_heads(program)
        heads = program.heads, program.kv_heads
        self._queries, self._kv = ((0, heads[0]), (0, heads[1])) if self._whole_heads else rank.heads(*heads)

    def done(self) -> RankProgram:
        ops = _adapted_first([part for op in self._program.ops for part in _SPLITS[type(op)](self, op)])
        reads = [_read(op) for op in ops]
        assert not any(self._overtakes(ops, reads, register) for register in self._widths), (
            "a register may be overwritten"
        )
        writers = (op for op in ops if not isinstance(op, p.Meet))
        assert not {getattr(op, "out", "") for op in writers} & set(self._widths), (
            "ranks would write the same columns"
        )
        own = msgspec.structs.replace(self._program, ops=ops, heads=self._queries[1] - self._queries[0])
        return msgspec.structs.replace(
            RankProgram.undivided(self._program, self._rank),
            program=own,
            own_kv=self._kv,
            rows=self._rows,
            parts=self._parts,
            widths=self._widths,
            vocab=self._rank.part(self._program.vocab_size),
            shared_floats=sum(self._widths.values()),
            expert_layers=len(self._program.experts),
        )

    def _overtakes(self, ops: tuple[p.Op, ...], reads: list[set[object]], register: str) -> bool:
        """Returns whether a rank may write ``register`` while another still reads its old content, with no meeting
        between. ``reads`` has what each op reads.
        """
        own = {name for name, part in self._parts.items() if part.whole == register}
        read = False  # since the last meeting for another register; a step ends with one
        for op, names in zip(ops, reads, strict=True):
            if isinstance(op, p.Meet) and op.x not in own:
                read = False
            if read and getattr(op, "out", None) in own:
                return True
            read = read or register in names
        return False

    def _gather(self, register: str, width: int, part: tuple[int, int]) -> tuple[str, p.Meet]:
        """Returns the register of the rank's own columns, and the op that makes ``register`` whole."""
        own = f"{register}@"
        self._parts[own] = Part(register, part[0], part[1] - part[0])
        self._widths[register] = width
        return own, p.Meet(own, register)

    def embedding(self, op: p.Embedding) -> tuple[p.Op, ...]:
        """Looks up the rank's own tokens; each rank copies the result, because it adds to its own residual
        stream.
        """
        weight = next(weight for weight in self._program.weights if weight.name == op.weight)
        hidden, own = weight.shapes[0][1], f"{op.out}@"
        self._rows[op.weight] = (self._rank.part(self._program.vocab_size),)
        self._parts[own] = Part("embedded", 0, hidden, by_rows=True)
        self._widths["embedded"] = hidden
        return msgspec.structs.replace(op, out=own), p.Meet(own, op.out)

    def linear(self, op: p.Linear) -> tuple[p.Op, ...]:
        """Computes the rank's own outputs; those that only the rank itself reads stay there."""
        if op.weight in self._routers:
            return (op,)
        if op.out in self._into_latents:
            latent, (begin, end) = self._into_latents[op.out], self._queries
            width = latent.nope_dim + latent.rope_dim
            return (self._of_rows(op, ((begin * width, end * width),)),)
        if op.out in self._into_states:
            return (self._of_rows(op, self._into_states[op.out]),)
        if op.out in self._into_queries:
            dim, (begin, end) = self._program.head_dim, self._queries
            return (self._of_rows(op, ((begin * dim, end * dim),)),)
        if op.out in self._into_gated:
            return (self._of_rows(op, self._head_rows(gated=True)),)
        if op.out in self._into_heads:
            return self._whole_rows(op) if self._whole_heads else (self._of_rows(op, self._head_rows()),)
        if op.out in self._into_pairs - self._sparse:
            inner = rows_of(self._program, op.weight) // 2
            self._inner[op.out], (begin, end) = inner, self._rank.part(inner)
            return (self._of_rows(op, ((begin, end), (inner + begin, inner + end))),)
        total = rows_of(self._program, op.weight)
        part = self._rank.part(total)
        if op.out in self._into_own:
            self._inner[op.out] = total
            return (self._of_rows(op, (part,)),)
        if op.out in self._rewritten:
            return self._copied(op, part, total)
        own, gather = self._gather(op.out, total, part)
        return msgspec.structs.replace(self._of_rows(op, (part,)), out=own), gather

    def _copied(self, op: p.Linear, part: tuple[int, int], total: int) -> tuple[p.Op, ...]:
        """Computes the rank's own outputs; every rank gets a copy of all, because in other layers each rank writes
        all of ``op.out`` itself, and would write what others still read.
        """
        own, whole = f"{op.out}@", f"{op.out} of all"
        self._parts[own], self._widths[whole] = Part(whole, part[0], part[1] - part[0]), total
        return msgspec.structs.replace(self._of_rows(op, (part,)), out=own), p.Meet(own, op.out)

    def _whole_rows(self, op: p.Linear) -> tuple[p.Op, ...]:
        """Computes the rank's own outputs; every rank gets a copy of all, because they are normed and rotated in
        place.
        """
        total, own = rows_of(self._program, op.weight), f"{op.out}@"
        begin, end = self._rank.part(total)
        self._parts[own] = Part(PROJECTED, begin, end - begin)
        self._widths[PROJECTED] = total
        return msgspec.structs.replace(self._of_rows(op, ((begin, end),)), out=own), p.Meet(own, op.out)

    def _of_rows(self, op: p.Linear, rows: Rows) -> p.Linear:
        self._rows[op.weight] = rows
        if op.bias is not None:
            self._rows[op.bias] = rows
        return op

    def _head_rows(self, gated: bool = False) -> Rows:
        """Returns the rows of own heads of q, k and v; ``gated``: each head of q is followed by its gate."""
        m, dim, wide = self._program, self._program.head_dim, self._program.head_dim * (2 if gated else 1)
        (q0, q1), (k0, k1) = self._queries, self._kv
        keys, values = m.heads * wide, m.heads * wide + m.kv_heads * dim
        return (q0 * wide, q1 * wide), (keys + k0 * dim, keys + k1 * dim), (values + k0 * dim, values + k1 * dim)

    def attention(self, op: p.PagedAttention) -> tuple[p.Op, ...]:
        if self._whole_heads or op.out in self._gated:
            return (op,)
        dim, (begin, end) = self._program.head_dim, self._queries
        if op.sinks is not None:
            self._rows[op.sinks] = ((begin, end),)
        own, gather = self._gather(op.out, self._program.heads * dim, (begin * dim, end * dim))
        return msgspec.structs.replace(op, out=own), gather

    def norm_part(self, op: p.NormPart) -> tuple[p.Op, ...]:
        """Norms all heads' queries or keys on every rank, and values of the rank's own heads."""
        m, dim, (begin, end) = self._program, self._program.head_dim, self._kv
        if self._whole_heads:
            return (op,)
        head = (op.first - _values_at(m.heads, m.kv_heads, dim)) // dim
        if not begin <= head < end:
            return ()
        first = _values_at(self._queries[1] - self._queries[0], end - begin, dim)
        return (msgspec.structs.replace(op, first=first + (head - begin) * dim),)

    def gate(self, op: p.Gate) -> tuple[p.Op, ...]:
        """Gates the rank's own heads of attention."""
        dim, (begin, end) = self._program.head_dim, self._queries
        own, gather = self._gather(op.out, self._program.heads * dim, (begin * dim, end * dim))
        return msgspec.structs.replace(op, out=own), gather

    def recurrent(self, op: p.GatedDelta | p.StateSpace) -> tuple[p.Op, ...]:
        """Advances the states of the rank's own heads."""
        mine = own_heads(op, self._rank)
        self._rows |= mine.rows
        if mine.norm is None:
            own, gather = self._gather(op.out, mine.total, mine.columns)
            return msgspec.structs.replace(mine.op, out=own), gather
        own, whole = f"{op.out}@", f"{op.out} of all"  # every rank norms a copy of all
        self._parts[own] = Part(whole, mine.columns[0], mine.columns[1] - mine.columns[0])
        self._widths[whole] = mine.total
        return msgspec.structs.replace(mine.op, out=own), p.Meet(own, op.out), mine.norm

    def latent(self, op: p.LatentAttention) -> tuple[p.Op, ...]:
        """Attends with own heads; every rank keeps the same latents, because all heads read them."""
        (begin, end), each = self._queries, op.nope_dim + op.value_dim
        self._rows[op.expand] = ((begin * each, end * each),)
        own, gather = self._gather(
            op.out, self._program.heads * op.value_dim, (begin * op.value_dim, end * op.value_dim)
        )
        return msgspec.structs.replace(op, out=own), gather

    def activate(self, op: p.SwiGlu | p.GeGlu | p.Activate) -> tuple[p.Op, ...]:
        if not isinstance(op, p.Activate) and op.gate_up in self._sparse:
            return (op,)
        own, gather, _ = self._own_inner(op.out, op.x if isinstance(op, p.Activate) else op.gate_up)
        return msgspec.structs.replace(op, out=own), gather

    def convolve(self, op: p.Convolve) -> tuple[p.Op, ...]:
        """Convolves the rank's own channels."""
        own, gather, (first, end) = self._own_inner(op.out, op.x)
        self._rows |= dict.fromkeys((op.conv, *((op.conv_bias,) if op.conv_bias else ())), ((first, end),))
        return msgspec.structs.replace(op, out=own, width=end - first, first_channel=first), gather

    def scan(self, op: p.SelectiveScan) -> tuple[p.Op, ...]:
        """Advances the states of the rank's own channels, which are projected from all convolved ones."""
        own, gather, (first, end) = self._own_inner(op.out, op.dt)
        self._rows |= dict.fromkeys((op.a_log, op.skip), ((first, end),))
        return msgspec.structs.replace(op, out=own, first_channel=first), gather

    def _own_inner(self, out: str, source: str) -> tuple[str, p.Meet, tuple[int, int]]:
        """Returns as ``_gather`` for ``out``, which has the columns of ``source``, and the range of own columns."""
        inner = self._inner[source]
        part = self._rank.part(inner)
        return *self._gather(out, inner, part), part

    def moe(self, op: p.Moe) -> tuple[p.Op, ...]:
        """Gives the rank whole experts; each rank mixes all experts' outputs, so that nothing more is gathered."""
        dealt = deal_experts(self._program, self._rank, op)
        self._rows |= dealt.rows
        self._gather(EXPERTS, dealt.columns, (0, 0))  # outputs go to other hosts one by one
        return dealt.ops

    def adapt(self, op: p.Adapt) -> tuple[p.Op, ...]:
        """Adds adapters to the rank's own outputs; those of an embedding are added to whole rows, on every rank."""
        own = f"{op.out}@"
        if op.x is None or own not in self._parts:
            return (op,)
        return (msgspec.structs.replace(op, out=own),)

    def head(self, op: p.LmHead) -> tuple[p.Op, ...]:
        own = (self._rank.part(self._program.vocab_size),)
        self._rows |= dict.fromkeys((op.weight, *((op.bias,) if op.bias else ())), own)
        return (op,)

    def as_it_is(self, op: p.Op) -> tuple[p.Op, ...]:
        """Returns the op unchanged, for every rank: it is small, or works on own columns anyway."""
        return (op,)


def _adapted_first(ops: list[p.Op]) -> tuple[p.Op, ...]:
    """Returns the ops with adapters added to own columns before these are put together with those of other
    ranks.
    """
    for at in range(1, len(ops)):
        before, op = ops[at - 1 : at + 1]
        if isinstance(op, p.Adapt) and isinstance(before, p.Meet) and before.x == op.out:
            ops[at - 1 : at + 1] = op, before
    return tuple(ops)


_SPLITS: dict[type, Callable[[_Split, Any], tuple[p.Op, ...]]] = {
    p.Embedding: _Split.embedding,
    p.RmsNorm: _Split.as_it_is,
    p.Linear: _Split.linear,
    p.Adapt: _Split.adapt,
    p.RopeAppend: _Split.as_it_is,
    p.PagedAttention: _Split.attention,
    p.LatentAttention: _Split.latent,
    p.SwiGlu: _Split.activate,
    p.GeGlu: _Split.activate,
    p.Add: _Split.as_it_is,
    p.NormPart: _Split.norm_part,
    p.Moe: _Split.moe,
    p.Route: _Split.as_it_is,
    p.Combine: _Split.as_it_is,
    p.LmHead: _Split.head,
    p.GatedHeads: _Split.as_it_is,
    p.Gate: _Split.gate,
    p.GatedDelta: _Split.recurrent,
    p.StateSpace: _Split.recurrent,
    p.Activate: _Split.activate,
    p.Convolve: _Split.convolve,
    p.SelectiveScan: _Split.scan,
    **dict.fromkeys((p.LayerNorm, p.Center, p.ScaleRows, p.RouteTwo, p.Divide), _Split.as_it_is),
    **dict.fromkeys((p.HalveHeads, p.TemperQueries, p.RotateHeads), _Split.as_it_is),
    **dict.fromkeys((p.LayerInputs, p.GateInputs, p.Sparsen, p.MatchSize, p.SumRows), _Split.as_it_is),
    **dict.fromkeys((p.PredictStreams, p.CorrectStreams, p.AddToEach, p.RotateQueries), _Split.as_it_is),
}
SPLIT_OPS = frozenset(_SPLITS)
