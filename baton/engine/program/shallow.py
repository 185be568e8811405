"""Leaves layers out of a program, so that the same weights draft for the whole model.

Knows nothing of tensors. The first and the last layer stay, and evenly spaced ones between them. Source: "Draft &
Verify" (https://arxiv.org/abs/2309.08168), which searches for the layers; here only their number is given.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from baton.engine.program.ops import Adapt, Embedding, LmHead, Op, PagedAttention, RopeAppend
from baton.engine.program.program import Program, Weight
from baton.protos.errors import ConfigError
from baton.protos.nouns import LayerGroup


def spread_layers(layers: int, count: int) -> tuple[int, ...]:
    """Returns the indices of ``count`` (2 or more) of ``layers`` layers, evenly spaced from the first to the
    last.
    """
    return tuple(round(at * (layers - 1) / (count - 1)) for at in range(count))


def shallow(program: Program, count: int) -> Program:
    """Returns ``program`` with ``count`` of its layers, without adapter sites. Raises ConfigError if ``count``
    isn't 2 to one less than its layers, or layers can't be told apart.
    """
    layers = _layers(program)
    if not 2 <= count < len(layers):
        text = f"speculation self:{count}: the model has {len(layers)} layers; give 2 to {len(layers) - 1} of them"
        raise ConfigError(text, "speculation")
    kept = spread_layers(len(layers), count)
    slots = sorted({slot for at in kept for slot in _slots(layers[at])})
    ops = [op for at in kept for op in layers[at]]
    return msgspec.structs.replace(
        program,
        ops=(program.ops[0], *(_renumbered(op, slots) for op in ops), program.ops[-1]),
        weights=tuple(_weights(program, kept)),
        groups=tuple(_groups(program, slots)),
    )


def _layers(program: Program) -> list[list[Op]]:
    """Returns the ops between embedding and head, layer by layer, as the numbers in their weights' names say."""
    first, *between, last = [op for op in program.ops if not isinstance(op, Adapt)]
    found: list[list[Op]] = []
    for op in between:
        number = _number(getattr(op, "weight", None))
        if number is not None and number == len(found):
            found.append([])
        if not found or (number is not None and number != len(found) - 1):
            found = []
            break
        found[-1].append(op)
    plain = isinstance(first, Embedding) and isinstance(last, LmHead)
    if not plain or not found or any(len(_slots(layer)) != 1 for layer in found):
        raise ConfigError("speculation self: this model's layers can't be left out; use another", "speculation")
    return found


def _number(weight: str | None) -> int | None:
    head = (weight or "").partition(".")[0]
    return int(head) if head.isdigit() else None


def _slots(layer: Sequence[Op]) -> set[int]:
    return {op.layer for op in layer if isinstance(op, RopeAppend | PagedAttention)}


def _renumbered(op: Op, slots: Sequence[int]) -> Op:
    if isinstance(op, RopeAppend | PagedAttention):
        return msgspec.structs.replace(op, layer=slots.index(op.layer))
    return op


def _weights(program: Program, kept: Sequence[int]) -> Iterator[Weight]:
    for weight in program.weights:
        if (number := _number(weight.name)) is None or number in kept:
            yield weight


def _groups(program: Program, slots: Sequence[int]) -> Iterator[LayerGroup]:
    first = 0
    for group in program.groups:
        count = sum(first <= slot < first + group.layers for slot in slots)
        first += group.layers
        if count:
            yield msgspec.structs.replace(group, layers=count)


def first_ops(program: Program) -> tuple[int, ...]:
    """Returns the index of each layer's first op; when it has run, the residual stream is the layer's input.

    It is empty if layers can't be told apart.
    """
    starts: list[int] = []
    for at, op in enumerate(program.ops):
        if _number(getattr(op, "weight", None)) == len(starts):
            starts.append(at)
    return tuple(starts)
