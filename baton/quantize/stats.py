"""What a layer's inputs are like over a calibration text: second moments, magnitudes, some rows as they are.

Knows nothing of weights. Rows come in pieces; a Hessian here is the mean of x xᵀ (https://arxiv.org/abs/2210.17323).
"""

from __future__ import annotations

import torch
from torch import Tensor

KEPT = 512  # rows that are kept as they are, evenly spread over the text


class ActivationStats:
    """Sums up rows (…, k). ``hessian`` (k, k), ``mean_abs`` and ``most`` (k,), ``rows`` (KEPT at most, k)."""

    def __init__(self, k: int, expected: int) -> None:
        self._total = torch.zeros(k, k)
        self._abs = torch.zeros(k)
        self.most = torch.zeros(k)
        self.count = 0
        self._stride = max(1, expected // KEPT)
        self._kept: list[Tensor] = []

    def add(self, rows: Tensor) -> None:
        """Counts some rows (count, k) in."""
        self._total.addmm_(rows.T, rows)
        magnitude = rows.abs()
        self._abs += magnitude.sum(0)
        self.most = torch.maximum(self.most, magnitude.amax(0)) if len(rows) else self.most
        first = -self.count % self._stride
        self._kept.append(rows[first :: self._stride].clone())
        self.count += len(rows)

    def divided(self, scales: Tensor) -> ActivationStats:
        """Returns the same of rows that are divided by ``scales`` (k,)."""
        found = ActivationStats(len(scales), self.count)
        found._total = self._total / scales / scales[:, None]
        found._abs, found.most, found.count = self._abs / scales, self.most / scales, self.count
        found._kept = [kept / scales for kept in self._kept]
        return found

    @property
    def hessian(self) -> Tensor:
        """The mean of x xᵀ; the identity where no row came by (an expert that no token chose)."""
        return self._total / self.count if self.count else torch.eye(len(self.most))

    @property
    def mean_abs(self) -> Tensor:
        """The mean magnitude of each input."""
        return self._abs / max(1, self.count)

    @property
    def rows(self) -> Tensor:
        """The rows that were kept."""
        return torch.cat(self._kept) if self._kept else torch.zeros(0, len(self.most))


def output_error(off: Tensor, hessian: Tensor) -> float:
    """Returns the mean squared error of a layer's outputs whose weight is ``off`` (n, k) by that much."""
    return float(((off @ hessian) * off).sum())
