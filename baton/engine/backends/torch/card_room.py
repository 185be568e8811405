"""Says which quantized weights a card has room for dequantized, and what it costs to have the others packed.

Knows nothing of tensors or devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import NamedTuple

from baton.engine.backends.torch.kept_choices import TriedWay

LEAST_KV = 1 / 8  # of a worker's part of a card that weights leave for KV where no bytes are configured
AHEAD = "dequantized at the start"
OWN, IN_STEPS = "torch's own products", "dequantized in each step"


class WeightSize(NamedTuple):
    """Holds the bytes of a weight on a card: packed, and dequantized."""

    name: str
    packed: int
    wide: int


@dataclass(frozen=True)
class Packed:
    """Names the weights that stay packed, of ``count`` for which there was a choice, and says why."""

    sizes: tuple[WeightSize, ...]
    count: int
    bytes: int  # of all weights, others of the model among them
    needed: int  # the same if none stayed packed
    room: int  # bytes that they may take

    @property
    def names(self) -> frozenset[str]:
        """Returns the names of the weights that stay packed."""
        return frozenset(size.name for size in self.sizes)

    def ways(self, held: AbstractSet[str]) -> list[TriedWay]:
        """Returns how the weights that stay packed are computed, in words, with what it costs: those of ``held`` by
        torch's own products, the others dequantized for each product, which a step writes and reads again at least.
        """
        why = f"all dequantized need {_gib(self.needed)} and may take {_gib(self.room)}"
        in_steps = [size for size in self.sizes if size.name not in held]
        more = sum(size.packed + size.wide for size in in_steps)
        costs = {
            OWN: (len(self.sizes) - len(in_steps), "which are slower"),
            IN_STEPS: (len(in_steps), f"a step moves {_gib(more)} more"),
        }
        return [
            TriedWay(f"{count} of {self.count} weights", way, AHEAD, way, f"{why}; {cost}")
            for way, (count, cost) in costs.items()
            if count
        ]


def plan_packed(sizes: Sequence[WeightSize], beside: int, room: int) -> Packed:
    """Returns which weights of ``sizes`` stay packed so that they take no more than ``room`` bytes together with
    ``beside`` bytes of others, as few as possible in their order; all of them if even that doesn't fit.
    """
    left = room - beside - sum(size.packed for size in sizes)
    packed = []
    for size in sizes:
        more = size.wide - size.packed
        if more > max(0, left):
            packed.append(size)
        else:
            left -= max(0, more)
    needed = beside + sum(size.wide for size in sizes)
    return Packed(tuple(packed), len(sizes), needed - sum(s.wide - s.packed for s in packed), needed, room)


def weights_room(memory: int, share: float, kv_bytes: int, others: int) -> int:
    """Returns the bytes that a worker's weights may take, dequantized ones among them, of a card with ``memory``
    bytes of which the worker has the part ``share``: all but ``others`` bytes, and those for KV, ``kv_bytes`` or at
    least LEAST_KV of its part.
    """
    part = int(memory * share)
    return max(0, part - others - (kv_bytes or int(part * LEAST_KV)))


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"
