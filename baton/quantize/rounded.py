"""A weight that was rounded: its small numbers, what scales them, and the values that both stand for.

Knows nothing of how it was rounded or of how files hold it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rounded(NamedTuple):
    """Value = scales x (q - zeros) for integers, scales x codes[q] for a table of ``codes``.

    ``q`` (n, k) int32 from 0 up; ``scales`` and ``zeros`` float32 (n, groups), over ``group`` inputs each (0: one
    per row). ``groups_of`` (k,) says each input's group where neighbours don't share one. ``wide``: the scales
    are float32 numbers, else float16 ones.
    """

    q: Tensor
    scales: Tensor
    bits: int
    group: int
    zeros: Tensor | None = None
    codes: Tensor | None = None
    groups_of: Tensor | None = None
    wide: bool = False

    def values(self) -> Tensor:
        """Returns what it stands for, (n, k) float32."""
        of = self.groups_of if self.groups_of is not None else group_numbers(self.q.shape[1], self.group)
        levels = self.q.float() if self.codes is None else self.codes[self.q.long()]
        if self.zeros is not None:
            levels = levels - self.zeros[:, of]
        return levels * self.scales[:, of]

    def rows(self, first: int, last: int) -> Rounded:
        """Returns some of its rows."""
        zeros = None if self.zeros is None else self.zeros[first:last]
        return self._replace(q=self.q[first:last], scales=self.scales[first:last], zeros=zeros)

    def times(self, factors: Tensor) -> Rounded:
        """Returns it with each row times ``factors`` (n,)."""
        return self._replace(scales=self.scales * factors[:, None])

    @property
    def is_symmetric(self) -> bool:
        """Returns whether every zero lies in the middle."""
        return self.zeros is not None and bool((self.zeros == 1 << (self.bits - 1)).all())


def group_numbers(k: int, group: int) -> Tensor:
    """Returns each input's group where they are in order."""
    return torch.arange(k) // (group or k)


def stacked(parts: list[Rounded]) -> Rounded:
    """Returns rows below one another; all but the rows' numbers is the first one's."""
    zeros = None if parts[0].zeros is None else torch.cat([part.zeros for part in parts if part.zeros is not None])
    return parts[0]._replace(
        q=torch.cat([p.q for p in parts]), scales=torch.cat([p.scales for p in parts]), zeros=zeros
    )
