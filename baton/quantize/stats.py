"""Statistics of a layer's inputs over a calibration text: second moments, magnitudes, and some of the rows.

Knows nothing of weights. A Hessian is the mean of x xᵀ over the input rows x (https://arxiv.org/abs/2210.17323).
"""

from __future__ import annotations

import torch
from torch import Tensor

KEPT = 512  # rows that are kept as they are, evenly spread over the text


class ActivationStats:
    """Accumulates statistics of input rows (count, k), of which about ``expected`` will come.

    ``most`` (k,) are the largest magnitudes.
    """

    def __init__(self, k: int, expected: int) -> None:
        self._total = torch.zeros(k, k)
        self._abs = torch.zeros(k)
        self.most = torch.zeros(k)
        self.count = 0
        self._stride = max(1, expected // KEPT)
        self._kept: list[Tensor] = []

    def add(self, rows: Tensor) -> None:
        """Adds ``rows`` (count, k) to the statistics."""
        self._total.addmm_(rows.T, rows)
        magnitude = rows.abs()
        self._abs += magnitude.sum(0)
        self.most = torch.maximum(self.most, magnitude.amax(0)) if len(rows) else self.most
        first = -self.count % self._stride
        self._kept.append(rows[first :: self._stride].clone())
        self.count += len(rows)

    def divided(self, scales: Tensor) -> ActivationStats:
        """Returns the statistics of the same rows divided by ``scales`` (k,)."""
        found = ActivationStats(len(scales), self.count)
        found._total = self._total / scales / scales[:, None]
        found._abs, found.most, found.count = self._abs / scales, self.most / scales, self.count
        found._kept = [kept / scales for kept in self._kept]
        return found

    @property
    def hessian(self) -> Tensor:
        """Returns the mean of x xᵀ, (k, k); the identity if there were no rows (an expert that no token chose)."""
        return self._total / self.count if self.count else torch.eye(len(self.most))

    @property
    def mean_abs(self) -> Tensor:
        """Returns the mean magnitude of each input, (k,)."""
        return self._abs / max(1, self.count)

    @property
    def rows(self) -> Tensor:
        """Returns the rows that were kept, evenly spread: about KEPT of them, (count, k)."""
        return torch.cat(self._kept) if self._kept else torch.zeros(0, len(self.most))


def output_error(off: Tensor, hessian: Tensor) -> float:
    """Returns the mean squared output error, summed over outputs, of a layer whose weight is off by ``off`` (n, k).

    ``hessian`` (k, k) is the mean of x xᵀ over the inputs.
    """
    return float(((off @ hessian) * off).sum())
