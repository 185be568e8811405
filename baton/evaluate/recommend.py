"""Recommends one of a sweep's schemes for each need: accuracy first, memory first or speed first.

Knows nothing of how rows were measured. A need allows a certain loss, and takes the best of the schemes within it
by its own measure; ties go to the smaller scheme.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from baton.evaluate.sweep import SweepRow


class Need(msgspec.Struct, frozen=True):
    """A need that a scheme may serve."""

    name: str
    most_loss: float  # largest allowed added loss, as a share
    key: Callable[[SweepRow], float]  # measure of a scheme, of which the least is best


class Recommendation(msgspec.Struct, frozen=True):
    """The scheme recommended for a need, with a sentence on why."""

    need: str
    scheme: str
    why: str


# Losses: what int8 may cost, what 4 bits may cost (docs/quantization.md), and one between for speed.
NEEDS = (
    Need("accuracy first", 0.002, lambda row: row.gigabytes),
    Need("memory first", 0.03, lambda row: row.gigabytes),
    Need("speed first", 0.01, lambda row: -row.decode_many),
)


def recommended(rows: Sequence[SweepRow]) -> list[Recommendation]:
    """Returns one recommendation per need; the first of ``rows`` is the reference, which every need allows."""
    return [_for(need, rows) for need in NEEDS]


def _for(need: Need, rows: Sequence[SweepRow]) -> Recommendation:
    allowed = [row for row in rows if row is rows[0] or row.added <= need.most_loss]
    best = min(allowed, key=lambda row: (need.key(row), row.gigabytes))
    facts = f"{best.gigabytes:.4g} GB, {best.decode_many:,.0f} tok/s at B=16, {best.added:+.3%} loss"
    sure = "" if best.high <= need.most_loss or best is rows[0] else f"; its interval ends at {best.high:+.3%}"
    return Recommendation(need.name, best.scheme, f"{facts} (within {need.most_loss:.1%}{sure})")
