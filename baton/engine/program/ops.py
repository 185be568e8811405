"""Represents a model as a program: a short list of fused ops over named weights, the KV planes it needs, its rope.

Knows nothing of tensors, of files or of how an op is computed. A name that an op writes is a register; ``x`` is the
residual stream. An op's weights are names in ``Program.weights``.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from baton.protos.nouns import LayerGroup, StatePlane


class Weight(msgspec.Struct, frozen=True):
    """Names one weight: the checkpoint's tensors stacked along dimension 0, each with its expected shape.

    A source may name a part of a tensor that holds all experts' (``program/stacked.py``). ``plus`` is added to
    every element, as norms are stored that start from 1; such a weight is float32 whatever the others are.
    """

    name: str
    sources: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    plus: float = 0.0


class _Op(msgspec.Struct, frozen=True, tag=True):
    """A member of ``Op``."""


class Embedding(_Op, frozen=True, tag=True):
    """Looks tokens up: out = weight[token] x scale."""

    weight: str
    out: str
    scale: float = 1.0


class RmsNorm(_Op, frozen=True, tag=True):
    """Adds the residual and norms it: x += delta (unless None); out = norm(x) x weight."""

    x: str
    delta: str | None
    weight: str
    eps: float
    out: str


class Add(_Op, frozen=True, tag=True):
    """Adds the residual where no norm follows: x += delta."""

    x: str
    delta: str


class NormPart(_Op, frozen=True, tag=True):
    """Norms columns ``first`` to ``first`` + ``width`` - 1 of each row of ``x`` in place, as one vector."""

    x: str
    first: int
    width: int
    weight: str
    eps: float


class Linear(_Op, frozen=True, tag=True):
    """Multiplies by a weight: out = x · weightᵀ + bias."""

    x: str
    weight: str
    bias: str | None
    out: str


class Adapt(_Op, frozen=True, tag=True):
    """Adds the rows' adapters beside a weight: out += scale x B · (A · x), where the row's sequence has one.

    ``x`` None: it stands beside a table that tokens are looked up in.
    """

    x: str | None
    weight: str
    out: str


class RopeAppend(_Op, frozen=True, tag=True):
    """Norms (Qwen3) and rotates q and k by ``rope`` of ``Program.ropes``, stores k and v at the step's positions
    of ``layer``; out = q.
    """

    qkv: str
    layer: int
    q_norm: str | None
    k_norm: str | None
    eps: float
    out: str
    rope: int = 0


class PagedAttention(_Op, frozen=True, tag=True):
    """Attends: out = attention of q over the pages of ``layer``, ``window`` tokens back at most, 0 for all.

    With ``softcap`` a score s is softcap x tanh(s / softcap). ``sinks`` (heads,) holds each head's score of a key
    that every row sees and that has no value.
    """

    q: str
    layer: int
    window: int
    out: str
    softcap: float = 0.0
    sinks: str | None = None


class SwiGlu(_Op, frozen=True, tag=True):
    """Applies the gated activation: out = silu(gate) x up."""

    gate_up: str
    out: str


class GeGlu(_Op, frozen=True, tag=True):
    """Applies Gemma's gated activation: out = gelu(gate) x up, gelu by its tanh approximation."""

    gate_up: str
    out: str


class MoeGate(msgspec.Struct, frozen=True):
    """Holds what gpt-oss's experts have in SwiGLU's place: biases of both layers, a gain and a limit.

    With gate and up limited to ``limit`` (gate from above alone): gate x sigmoid(alpha x gate) x (up + 1).
    """

    gate_up_bias: str
    down_bias: str
    alpha: float
    limit: float


class Moe(_Op, frozen=True, tag=True):
    """Mixes experts: out = the ``chosen`` best of ``experts`` for each row of x, by ``logits``, added by their
    weights.

    ``gate_up`` (experts x 2 inner, hidden): an expert's gate, its up, then the next one's. ``down`` (experts x
    hidden, inner). ``renormalise``: the chosen weights sum to 1. ``gate``: None for SwiGLU without biases.
    """

    x: str
    logits: str
    gate_up: str
    down: str
    experts: int
    chosen: int
    renormalise: bool
    out: str
    gate: MoeGate | None = None


