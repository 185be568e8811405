"""The Cholesky factor of an inverse Hessian, computed in the Hessian's own memory.

Knows nothing of weights. GPTQ reads rows of the upper factor U with H⁻¹ = Uᵀ U. With J, which reverses rows and
columns, and the lower factor L of J H J, U is J L⁻¹ J: L⁻¹ is what lies in the memory in the end.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128  # rows and columns that are factored at once
DAMP = 0.01  # share of the mean second moment that is added to each: the paper's
TRIES = 8  # times that ten times as much is added, until the Hessian is positive definite in float32


class InverseFactor:
    """Takes a Hessian (k, k), which it overwrites, and gives rows of the upper factor of its inverse.

    ``order`` (k,) is that of the inputs. Beside the Hessian memory holds BLOCK of its rows three times.
    """

    def __init__(self, hessian: Tensor, order: Tensor) -> None:
        moments = hessian.diagonal()
        damp = DAMP * moments.double().mean().item() or 1.0
        never = (moments <= 0)[order.flip(0)]
        _permute(hessian, order.flip(0))
        self._inverse, kept = (
            hessian,
            [hessian[at : at + BLOCK, at : at + BLOCK].clone() for at in _starts(hessian)],
        )
        for _ in range(TRIES):
            for at, block in zip(_starts(hessian), kept, strict=True):
                damped = block.clone()
                damped.diagonal().add_(damp).masked_fill_(never[at : at + BLOCK], 1.0)
                hessian[at : at + BLOCK, at : at + BLOCK] = damped
            if _cholesky(hessian):
                break
            _restore(hessian)
            damp *= 10
        _invert(hessian.tril_())

    def rows(self, start: int, end: int) -> Tensor:
        """Returns rows ``start`` to ``end`` (exclusive) of the factor, from column ``start`` on: (end - start, k -
        start).
        """
        k = len(self._inverse)
        return self._inverse[k - end : k - start, : k - start].flip(0, 1)


def _starts(matrix: Tensor) -> range:
    return range(0, len(matrix), BLOCK)


def _permute(matrix: Tensor, place: Tensor) -> None:
    """Brings rows and columns of ``matrix`` into the order ``place``, in place."""
    for at in _starts(matrix):
        matrix[at : at + BLOCK] = matrix[at : at + BLOCK][:, place]
    left = place.tolist()
    for first in range(len(left)):
        if left[first] < 0:
            continue
        saved, at = matrix[first].clone(), first
        while True:
            after, left[at] = left[at], -1
            if after == first:
                break
            matrix[at] = matrix[after]
            at = after
        matrix[at] = saved


def _cholesky(matrix: Tensor) -> bool:
    """Replaces the lower half by its Cholesky factor, and returns whether there is one. Above the blocks of the
    diagonal the matrix stays as it is.
    """
    for at in _starts(matrix):
        end = min(at + BLOCK, len(matrix))
        matrix[at:, at:end].addmm_(matrix[at:, :at], matrix[at:end, :at].T, alpha=-1)
        factor, failed = torch.linalg.cholesky_ex(matrix[at:end, at:end])
        if int(failed):
            return False
        matrix[at:end, at:end] = factor
        below = matrix[end:, at:end]
        below.copy_(torch.linalg.solve_triangular(factor.T, below, upper=True, left=False))
    return True


def _restore(matrix: Tensor) -> None:
    """Makes the lower half the mirror of what is above the blocks of the diagonal."""
    for at in _starts(matrix):
        matrix[at : at + BLOCK, :at] = matrix[:at, at : at + BLOCK].T


def _invert(lower: Tensor) -> None:
    """Replaces a lower triangular matrix by its inverse."""
    for at in _starts(lower):
        end = min(at + BLOCK, len(lower))
        own = torch.linalg.solve_triangular(lower[at:end, at:end], torch.eye(end - at), upper=False)
        lower[at:end, :at] = own.neg() @ (lower[at:end, :at] @ lower[:at, :at])
        lower[at:end, at:end] = own
