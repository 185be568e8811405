"""Adds what shared experts give to what routed ones gave. Knows nothing of routing."""

from __future__ import annotations

from torch import Tensor


def combine(mixed: Tensor, factor: Tensor | None, shared: Tensor, gate: Tensor | None) -> Tensor:
    """Joins rows: factor (rows, 1) x mixed + sigmoid(gate (rows, 1)) x shared, both (rows, hidden)."""
    scaled = mixed if factor is None else factor * mixed
    return scaled + (shared if gate is None else gate.sigmoid() * shared)
