"""Statistics of a layer's inputs over a calibration text: second moments, magnitudes, and some of the rows.

Knows nothing of weights. A Hessian is the mean of x xᵀ over the input rows x (https://arxiv.org/abs/2210.17323).
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton.protos.errors import ConfigError

KEPT = 512  # rows that are kept as they are, evenly spread over the text
STRIP = 512  # rows of moments that are summed at once, up to the diagonal: the rest is their mirror


class ActivationStats:
    """Accumulates statistics of input rows (count, k), of which about ``expected`` will come.

    ``most`` (k,) are the largest magnitudes.
    """

    def __init__(self, k: int, expected: int) -> None:
        self._moments = torch.zeros(k, k)
        self._summed = 0  # rows whose x xᵀ ``_moments`` is the sum of; 0 where it is the mean already
        self._abs = torch.zeros(k)
        self.most = torch.zeros(k)
        self.count = 0
        self._stride = max(1, expected // KEPT)
        # One tensor for all: small ones between the texts' large ones would keep the heap from giving these back.
        self._rows, self._kept = torch.empty(-(-expected // self._stride), k), 0

    def add(self, rows: Tensor) -> None:
        """Adds ``rows`` (count, k) to the statistics."""
        if self.count and not self._summed:
            self._moments *= self.count
        for at in range(0, rows.shape[1], STRIP):
            end = at + STRIP
            self._moments[at:end, :end].addmm_(rows[:, at:end].T, rows[:, :end])
        magnitude = rows.abs()
        self._abs += magnitude.sum(0)
        self.most = torch.maximum(self.most, magnitude.amax(0)) if len(rows) else self.most
        self._keep(rows[-self.count % self._stride :: self._stride])
        self.count += len(rows)
        self._summed = self.count

    def divided(self, scales: Tensor) -> ActivationStats:
        """Returns the statistics of the same rows divided by ``scales`` (k,); itself where all of them are 1."""
        if bool((scales == 1).all()):
            return self
        found = ActivationStats(0, self.count)
        found._moments, found._summed = (self._moments / scales).div_(scales[:, None]), self._summed
        found._abs, found.most, found.count = self._abs / scales, self.most / scales, self.count
        found._rows, found._kept = self.rows / scales, self._kept
        return found

    @property
    def hessian(self) -> Tensor:
        """Returns the mean of x xᵀ, (k, k); the identity if there were no rows (an expert that no token chose).

        It is no copy: ``add`` changes it, and GPTQ overwrites it.
        """
        if not self.count:
            return torch.eye(len(self.most))
        if self._summed:
            self._moments /= self._summed
            for at in range(STRIP, len(self._moments), STRIP):
                self._moments[:at, at : at + STRIP] = self._moments[at : at + STRIP, :at].T
            self._summed = 0
        return self._moments

    def require_finite(self, name: str) -> None:
        """Raises ConfigError if inputs of the weight ``name``, or their second moments, aren't finite."""
        if not bool(self.most.isfinite().all() & self._moments.diagonal().isfinite().all()):
            text = f"{name}: the inputs of this weight are NaN or infinite on the calibration text"
            raise ConfigError(f"{text}; use another --calibration, or check the model", "calibration")

    @property
    def mean_abs(self) -> Tensor:
        """Returns the mean magnitude of each input, (k,)."""
        return self._abs / max(1, self.count)

    @property
    def rows(self) -> Tensor:
        """Returns the rows that were kept, evenly spread: about KEPT of them, (count, k)."""
        return self._rows[: self._kept]

    def _keep(self, rows: Tensor) -> None:
        end = self._kept + len(rows)
        if end > len(self._rows):  # more came than were expected
            self._rows = torch.cat((self.rows, torch.empty(end, rows.shape[1])))
        self._rows[self._kept : end] = rows
        self._kept = end


def output_error(off: Tensor, hessian: Tensor) -> float:
    """Returns the mean squared output error, summed over outputs, of a layer whose weight is off by ``off`` (n, k).

    ``hessian`` (k, k) is the mean of x xᵀ over the inputs.
    """
    return float(((off @ hessian) * off).sum())
