"""Represents a model as a program: a short list of fused ops over named weights, the KV planes it needs, its rotary
embedding.

Knows nothing of tensors, of files or of how an op is computed.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from baton.engine.program.ops import (
    Add,
    Combine,
    Convolve,
    Embedding,
    FullAttention,
    GatedDelta,
    GeGlu,
    LatentAttention,
    Linear,
    LmHead,
    Moe,
    MoeGate,
    NormPart,
    Op,
    PagedAttention,
    RopeAppend,
    Route,
    RouteTwo,
    SelectiveScan,
    StateSpace,
)
from baton.protos.nouns import LayerGroup, StatePlane


class Weight(msgspec.Struct, frozen=True):
    """Describes one weight: tensors of the checkpoint (``sources``) of the given ``shapes``, stacked along
    dimension 0.

    A source may name a part of a tensor that holds all experts (``program/stacked.py``). The weight is (stored +
    ``plus``) x ``times``; without sources all of its elements are ``plus``. It is float32 if that changes it, or if
    ``exact`` says so, whatever the engine's dtype.
    """

    name: str
    sources: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    plus: float = 0.0
    times: float = 1.0
    exact: bool = False

    @property
    def is_float32(self) -> bool:
        """Returns whether it is float32, whatever the engine's dtype."""
        return self.exact or self.is_changed

    @property
    def is_changed(self) -> bool:
        """Returns whether its elements differ from those stored."""
        return bool(self.plus) or self.times != 1.0


# Ops that store K, V, latents or recurrent state, on which later tokens depend.
STORES = (RopeAppend, LatentAttention, GatedDelta, StateSpace, Convolve, SelectiveScan)
NO_ROPE = "no rope"  # the kind of a rope that rotates nothing


class Rope(msgspec.Struct, frozen=True):
    """Describes a rotary position embedding: ``kind`` and its parameters as the checkpoint's config spells them.

    ``factors`` are longrope's, one per frequency: those in use, and those for contexts beyond the original one.
    """

    kind: str
    theta: float  # base of the frequencies
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
        case LmHead():
            yield from ("capped logits",) * bool(op.softcap) + ("biases of the head",) * bool(
                op.norm_bias or op.bias
            )


class Program(msgspec.Struct, frozen=True):
    """Holds an architecture with its sizes: ops, weights, and the layout of KV. ``layer`` in ops that store KV
    counts through ``groups``.
    """

    ops: tuple[Op, ...]
    weights: tuple[Weight, ...]
    groups: tuple[LayerGroup, ...]
    rope: Rope
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int  # of an encoder, times its token types
    max_position: int  # most tokens of context
    states: tuple[StatePlane, ...] = ()  # arrays of recurrent state per sequence
    rope_dim: int = 0  # rotated numbers of a head, if not ``head_dim``; 0 otherwise

    @property
    def rotated(self) -> int:
        """Returns the width of the rotary tables: the numbers of a head that are rotated."""
        return self.rope_dim or self.head_dim

    local_ropes: tuple[Rope, ...] = ()  # further rotary embeddings, of some of the layers
    query_scalar: float = 0.0  # see ``scale``
    # Modules of checkpoints that have no effect, such as K's of layers that read others'.
    idle: tuple[str, ...] = ()
    plain_context: int = 0  # tokens of context up to which longrope's first factors hold; 0: no longrope

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """Returns all rotary embeddings, by the index that ``RopeAppend.rope`` holds; most models have one."""
        return (self.rope, *self.local_ropes)

    @property
    def scale(self) -> float:
        """Returns the factor on attention scores: ``query_scalar``, or the head size if that is 0, to the power of
        -1/2.
        """
        return (self.query_scalar or self.head_dim) ** -0.5

    @property
    def windows(self) -> tuple[int, ...]:
        """Returns the distinct attention windows of the layers in tokens, sorted; 0 is full attention."""
        return tuple(sorted({op.window for op in self.ops if isinstance(op, PagedAttention)}))

    @property
    def divided(self) -> tuple[tuple[Op, ...], tuple[Op, ...]]:
        """Returns the ops up to the last one that stores K, V, latents or recurrent state, and those after it.

        Of a row whose result nobody reads, the latter need not be computed.
        """
        begin = 1 + max((at for at, op in enumerate(self.ops) if isinstance(op, STORES)), default=-1)
        return self.ops[:begin], self.ops[begin:]

    @property
    def experts(self) -> tuple[Moe, ...]:
        """Returns the ops of the mixture-of-experts layers, in order."""
        return tuple(op for op in self.ops if isinstance(op, Moe))

    @property
    def forms(self) -> tuple[str, ...]:
        """Returns descriptions of the features that only the CPU's step and torch's ops support, sorted."""
        found = {form for op in self.ops for form in _forms_of(op)}
        if self.local_ropes or any(rope.parameters.get("partial_rotary_factor", 1.0) != 1.0 for rope in self.ropes):
            found.add("several ropes or partly rotated heads")
        return tuple(sorted(found))

    @property
    def routers(self) -> frozenset[str]:
        """Returns the names of the weights that choose or weigh experts; they are small and never quantized."""
        logits = {op.logits for op in self.ops if isinstance(op, Moe | Route | RouteTwo)}
        logits |= {op.gate for op in self.ops if isinstance(op, Combine) and op.gate}
        return frozenset(op.weight for op in self.ops if isinstance(op, Linear) and op.out in logits)

    @property
    def is_encoder(self) -> bool:
        """Returns whether it reads whole texts in both directions and generates none."""
        return any(isinstance(op, FullAttention) for op in self.ops)

    @property
    def layers(self) -> int:
        """Returns the number of layers with KV."""
        return sum(group.layers for group in self.groups)
