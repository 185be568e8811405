"""A quantized weight: its small integers, their scales, and the values that both stand for.

Knows nothing of how it was rounded or of how files hold it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class QuantizedWeight(NamedTuple):
    """A quantized weight: scales x (q - zeros) for integers, scales x codes[q] with a table."""

    q: Tensor  # (n, k) uint8 or int32, from 0 up
    scales: Tensor  # (n, groups) float32
    bits: int
    group: int  # inputs per scale; 0 for a whole row
    zeros: Tensor | None = None  # (n, groups) float32, for integers
    codebook: Tensor | None = None  # table of values that ``q`` indexes
    groups_of: Tensor | None = None  # (k,) each input's group, if groups aren't neighbours
    wide: bool = False  # whether ``scales`` are kept as float32, else they are float16 numbers

    def values(self) -> Tensor:
        """Returns the weight's values, (n, k) float32."""
        levels = self.q.float() if self.codebook is None else self.codebook[self.q.long()]
        if self.groups_of is not None:
            zeros = 0 if self.zeros is None else self.zeros[:, self.groups_of]
            return levels.sub_(zeros).mul_(self.scales[:, self.groups_of])
        parts = levels.view(*self.scales.shape, -1)
        if self.zeros is not None:
            parts.sub_(self.zeros[..., None])
        return parts.mul_(self.scales[..., None]).view_as(levels)

    def rows(self, first: int, last: int) -> QuantizedWeight:
        """Returns rows ``first`` to ``last`` (exclusive) of the weight."""
        zeros = None if self.zeros is None else self.zeros[first:last]
        return self._replace(q=self.q[first:last], scales=self.scales[first:last], zeros=zeros)

    def times(self, factors: Tensor) -> QuantizedWeight:
        """Returns the weight with each row multiplied by ``factors`` (n,), float32."""
        return self._replace(scales=self.scales * factors[:, None])

    @property
    def is_symmetric(self) -> bool:
        """Returns whether every zero point is the middle of the range."""
        return self.zeros is not None and bool((self.zeros == 1 << (self.bits - 1)).all())


def group_numbers(k: int, group: int) -> Tensor:
    """Returns the group index of each of ``k`` inputs, int64 (k,), with ``group`` neighbours in each; 0 for one
    group.
    """
    return torch.arange(k) // (group or k)


def stacked(parts: list[QuantizedWeight]) -> QuantizedWeight:
    """Returns the rows of all ``parts`` as one weight; everything but q, scales and zeros is taken from the
    first.
    """
    zeros = None if parts[0].zeros is None else torch.cat([part.zeros for part in parts if part.zeros is not None])
    return parts[0]._replace(
        q=torch.cat([p.q for p in parts]), scales=torch.cat([p.scales for p in parts]), zeros=zeros
    )
