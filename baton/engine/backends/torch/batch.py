"""Converts a step plan to the tensors that kernels take: one flat list of rows, decodes first, then chunks.

Knows nothing of weights or sampling. Two things make a sequence's float32 results bitwise independent of the other
sequences of a step: rows are padded to a multiple of four (see ``kernels/linear``), and the padding of a decode's
keys depends on its own length alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.engine.backends.observing import Observation
from baton.engine.backends.spans import Span, span_of
from baton.engine.backends.torch.adapters import grouped
from baton.engine.backends.torch.decode_tables import DecodeTables, decode_tables
from baton.engine.backends.visible_parts import VisiblePart, visible_parts
from baton.engine.plan import SampleSpec, SequenceStep, StepPlan
from baton.engine.program.program import Program
from baton.engine.program.rope import RopeTables
from baton.kernels.paged_attention.job import AttentionJob
from baton.kv.layout.selection import Selection
from baton.protos.nouns import BLOCK_TOKENS

ROW_MULTIPLE = 4  # rows are padded to a multiple of it, because BLAS then computes each row alike
QUERY_BLOCK = 256  # query rows of a chunk's attention in one job
# Bytes of K and V that decodes gather at once, so that they are still in a core's L2 cache when they are read
# (64 sequences of 1,000 tokens: 3 times faster than in one piece).
GATHER_BYTES = 1 << 20
CARD_GATHER_BYTES = 256 << 20  # on a card, where each piece costs launches in every layer

Ints = NDArray[np.int64]


class StepBatch(NamedTuple):
    """The tensors of one step.

    ``begun`` pages get their first tokens in this step and stay partly empty: they are zeroed before, so that
    values of an earlier owner (a NaN passes any mask) have no effect. ``rows`` are those that need logits, padded:
    first one for each choice of ``sampled``, then one for each target of ``scored``.
    """

    tokens: Tensor  # token ids of all rows, padded
    rope_angles: tuple[tuple[Tensor, Tensor], ...]  # cos and sin of each rope
    begun: Tensor
    slots: tuple[Tensor, ...]  # by layer: where the rows' K and V are stored
    jobs: dict[int, tuple[AttentionJob, ...]]  # attention's work, by window
    rows: Tensor
    sampled: tuple[tuple[SequenceStep, SampleSpec], ...]
    scored: tuple[SequenceStep, ...]
    pooled: tuple[tuple[SequenceStep, slice], ...]  # items whose hidden states are pooled, and their rows
    spans: tuple[Span, ...] = ()
    adapted: dict[str, Tensor] = {}  # rows by adapter
    observation: Observation = Observation(())
    decodes: dict[int, DecodeTables] = {}  # by window; the jobs are then those of chunks alone


class BatchBuilder:
    """Builds batches for one program. Positions, rope and masks are computed once per step, for all layers.

    ``pages`` is the device that KV pages are on. ``by_tables`` leaves decodes out of attention's jobs, for kernels
    that follow tables.
    """

    def __init__(
        self,
        program: Program,
        dtype: torch.dtype,
        device: str,
        selection: Selection | None = None,
        pages: str = "cpu",
        by_tables: bool = False,
    ) -> None:
        self._pages, self._by_tables = pages, by_tables
        self._selection = selection
        self._layers = program.layers
        self._windows = program.windows
        self._rope = RopeTables(program.ropes, program.rotated, program.max_position)
        self._dtype, self._device = dtype, device
        at_once = GATHER_BYTES if pages == "cpu" else CARD_GATHER_BYTES
        self._most_blocks = at_once // (2 * BLOCK_TOKENS * program.kv_heads * program.head_dim * dtype.itemsize)

    def build(self, plan: StepPlan) -> StepBatch:
        """Returns the tensors of the step ``plan``, whose items must be valid."""
        items = sorted(
            plan.items, key=lambda i: (len(i.tokens) > 1, _bucket(_length(i)) if len(i.tokens) == 1 else 0)
        )
        counts = [len(item.tokens) for item in items]
        ends = np.cumsum(counts)
        positions = _concat([np.arange(i.start, i.start + len(i.tokens)) for i in items])
        tokens = _concat([np.asarray(i.tokens, np.int64) for i in items])
        rope_angles = self._rope.of(_padded(positions), self._dtype)
        sampled = [
            (item, spec, row)
            for item, end in zip(items, ends, strict=True)
            for row, spec in enumerate(item.asks, end - 1 - len(item.verify))
        ]
        scored = [
            (item, np.arange(len(item.targets)) + end - len(item.tokens))
            for item, end in zip(items, ends, strict=True)
            if item.targets
        ]
        rows = _concat([np.array([row for *_, row in sampled], np.int64), *(rows for _, rows in scored)])
        return StepBatch(
            _padded(tokens).to(self._device),
            tuple((cos.to(self._device), sin.to(self._device)) for cos, sin in rope_angles),
            torch.tensor(
                [page for item in items for page in begun_pages(item)], dtype=torch.int64, device=self._pages
            ),
            self._slots(items, positions),
            {window: tuple(self._jobs(items, window)) for window in self._windows},
            _padded(rows).to(self._device),
            tuple((item, spec) for item, spec, _ in sampled),
            tuple(item for item, _ in scored),
            tuple((i, slice(e - len(i.tokens), e)) for i, e in zip(items, ends.tolist(), strict=True) if i.pool),
            tuple(span_of(item, end - len(item.tokens)) for item, end in zip(items, ends.tolist(), strict=True)),
            grouped([(i.adapter, range(e - len(i.tokens), e)) for i, e in zip(items, ends.tolist(), strict=True)]),
            Observation(items),
            self._tables(items) if self._by_tables else {},
        )

    def _tables(self, items: Sequence[SequenceStep]) -> dict[int, DecodeTables]:
        """Returns the tables of the step's decodes, by window; empty if there are none."""
        decodes = [part for item in items if len(item.tokens) == 1 for part in self._seen(item)]
        if not decodes:
            return {}
        last = [part.start % BLOCK_TOKENS + 1 for part in decodes]
        return {
            window: decode_tables([_in_window(one, window) for one in decodes], last) for window in self._windows
        }

    def _slots(self, items: Sequence[SequenceStep], positions: Ints) -> tuple[Tensor, ...]:
        """Returns, by layer, the tokens' row numbers in the pages seen as (pages x layers x 2 x 16) rows: each
        token's k, then each one's v.
        """
        pages = _concat([_token_pages(item) for item in items])
        keys = pages * (self._layers * 2 * BLOCK_TOKENS) + positions % BLOCK_TOKENS
        return self._per_layer(np.concatenate((keys, keys + BLOCK_TOKENS)), 2 * BLOCK_TOKENS)

    def _jobs(self, items: Sequence[SequenceStep], window: int) -> Iterator[AttentionJob]:
        decodes = [part for item in items if len(item.tokens) == 1 for part in self._seen(item)]
        first = len(decodes) if self._by_tables else 0
        alike = groupby(decodes[first:], key=lambda part: _bucket(_visible(part, window)))
        for blocks, group in alike:
            together = list(group)
            yield from self._decode_jobs(first, together, blocks, window)
            first += len(together)
        for part in (part for item in items[len(decodes) :] for part in self._seen(item)):
            for begin in range(0, part.queries, QUERY_BLOCK):
                count = min(QUERY_BLOCK, part.queries - begin)
                yield from self._chunk_jobs(first, part, part.start + begin, count, window)
                first += count

    def _seen(self, item: SequenceStep) -> Iterable[VisiblePart]:
        return visible_parts(item, self._selection)

    def _decode_jobs(
        self, first: int, items: list[VisiblePart], blocks: int, window: int
    ) -> Iterator[AttentionJob]:
        tables, starts = np.empty((len(items), blocks), np.int64), np.empty(len(items), np.int64)
        for row, item in enumerate(items):
            pages = _in_window(item, window)
            tables[row, : len(pages)] = pages
            tables[row, len(pages) :] = pages[-1]
            starts[row] = (_blocks(item) - len(pages)) * BLOCK_TOKENS
        queries = np.array([[item.start] for item in items])
        return self._split(first, tables, self._mask(tables, starts, queries, window))

    def _chunk_jobs(
        self, first: int, item: VisiblePart, start: int, count: int, window: int
    ) -> Iterator[AttentionJob]:
        begin = max(0, start - window + 1) // BLOCK_TOKENS if window else 0
        end = -(-(start + count) // BLOCK_TOKENS)
        tables = np.asarray(item.pages[begin:end], np.int64)[None]
        queries = np.arange(start, start + count)[None]
        return self._split(first, tables, self._mask(tables, np.array([begin * BLOCK_TOKENS]), queries, window))

    def _mask(self, tables: Ints, starts: Ints, queries: Ints, window: int) -> Tensor:
        """Returns a mask of 0 or -inf from tables (batch, blocks), the position of each row's first key and the
        queries' positions.
        """
        keys = torch.from_numpy(starts)[:, None, None] + torch.arange(tables.shape[1] * BLOCK_TOKENS)
        asked = torch.from_numpy(queries)[:, :, None]
        hidden = keys > asked
        if window:
            hidden |= keys <= asked - window
        mask = torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(hidden, -torch.inf)
        return mask[:, None].to(self._device)

    def _split(self, first: int, tables: Ints, mask: Tensor) -> Iterator[AttentionJob]:
        """Yields jobs of as many sequences as gather what is gathered at once, at least one."""
        batch, blocks = tables.shape
        queries, most = mask.shape[2], max(1, self._most_blocks // blocks)
        keys = tables * (2 * self._layers)
        planes = np.stack((keys, keys + 1))
        for begin in range(0, batch, most):
            end = min(begin + most, batch)
            numbers = self._per_layer(planes[:, begin:end].ravel(), 2)
            yield AttentionJob(first + begin * queries, end - begin, queries, numbers, mask[begin:end])

    def _per_layer(self, base: Ints, step: int) -> tuple[Tensor, ...]:
        numbers = base[None] + step * np.arange(self._layers)[:, None]
        return torch.from_numpy(numbers).to(self._pages).unbind(0)


def _blocks(item: VisiblePart) -> int:
    """Returns the number of blocks up to the part's last row."""
    return -(-(item.start + item.queries) // BLOCK_TOKENS)


def _visible(item: VisiblePart, window: int) -> int:
    """Returns how many of the last blocks a decode reads: as many as its window can touch, wherever in a block it
    begins.
    """
    most = -(-(window - 1) // BLOCK_TOKENS) + 1
    return min(_blocks(item), most) if window else _blocks(item)


def _in_window(item: VisiblePart, window: int) -> Sequence[int]:
    """Returns the pages that a decode reads."""
    end = _blocks(item)
    return item.pages[end - _visible(item, window) : end]


def _bucket(blocks: int) -> int:
    """Returns ``blocks`` rounded up to 1, 2, 3, 4, 6, 8, 12, 16, …: two sizes per octave, so that a batch has few
    jobs.
    """
    power = 1 << (blocks - 1).bit_length()
    return power * 3 // 4 if blocks <= power * 3 // 4 else power


def _length(item: SequenceStep) -> int:
    """Returns the number of blocks of the sequence after the step."""
    return -(-(item.start + len(item.tokens)) // BLOCK_TOKENS)


def _token_pages(item: SequenceStep) -> Ints:
    """Returns each token's page."""
    at = np.arange(item.start, item.start + len(item.tokens)) // BLOCK_TOKENS
    first = int(at[0])
    return np.asarray(item.pages[first : int(at[-1]) + 1], np.int64)[at - first]


def begun_pages(item: SequenceStep) -> Iterator[int]:
    """Yields the page that the step begins and doesn't fill, if there is one."""
    block, filled = divmod(item.start + len(item.tokens), BLOCK_TOKENS)
    if filled and block * BLOCK_TOKENS >= item.start:
        yield item.pages[block]


def _concat(parts: list[Ints]) -> Ints:
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _padded(rows: Ints) -> Tensor:
    """Returns ``rows`` with zeros up to the next multiple of four."""
    return torch.from_numpy(np.pad(rows, (0, -len(rows) % ROW_MULTIPLE)))
