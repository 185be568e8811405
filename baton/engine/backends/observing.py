"""Sums over the layers how much attention a step's watched tokens pay to the tokens before them.

Knows nothing of the selection that uses it, or of how a backend reads its pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.engine.plan import SequenceStep
from baton.kernels.page_scores.reference import page_scores
from baton.protos.nouns import BLOCK_TOKENS

KeysOf = Callable[[Tensor], Tensor]  # pages -> their tokens' keys of a layer, (tokens, kv_heads, head_dim)
# Adds to the last tensor what a row (heads, head_dim), the last of some tokens on pages, pays to each run of them.
AddRow = Callable[[Tensor, Tensor, int, Tensor], None]


class WatchedRows(NamedTuple):
    """The watched rows of one item of a step, whose attention selects pages."""

    seq: int
    first: int  # first row in the step
    end: int  # row after the last
    place: int  # place of the first row among the tokens on ``pages``
    pages: Tensor  # the pages that the item sees, int64
    by_row: bool  # each row's attention to all of them is wanted


class Observation:
    """Sums the attention of the watched rows of ``items``, whose rows are in that order. It is true if any are
    watched.
    """

    def __init__(self, items: Iterable[SequenceStep]) -> None:
        self._watched, row = list[WatchedRows](), 0
        for item in items:
            end = row + len(item.tokens)
            if item.watch is not None:
                self._watched.append(_watched(item, item.watch, row, end))
            row = end
        self._scores = {one.seq: torch.zeros(_shape(one)) for one in self._watched}

    def __bool__(self) -> bool:
        return bool(self._watched)

    def layer(
        self, q: Tensor, keys_of: KeysOf, scale: float, softcap: float, add_row: AddRow | None = None
    ) -> None:
        """Adds one layer's attention; ``q`` (rows, heads, head_dim) is rotated already, ``keys_of`` returns the
        keys on pages. ``add_row`` does quickly what else is computed from these for single rows.
        """
        for one in self._watched:
            queries, scores = q[one.first : one.end], self._scores[one.seq]
            if not one.by_row:
                scores += page_scores(queries, keys_of(one.pages)[: one.place + len(queries)], scale, softcap)
            elif add_row is not None:
                for at in range(len(queries)):
                    add_row(queries[at], one.pages, one.place + at + 1, scores[at])
            else:
                _add_rows(scores, queries, keys_of(one.pages), one.place, scale, softcap)

    def found(self) -> dict[int, NDArray[np.float32]]:
        """Returns the sums over all layers by sequence: float32, as ``StepResult.observed`` has them."""
        return {seq: scores.numpy() for seq, scores in self._scores.items()}


def _add_rows(scores: Tensor, queries: Tensor, keys: Tensor, place: int, scale: float, softcap: float) -> None:
    for at in range(len(queries)):  # row by row, so that each has the bits that it has alone
        found = page_scores(queries[at : at + 1], keys[: place + at + 1], scale, softcap, every=True)
        scores[at, : len(found)] += found


def _watched(item: SequenceStep, watch: int, row: int, end: int) -> WatchedRows:
    (first, behind), blocks = item.gap, -(-(item.start + len(item.tokens)) // BLOCK_TOKENS)
    seen = [*item.pages[:first], *item.pages[behind:blocks]] if behind > first else item.pages[:blocks]
    place, pages = watch - (behind - first) * BLOCK_TOKENS, torch.tensor(seen, dtype=torch.int64)
    return WatchedRows(item.seq, row + watch - item.start, end, place, pages, item.watch_rows)


def _shape(one: WatchedRows) -> tuple[int, ...]:
    rows = one.end - one.first
    return (rows, -(-(one.place + rows) // BLOCK_TOKENS)) if one.by_row else (one.place // BLOCK_TOKENS,)
