"""Describes a step's decodes to kernels that follow block tables by themselves.

Knows nothing of kernels or plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor


class DecodeTables(NamedTuple):
    """The block tables of ``len(last)`` sequences that decode one token each, int32 in host memory.

    Sequence i sees the pages ``indices[indptr[i] : indptr[i + 1]]``, of the last one ``last[i]`` tokens, its own
    included.
    """

    indptr: Tensor
    indices: Tensor
    last: Tensor


class DecodeAttention(Protocol):
    """Computes attention of one token per sequence over pages, for each form that a program has."""

    def plan(self, tables: dict[int, DecodeTables]) -> None:
        """Prepares a step's layers; ``tables`` are by window."""

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, window: int, softcap: float) -> Tensor:
        """Returns attention outputs (sequences, heads, head_dim) for q of that shape. Keys and values are a layer's
        pages, (pages, 16, kv_heads, head_dim).
        """


def decode_tables(seen: Sequence[Sequence[int]], last: Sequence[int]) -> DecodeTables:
    """Returns the tables of sequences that see the pages ``seen``, and ``last`` tokens of the last one."""
    indptr = np.cumsum([0, *map(len, seen)], dtype=np.int32)
    indices = np.concatenate([np.asarray(pages, np.int32) for pages in seen])
    return DecodeTables(*map(torch.from_numpy, (indptr, indices, np.asarray(last, np.int32))))
