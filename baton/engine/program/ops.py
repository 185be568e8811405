"""Represents a model as a program: a short list of fused ops over named weights, the KV planes it needs, its rope.

Knows nothing of tensors, of files or of how an op is computed. A name that an op writes is a register; ``x`` is the
residual stream. An op's weights are names in ``Program.weights``.
"""

from __future__ import annotations

import msgspec

from baton.protos.nouns import LayerGroup


class Weight(msgspec.Struct, frozen=True):
    """Names one weight: the checkpoint's tensors stacked along dimension 0, each with its expected shape."""

    name: str
    sources: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]


class _Op(msgspec.Struct, frozen=True, tag=True):
    """A member of ``Op``."""


class Embedding(_Op, frozen=True, tag=True):
    """Looks tokens up: out = weight[token]."""

    weight: str
    out: str


class RmsNorm(_Op, frozen=True, tag=True):
    """Adds the residual and norms it: x += delta (unless None); out = norm(x) x weight."""

    x: str
    delta: str | None
    weight: str
    eps: float
    out: str


class Linear(_Op, frozen=True, tag=True):
    """Multiplies by a weight: out = x · weightᵀ + bias."""

    x: str
    weight: str
    bias: str | None
    out: str


class RopeAppend(_Op, frozen=True, tag=True):
    """Norms (Qwen3) and rotates q and k, stores k and v at the step's positions of ``layer``; out = q."""

    qkv: str
    layer: int
    q_norm: str | None
    k_norm: str | None
    eps: float
    out: str


class PagedAttention(_Op, frozen=True, tag=True):
    """Attends: out = attention of q over the pages of ``layer``, ``window`` tokens back at most, 0 for all."""

    q: str
    layer: int
    window: int
    out: str


class SwiGlu(_Op, frozen=True, tag=True):
    """Applies the gated activation: out = silu(gate) x up."""

    gate_up: str
    out: str


class Moe(_Op, frozen=True, tag=True):
    """Mixes experts: out = the ``chosen`` best of ``experts`` for each row of x, by ``logits``, added by their
    weights.

    ``gate_up`` (experts x 2 inner, hidden): an expert's gate, its up, then the next one's. ``down`` (experts x
    hidden, inner). ``renormalise``: the chosen weights sum to 1.
    """

    x: str
    logits: str
    gate_up: str
    down: str
    experts: int
    chosen: int
    renormalise: bool
    out: str


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


class LmHead(_Op, frozen=True, tag=True):
    """Computes the logits of the step's sampled rows: norm(x + delta) · weightᵀ."""

    x: str
    delta: str
    norm: str
    eps: float
    weight: str


Op = (
    Embedding
    | RmsNorm
    | Linear
    | RopeAppend
    | PagedAttention
    | SwiGlu
    | Moe
    | Route
    | Combine
    | LatentAttention
    | LmHead
)


class Rope(msgspec.Struct, frozen=True):
    """Holds a rotary position embedding: ``kind`` and its parameters as the checkpoint's config spells them."""

    kind: str
    theta: float
    parameters: dict[str, float]


class Program(msgspec.Struct, frozen=True):
    """Holds everything that makes an architecture, sizes filled in. ``layer`` in the ops counts through
    ``groups``.
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
    rope_dim: int = 0  # numbers of a head that are rotated, where the heads that a page keeps have another size

    @property
    def rotated(self) -> int:
        """Returns the width of the rotary tables."""
        return self.rope_dim or self.head_dim

    @property
    def windows(self) -> tuple[int, ...]:
        """Returns the distinct attention windows of its layers, in tokens."""
        return tuple(sorted({op.window for op in self.ops if isinstance(op, PagedAttention)}))

    @property
    def experts(self) -> tuple[Moe, ...]:
        """Returns its layers of experts."""
        return tuple(op for op in self.ops if isinstance(op, Moe))

    @property
    def routers(self) -> frozenset[str]:
        """Returns the names of the weights that say which experts a row goes to; they are small, and never
        rounded.
        """
        logits = {op.logits for op in self.ops if isinstance(op, Moe | Route)}
        return frozenset(op.weight for op in self.ops if isinstance(op, Linear) and op.out in logits)

    @property
    def layers(self) -> int:
        """Returns the number of layers with KV."""
        return sum(group.layers for group in self.groups)
