"""Names what a weight is that a library multiplies by in a form of its own. Knows nothing of libraries."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor


class HeldWeight(ABC):
    """A weight (n, k) in the form of some library."""

    n: int
    k: int
    nbytes: int  # that a product reads

    @abstractmethod
    def product(self, x: Tensor) -> Tensor:
        """Returns x · weightᵀ, (rows, n) in any float dtype, for x (rows, k)."""

    @abstractmethod
    def rounded(self, x: Tensor) -> Tensor:
        """Returns the rows (rows, k) that are multiplied in place of x, both float32."""
