"""Keeps the inputs of a decode step of fixed size where a captured graph reads them, and fills them for each step.

Knows nothing of graphs or weights. Numbers go over in one copy, and what kernels take is computed of them on the
card, by ops that are part of the step:

    tokens | positions | pages written | of each window: first positions, block tables      int64

Rows behind those of sequences write to a spare page, which nobody reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.engine.backends.torch.batch import CARD_GATHER_BYTES, StepBatch
from baton.engine.plan import SequenceStep
from baton.engine.program.program import Program
from baton.engine.program.rope import RopeTables
from baton.kernels.paged_attention.job import AttentionJob
from baton.protos.nouns import BLOCK_TOKENS


class DecodeSize(NamedTuple):
    """The size of a decode step: rows, and blocks of tokens that each row sees at most."""

    rows: int
    blocks: int


class DecodeInputs:
    """The inputs of steps of ``size``. ``spare`` is the page that rows without a sequence write and read."""

    def __init__(
        self, program: Program, size: DecodeSize, dtype: torch.dtype, device: str, ropes: RopeTables, spare: int
    ) -> None:
        self.size = size
        self._layers, self._windows, self._spare = program.layers, program.windows, spare
        self._dtype, self._device, self._ropes = dtype, device, ropes
        self._seen = {window: min(size.blocks, _touched(window)) for window in program.windows}
        count = size.rows * (3 + sum(1 + seen for seen in self._seen.values()))
        self._host: NDArray[np.int64] = np.zeros(count, np.int64)
        self._numbers = torch.zeros(count, dtype=torch.int64, device=device)
        none = torch.zeros(size.rows, dtype=torch.int64)
        self._angles = tuple((cos.to(device), sin.to(device)) for cos, sin in ropes.of(none, dtype))
        block = BLOCK_TOKENS * program.kv_heads * program.head_dim * dtype.itemsize
        self._most_blocks = CARD_GATHER_BYTES // (2 * block)

    def fill(self, items: Sequence[SequenceStep]) -> None:
        """Sets the inputs to ``items``, decodes of one token each that fit the size."""
        rows, count = self.size.rows, len(items)
        tokens, positions, pages, *tables = (self._host[part] for part in self._parts)
        tokens[count:], positions[count:], pages[count:] = 0, 0, self._spare
        for row, item in enumerate(items):
            tokens[row], positions[row] = item.tokens[0], item.start
            pages[row] = item.pages[item.start // BLOCK_TOKENS]
        for (window, seen), starts, table in zip(self._seen.items(), tables[::2], tables[1::2], strict=True):
            by_row = table.reshape(rows, seen)  # a view
            starts[count:], by_row[count:] = 0, self._spare
            for row, item in enumerate(items):
                end = item.start // BLOCK_TOKENS + 1
                begin = end - min(end, _touched(window))
                starts[row] = begin * BLOCK_TOKENS
                by_row[row, : end - begin] = item.pages[begin:end]
                by_row[row, end - begin :] = item.pages[end - 1]  # is masked
        self._numbers.copy_(torch.from_numpy(self._host))
        fresh = self._ropes.of(torch.from_numpy(positions), self._dtype)
        for held, wanted in zip(self._angles, fresh, strict=True):
            for into, values in zip(held, wanted, strict=True):
                into.copy_(values)

    def batch(self) -> StepBatch:
        """Returns the step's tensors, computed of the inputs by ops on the card without a wait for it."""
        tokens, positions, pages, *tables = (self._numbers[part] for part in self._parts)
        keys = pages * (self._layers * 2 * BLOCK_TOKENS) + positions % BLOCK_TOKENS
        jobs = {
            window: tuple(self._jobs(table.view(self.size.rows, seen), starts, positions, window))
            for (window, seen), starts, table in zip(self._seen.items(), tables[::2], tables[1::2], strict=True)
        }
        return StepBatch(
            tokens,
            self._angles,
            tokens[:0],
            self._per_layer(torch.cat((keys, keys + BLOCK_TOKENS)), 2 * BLOCK_TOKENS),
            jobs,
            torch.arange(self.size.rows, device=self._device),
            (),
            (),
            (),
        )

    def _jobs(self, table: Tensor, starts: Tensor, positions: Tensor, window: int) -> Iterator[AttentionJob]:
        rows, blocks = table.shape
        keys = starts[:, None] + torch.arange(blocks * BLOCK_TOKENS, device=self._device)
        hidden = keys > positions[:, None]
        if window:
            hidden = hidden | (keys <= positions[:, None] - window)
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device).masked_fill_(hidden, -torch.inf)
        first = table * (2 * self._layers)
        most = max(1, self._most_blocks // blocks)
        for begin in range(0, rows, most):
            part = first[begin : begin + most]
            numbers = self._per_layer(torch.stack((part, part + 1)).flatten(), 2)
            yield AttentionJob(begin, len(part), 1, numbers, mask[begin : begin + most, None, None])

    def _per_layer(self, base: Tensor, step: int) -> tuple[Tensor, ...]:
        offsets = step * torch.arange(self._layers, device=self._device)
        return (base + offsets[:, None]).unbind(0)

    @property
    def _parts(self) -> list[slice]:
        """Returns where the numbers lie, in their order."""
        rows = self.size.rows
        counts = (rows, rows, rows, *(n for seen in self._seen.values() for n in (rows, rows * seen)))
        return [slice(end - count, end) for count, end in zip(counts, accumulate(counts), strict=True)]


def _touched(window: int) -> int:
    """Returns the most blocks that a decode with ``window`` reads, wherever in a block it begins."""
    return -(-(window - 1) // BLOCK_TOKENS) + 1 if window else 1 << 60
