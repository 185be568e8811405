"""Holds the biases that a language model's head may have: of its norm and of its logits.

Knows nothing of the head's weight or of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from torch import Tensor

from baton.engine.program.ops import LmHead
from baton.kernels.linear.packed import PackedWeight


class HeadBiases(NamedTuple):
    """Holds the head's biases: of its norm, float32 (hidden,), and of all logits, float32 (vocab,), which contains
    what the norm's adds to them.
    """

    of_norm: Tensor | None = None
    of_logits: Tensor | None = None

    @classmethod
    def of(
        cls,
        head: LmHead,
        weights: Mapping[str, Tensor | PackedWeight],
        logits_of: Callable[[Tensor], Tensor],
    ) -> HeadBiases:
        """Returns the biases of ``head``, whose weight ``logits_of`` multiplies by rows (n, hidden) float32."""
        of_norm, of_logits = (
            None if name is None else vector(weights[name]) for name in (head.norm_bias, head.bias)
        )
        if of_norm is not None:
            product = logits_of(of_norm[None])[0]
            of_logits = product if of_logits is None else product + of_logits
        return cls(of_norm, of_logits)

    def after_norm(self, states: Tensor) -> Tensor:
        """Returns normed rows (rows, hidden) float32 with the norm's bias."""
        return states if self.of_norm is None else states + self.of_norm


def vector(weight: Tensor | PackedWeight) -> Tensor:
    """Returns a bias or a norm's weight as float32; these are never packed."""
    assert isinstance(weight, Tensor), "a bias is never packed"
    return weight.float()