class Route(_Op, frozen=True, tag=True):
    """Chooses ``chosen`` of ``experts`` for each row, in its ``kept`` best of ``groups`` groups, by ``scoring``.

    ``bias`` is added to the scores to choose, never to weigh. A group is as good as its ``best`` best experts
    together. ``out``: logits for ``Moe``, -inf where an expert is not chosen. ``factor`` (rows, 1): what the mixed
    rows are multiplied by, ``scale`` and, unless ``renormalise``, the sum of the chosen scores.
    """

    logits: str
    bias: str | None
    scoring: str
    experts: int
    chosen: int
    groups: int
    kept: int
    best: int
    renormalise: bool
    scale: float
    out: str
    factor: str


class Combine(_Op, frozen=True, tag=True):
    """Joins routed and shared experts: out = factor x mixed + sigmoid(gate) x shared (None: no factor, no gate)."""

    mixed: str
    factor: str | None
    shared: str
    gate: str | None
    out: str


class LatentAttention(_Op, frozen=True, tag=True):
    """Stores latents and attends to them with absorbed projections (https://arxiv.org/abs/2405.04434).

    ``q`` (rows, heads x (plain + turned)), its last ``turned`` numbers per head to be rotated; ``latent`` (rows,
    rank + turned): normed by ``norm`` but for its last ``turned``, the key that all heads share, it is what
    ``layer`` keeps of a token. ``expand`` (heads x (plain + value), rank) makes each head's key and value of it.
    ``paired`` rotates neighbours instead of halves. out (rows, heads x value).
    """

    q: str
    latent: str
    layer: int
    norm: str
    expand: str
    eps: float
    plain: int
    turned: int
    value: int
    rank: int
    paired: bool
    scale: float
    out: str


class GatedHeads(_Op, frozen=True, tag=True):
    """Takes rows apart in which each head of q is followed by its gate: out = q, k and v side by side, and gate."""

    x: str
    out: str
    gate: str


class Gate(_Op, frozen=True, tag=True):
    """Gates rows: out = sigmoid(gate) x x."""

    x: str
    gate: str
    out: str


class GatedDelta(_Op, frozen=True, tag=True):
    """Advances each sequence's state of ``layer`` by a gated delta rule; out = its reading.

    ``mixed`` has q, k, v and z side by side, ``gates`` b and a; with ``grouped`` both lie key head by key head.
    z gates the reading, normed head by head by ``norm``.
    """

    mixed: str
    gates: str
    layer: int
    conv: str
    a_log: str
    dt_bias: str
    norm: str
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    grouped: bool
    eps: float
    out: str


class StateSpace(_Op, frozen=True, tag=True):
    """Advances each sequence's state of ``layer`` by Mamba-2's recurrence; out = what it reads.

    ``mixed`` has a gate, x, B and C of ``groups`` groups and dt side by side. What is read, times silu(gate), is
    normed group by group by ``norm``.
    """

    mixed: str
    layer: int
    conv: str
    conv_bias: str | None
    a_log: str
    skip: str
    dt_bias: str
    norm: str
    heads: int
    head_dim: int
    groups: int
    size: int
    eps: float
    out: str


class LmHead(_Op, frozen=True, tag=True):
    """Computes the logits of the step's sampled rows: norm(x + delta) · weightᵀ, a logit l then softcap x
    tanh(l / softcap) where there is one.
    """

    x: str
    delta: str
    norm: str
    eps: float
    weight: str
    softcap: float = 0.0


class AllGather(_Op, frozen=True, tag=True):
    """Puts the ranks' columns of ``x`` side by side: out = the columns of rank 0, then those of rank 1, …"""

    x: str
    out: str


class AllReduce(_Op, frozen=True, tag=True):
    """Adds the ranks' parts of ``x`` up, of which one at most is not zero: out = their sum, with its bits."""

    x: str
    out: str


class OwnExperts(_Op, frozen=True, tag=True):
    """Runs a rank's own experts, ``first`` … ``first + count - 1`` of all: out = their outputs, at the places of
    the ``chosen`` experts of each row that they are; what other ranks' experts come to is left to them.
    """

    x: str
    logits: str
    gate_up: str
    down: str
    experts: int
    first: int
    count: int
    chosen: int
    renormalise: bool
    out: str
    gate: MoeGate | None = None


