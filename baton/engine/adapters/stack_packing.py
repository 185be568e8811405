"""Packs a pair of LoRA tensors that hold the matrices of all experts, each expert's to its own part.

Knows nothing of files. The tensors' layouts are those that ``stacks.py`` tells; an expert's packed matrices are as
any layer's (``packed.py``), gates first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from baton.engine.adapters.packed import Array, PackedAdapter, PackedPart, pack_at, pack_first, stored
from baton.engine.adapters.stacks import Stack


class StackPacker:
    """Packs tensors of ``stack`` to ``parts`` of ``adapter``, one of each expert."""

    def __init__(self, adapter: PackedAdapter, parts: Sequence[PackedPart], stack: Stack) -> None:
        self._adapter, self._parts, self._crossed = adapter, parts, stack.crossed
        self._rank = parts[0].rank
        self._places = _places(stack.site.outputs, stack.site.woven)

    def first(self, at: int, rows: Array) -> None:
        """Packs ``rows`` of tensor A, from row ``at`` on: an expert's ranks side by side."""
        done = 0
        while done < len(rows):
            expert, begin = divmod(at + done, self._rank)
            some = rows[done : done + self._rank - begin]
            if self._crossed:
                pack_at(self._adapter, self._parts[expert], begin, self._places, some.T)
            else:
                pack_first(self._adapter, self._parts[expert], begin, some)
            done += len(some)

    def second(self, at: int, rows: Array) -> None:
        """Packs ``rows`` of tensor B, from row ``at`` on: for each rank a column of each expert."""
        count = len(rows)
        by_expert = rows.reshape(count, self._rank, len(self._parts))
        for expert, part in enumerate(self._parts):
            own = by_expert[:, :, expert]
            if self._crossed:
                self._adapter.first(part)[:, at : at + count] = stored(own, part.narrow).T
            else:
                pack_at(self._adapter, part, 0, self._places[at : at + count], own)


def _places(outputs: int, woven: bool) -> NDArray[np.int64]:
    """Returns the output of an expert's matrix that each of the parameter's outputs is."""
    found = np.arange(outputs)
    return found // 2 + found % 2 * (outputs // 2) if woven else found
