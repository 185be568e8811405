"""Multiplies by weights that stay packed on a card and are dequantized for each product, a part at a time.

Knows nothing of checkpoints or of how much memory there is (``card_room.py``). This takes more of the card's time
than any other form of a product: the packed weight is read, and the dequantized one written and read. It is for
weights of which a card has no room for anything wider.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.kernels.linear.packed import ROWS, PackedWeight, one_of
from baton.kernels.linear.panels.layout import PANEL
from baton.kernels.linear.reference import HeldWeight

PART = 1 << 24  # numbers that are dequantized at once: some 200 MB of a card with what lies between


class PackedProduct(HeldWeight):
    """A packed weight (n, k), multiplied by in ``dtype`` with rows that aren't quantized, as if it were dequantized
    ahead.
    """

    def __init__(self, weight: PackedWeight, dtype: torch.dtype, device: str, part: int = PART) -> None:
        self.n, self.k = weight.shape
        self.nbytes = weight.nbytes
        self._dtype = dtype
        self._parts = [_on(own, device) for own in _parts(weight, part)]

    def product(self, x: Tensor) -> Tensor:
        """Returns x · weightᵀ in the weight's dtype."""
        rows = x.to(self._dtype)
        return torch.cat([F.linear(rows, own.dequantized(self._dtype)) for own in self._parts], -1)

    def rounded(self, x: Tensor) -> Tensor:
        """Returns the rows rounded to the weight's dtype."""
        return x.to(self._dtype).float()


class HeldExperts:
    """Holds a layer's weights of all experts, one after the other, each of which is multiplied by alone."""

    def __init__(self, whole: PackedWeight, count: int, n: int, dtype: torch.dtype, device: str) -> None:
        self.matrices: Sequence[HeldWeight] = [
            PackedProduct(one_of(whole, expert, count, n), dtype, device) for expert in range(count)
        ]
        self.n, self.k = count * n, whole.k
        self.nbytes = whole.nbytes


def _parts(whole: PackedWeight, most: int) -> Iterator[PackedWeight]:
    """Yields the weight in runs of panels of up to ``most`` numbers; in one where inputs have an order."""
    panels = -(-whole.n // PANEL)
    each = panels if whole.is_ordered else max(1, most // (PANEL * whole.k))
    for first in range(0, panels, each):
        last = min(first + each, panels)
        tensors = {name: getattr(whole, name) for name in ROWS}
        own: dict[str, Tensor | None] = {
            name: None if t is None else t.reshape(panels, -1)[first:last].reshape(-1, *t.shape[1:])
            for name, t in tensors.items()
        }
        yield dataclasses.replace(whole, n=min(last * PANEL, whole.n) - first * PANEL, **own)  # type: ignore[arg-type]


def _on(weight: PackedWeight, device: str) -> PackedWeight:
    tensors = {name: getattr(weight, name) for name in (*ROWS, "table")}
    moved: dict[str, Tensor | None] = {name: None if t is None else t.to(device) for name, t in tensors.items()}
    return dataclasses.replace(weight, **moved)  # type: ignore[arg-type]
