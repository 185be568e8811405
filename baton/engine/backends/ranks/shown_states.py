"""Tracks which recurrent states the ranks of other hosts have as they are in the lead's pages. Torch-free.

Knows nothing of hosts or of states' contents. What a step leaves for its item number i, the ranks of every host
find for item i of the next step. So nothing need be sent of a sequence that keeps its number, nor of one that
begins: its state is zeros, which each host writes itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from baton.engine.plan import SequenceStep


class _Left(NamedTuple):
    """Says whose state a step has left, before which position, and in which pages."""

    seq: int
    end: int
    pages: tuple[int, ...]


class ShownStates:
    """Tracks the states behind the last step. With ``swaps`` a step writes states to a room of their own, and the
    two rooms swap places after it; ``swapped`` says that they have.
    """

    def __init__(self, swaps: bool) -> None:
        self.swapped = False
        self._swaps = swaps
        self._left: list[_Left] = []

    def missing(self, items: Sequence[SequenceStep]) -> list[int]:
        """Returns the numbers of those of the next step's items whose states must be sent to other hosts.

        Until ``ran``, nothing counts as there: a step that fails leaves others' states in its items' places.
        """
        found = [number for number, item in enumerate(items) if item.start and not self._is_there(number, item)]
        self._left = []
        return found

    def ran(self, items: Sequence[SequenceStep]) -> None:
        """Records that the step of ``items`` is done."""
        self._left = [_Left(item.seq, item.start + len(item.tokens), tuple(item.state_to)) for item in items]
        self.swapped = self._swaps and not self.swapped

    def _is_there(self, number: int, item: SequenceStep) -> bool:
        source = tuple(item.state_from or ())
        return number < len(self._left) and self._left[number] == (item.seq, item.start, source)