class MixExperts(_Op, frozen=True, tag=True):
    """Adds up what all ranks' ``OwnExperts`` of one layer wrote to ``y``: out = what ``Moe`` comes to, for each
    row.

    ``gate_up`` names the layer.
    """

    y: str
    logits: str
    gate_up: str
    out: str


Op = (
    Embedding
    | RmsNorm
    | Add
    | NormPart
    | Linear
    | Adapt
    | RopeAppend
    | PagedAttention
    | SwiGlu
    | GeGlu
    | Moe
    | Route
    | Combine
    | LatentAttention
    | GatedHeads
    | Gate
    | GatedDelta
    | StateSpace
    | LmHead
    | AllGather
    | AllReduce
    | OwnExperts
    | MixExperts
)


class Rope(msgspec.Struct, frozen=True):
    """Holds a rotary position embedding: ``kind`` and its parameters as the checkpoint's config spells them.

    ``factors`` are longrope's, one per frequency: those in use, and those of contexts beyond the original one.
    """

    kind: str
    theta: float
    parameters: dict[str, float]
    factors: tuple[tuple[float, ...], tuple[float, ...]] = ((), ())


def _forms_of(op: Op) -> Iterator[str]:
    match op:
        case Embedding(scale=scale) if scale != 1.0:
            yield "scaled embeddings"
        case Add():
            yield "residuals without a norm"
        case NormPart():
            yield "norms over all heads of q or k"
        case PagedAttention():
            yield from ("capped attention scores",) * bool(op.softcap) + ("attention sinks",) * bool(op.sinks)
        case GeGlu():
            yield "GELU gates"
        case Moe(gate=MoeGate()):
            yield "experts with biases"
        case LmHead() if op.softcap:
            yield "capped logits"


class Program(msgspec.Struct, frozen=True):
    """Holds everything that makes an architecture, sizes filled in. ``layer`` in the ops counts through
    ``groups``.

    ``query_scalar``: see ``scale``. ``plain_context``: the tokens of context that rope needs no extension for,
    where an extension changes what short contexts compute (longrope); 0: it has none.
    """

    ops: tuple[Op, ...]
    weights: tuple[Weight, ...]
    groups: tuple[LayerGroup, ...]
    rope: Rope
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    states: tuple[StatePlane, ...] = ()
    rope_dim: int = 0  # numbers of a head that are rotated, where the heads that a page keeps have another size

    @property
    def rotated(self) -> int:
        """Returns the width of the rotary tables."""
        return self.rope_dim or self.head_dim

    local_ropes: tuple[Rope, ...] = ()
    query_scalar: float = 0.0
    plain_context: int = 0

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """Returns what ``RopeAppend.rope`` counts through: most models have one."""
        return (self.rope, *self.local_ropes)

    @property
    def scale(self) -> float:
        """Returns the factor on attention's scores: ``query_scalar``, or the head size, to the power of -1/2."""
        return (self.query_scalar or self.head_dim) ** -0.5

    @property
    def windows(self) -> tuple[int, ...]:
        """Returns the distinct attention windows of its layers, in tokens."""
        return tuple(sorted({op.window for op in self.ops if isinstance(op, PagedAttention)}))

    @property
    def experts(self) -> tuple[Moe, ...]:
        """Returns its layers of experts."""
        return tuple(op for op in self.ops if isinstance(op, Moe))

    @property
    def forms(self) -> tuple[str, ...]:
        """Returns in words, in order, what it has that only the CPU's step and torch's ops compute."""
        found = {form for op in self.ops for form in _forms_of(op)}
        if self.local_ropes or any(rope.parameters.get("partial_rotary_factor", 1.0) != 1.0 for rope in self.ropes):
            found.add("several ropes or partly rotated heads")
        return tuple(sorted(found))

    @property
    def routers(self) -> frozenset[str]:
        """Returns the names of the weights that say which experts a row goes to; they are small, and never
        rounded.
        """
        logits = {op.logits for op in self.ops if isinstance(op, Moe | Route)}
        logits |= {op.gate for op in self.ops if isinstance(op, Combine) and op.gate}
        return frozenset(op.weight for op in self.ops if isinstance(op, Linear) and op.out in logits)

    @property
    def layers(self) -> int:
        """Returns the number of layers with KV."""
        return sum(group.layers for group in self.groups)
