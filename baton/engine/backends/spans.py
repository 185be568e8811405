"""Describes a step's sequences for ops that torch computes sequence by sequence, over pages of 16 tokens.

Knows nothing of weights or models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from baton.engine.plan import SequenceStep
from baton.engine.program import rope
from baton.kv.layout.state import ITEM_BYTES
from baton.protos.errors import BatonError
from baton.protos.nouns import BLOCK_TOKENS


class Span(NamedTuple):
    """One sequence's rows of a step: ``first`` to ``first + queries - 1``, at positions ``start`` and up."""

    first: int
    queries: int
    start: int
    pages: Sequence[int]  # block table
    state_from: Sequence[int] | None = None  # pages of the recurrent state before the step, None at the beginning
    state_to: Sequence[int] = ()  # pages for the recurrent state after the step

    @property
    def end(self) -> int:
        """Returns the number of tokens that the sequence has after the step."""
        return self.start + self.queries

    @property
    def rows(self) -> slice:
        """Returns the slice of the sequence's rows in a register."""
        return slice(self.first, self.first + self.queries)


def span_of(item: SequenceStep, first: int) -> Span:
    """Returns the span of ``item``, whose rows begin at row ``first``."""
    return Span(first, len(item.tokens), item.start, item.pages, item.state_from, item.state_to)


class RotaryTables:
    """Computes rotary tables for the positions of spans, from inverse frequencies and a factor."""

    def __init__(self, inverse: Tensor, factor: float) -> None:
        self._inverse, self._factor = inverse, factor

    def of(self, span: Span) -> tuple[Tensor, Tensor]:
        """Returns cos and sin, (queries, 1, width) float32, in the form that ``rope_append`` takes."""
        positions = torch.arange(span.start, span.end)
        return rope.tables(positions, self._inverse, self._factor, torch.float32)


class StepSpans:
    """The spans of one step, its rows' ``tokens``, and all pages: ``memory`` (pages, bytes of 16 tokens) uint8.

    ``batches`` has all spans of one row together, then each other span alone, for ops that advance states. A
    sequence's state is read when its first op needs it and written to its own pages by ``finish``, so that a failed
    step can be run again.
    """

    def __init__(self, spans: Sequence[Span], memory: Tensor, tokens: Tensor | None = None) -> None:
        self.spans, self.memory, self.tokens = spans, memory, tokens
        ones = tuple(span for span in spans if span.queries == 1)
        self.batches = ((ones,) if ones else ()) + tuple((span,) for span in spans if span.queries > 1)
        self._states: dict[int, Tensor] = {}  # (sequences, bytes) by the first row of a batch

    def state(self, batch: Sequence[Span], at: int, shape: Sequence[int]) -> Tensor:
        """Returns the part of the states of ``batch``, one of ``batches``, from byte ``at`` on: float32, ``shape``
        for each sequence, to be changed in place.
        """
        key = batch[0].first
        if key not in self._states:
            self._states[key] = torch.stack([self._read(span) for span in batch])
        part = self._states[key][:, at : at + math.prod(shape) * ITEM_BYTES]
        return part.view(torch.float32).view(len(batch), *shape)

    def finish(self) -> None:
        """Writes the changed states to their pages."""
        for batch in self.batches:
            if (found := self._states.get(batch[0].first)) is not None:
                pages = torch.tensor([page for span in batch for page in span.state_to], dtype=torch.int64)
                self.memory.index_copy_(0, pages, found.view(len(pages), -1))

    def _read(self, span: Span) -> Tensor:
        if not span.state_to:
            raise BatonError("a model with recurrent state was asked for a step without pages for it")
        if span.state_from is None:
            return torch.zeros(len(span.state_to) * self.memory.shape[1], dtype=torch.uint8)
        return self.memory.index_select(0, torch.tensor(span.state_from, dtype=torch.int64)).flatten()

    def rows_of(self, span: Span, at: int, size: int, dtype: torch.dtype) -> Tensor:
        """Returns a copy of bytes ``at`` to ``at + size`` of the span's pages, as ``dtype`` (tokens, width)."""
        blocks = -(-span.end // BLOCK_TOKENS)
        pages = torch.tensor(span.pages[:blocks], dtype=torch.int64)
        found = self.memory[:, at : at + size].index_select(0, pages)
        return found.view(dtype).view(blocks * BLOCK_TOKENS, -1)[: span.end]

    def store(self, span: Span, at: int, size: int, rows: Tensor) -> None:
        """Writes ``rows`` (queries, width) at the span's positions, into bytes ``at`` to ``at + size`` of their
        pages.
        """
        positions = torch.arange(span.start, span.end)
        first = span.start // BLOCK_TOKENS
        table = torch.tensor(span.pages[first : -(-span.end // BLOCK_TOKENS)], dtype=torch.int64)
        plane = self.memory[:, at : at + size].view(rows.dtype).unflatten(1, (BLOCK_TOKENS, -1))
        plane[table[positions // BLOCK_TOKENS - first], positions % BLOCK_TOKENS] = rows


Read = Callable[[str], Tensor]  # returns a register by name
SpanOp = Callable[[Read, StepSpans], dict[str, Tensor]]  # computes an op; returns its outputs by register name


def rows_of(batch: Sequence[Span]) -> slice | Tensor:
    """Returns the index of the rows of a batch, which is a single span or spans with one row each, in a
    register.
    """
    return batch[0].rows if len(batch) == 1 else torch.tensor([span.first for span in batch])
