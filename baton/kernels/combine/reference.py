"""Adds the output of shared experts to that of routed ones. Knows nothing of routing."""

from __future__ import annotations

from torch import Tensor


def combine(mixed: Tensor, factor: Tensor | None, shared: Tensor, gate: Tensor | None) -> Tensor:
    """Returns factor x mixed + sigmoid(gate) x shared, (rows, hidden).

    ``factor`` and ``gate`` are (rows, 1) and may be None, which leaves them out; ``mixed`` and ``shared`` are
    (rows, hidden).
    """
    scaled = mixed if factor is None else factor * mixed
    return scaled + (shared if gate is None else gate.sigmoid() * shared)
