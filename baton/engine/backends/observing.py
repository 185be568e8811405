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


class Watched(NamedTuple):
    """The watched rows of one item of a step, whose attention selects pages."""

    seq: int
    first: int  # first row in the step
    end: int  # row after the last
    place: int  # position of the first row
    pages: Tensor  # the item's block table, int64


class Observation:
    """Sums the attention of the watched rows of ``items``, whose rows are in that order. It is true if any are
    watched.
    """

    def __init__(self, items: Iterable[SequenceStep]) -> None:
        self._watched, row = list[Watched](), 0
        for item in items:
            end = row + len(item.tokens)
            if item.watch is not None:
                blocks = -(-(item.start + len(item.tokens)) // BLOCK_TOKENS)
                pages = torch.tensor(item.pages[:blocks], dtype=torch.int64)
                self._watched.append(Watched(item.seq, row + item.watch - item.start, end, item.watch, pages))
            row = end
        self._scores = {one.seq: torch.zeros(one.place // BLOCK_TOKENS) for one in self._watched}

    def __bool__(self) -> bool:
        return bool(self._watched)

    def layer(self, q: Tensor, keys_of: KeysOf, scale: float, softcap: float) -> None:
        """Adds one layer's attention; ``q`` (rows, heads, head_dim) is rotated already, ``keys_of`` returns the
        keys on pages.
        """
        for one in self._watched:
            queries = q[one.first : one.end]
            keys = keys_of(one.pages)[: one.place + len(queries)]
            self._scores[one.seq] += page_scores(queries, keys, scale, softcap)

    def found(self) -> dict[int, NDArray[np.float32]]:
        """Returns the sums over all layers by sequence: float32, one for each run of 16 tokens before the watched
        ones.
        """
        return {seq: scores.numpy() for seq, scores in self._scores.items()}
