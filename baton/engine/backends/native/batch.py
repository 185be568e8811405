"""Converts a step plan to the native step's arrays: tokens, items with block tables, parameters of sampling.

Knows nothing of weights or ops. Rows are in the plan's order. Rows whose logits are needed (logprobs, prompt
scores) get them in ``logits``; every other row's token is chosen inside the step.
"""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from baton.engine.backends.native.branches import Place, branches
from baton.engine.backends.sequence_checks import require_computable
from baton.engine.backends.visible_parts import visible_parts
from baton.engine.plan import SampleSpec, SequenceStep, StepPlan
from baton.engine.sampling import COLDEST, uniform
from baton.kernels.step.structs import CHOICE, ITEM
from baton.kv.layout.selection import Selection
from baton.protos.errors import BatonError
from baton.protos.nouns import BLOCK_TOKENS

Array = NDArray[Any]
Run = tuple[int, int, int, int]  # first row, first entry of its block table, rows, position of the first
FEW = 4096  # length below which Python's max is faster than numpy's
_ITEM = struct.Struct("<qQii")  # as ITEM
_CHOICE = np.zeros(1, CHOICE)
_CHOICE["repetition"] = _CHOICE["top_p"] = 1.0
_PLAIN = _CHOICE.tobytes()
_WORDS, _TOKEN = CHOICE.itemsize // 4, CHOICE.fields["token"][1] // 4  # type: ignore[index]  # of a choice, in int32
_NONE: Array = np.empty((0, 0), np.float32)


class NativeBatch:
    """The arrays of one step, which live as long as this object. Their memory is filled in at once; views of it are
    made when they are asked for, because most steps need few of them.

    ``items`` have the rows' positions and pages, ``seen`` what attention sees: the same, except where blocks are
    left out by ``selection`` or by items' gaps. ``copies`` are the slots of KV, (from, to), that branches of drafts
    begin with, which are copied in each layer before attention. ``items_by_table`` has the items as they are in
    each page table, ``tables`` their addresses.
    """

    def __init__(
        self,
        plan: StepPlan,
        vocab_size: int,
        pages: int,
        selection: Selection | None = None,
    ) -> None:
        items = plan.items
        self._kept: list[Array] = []
        self.observed: dict[int, NDArray[np.float32]] = {}  # as StepResult has it, once the step was run
        tokens, table, wanted, scores, runs = self._runs(items)
        seen = _seen(items, runs, table, selection) if selection is not None or self._has_gaps else None
        further = [_further(items, runs, table, number) for number in range(_tables(items))]
        self.rows = len(tokens)
        if (found := _within(tokens, vocab_size)) is None or (flat := _within(table, pages)) is None:
            _explain(items, vocab_size, pages)
        rows, structs = array("i", wanted + scores), bytearray(_items(runs, flat.buffer_info()[0]))
        seen_structs = structs if seen is None else bytearray(_items(seen, flat.buffer_info()[0]))
        choices = bytearray(_PLAIN * len(rows))
        self._tokens, self._flat, self._rows, self._choices = found, flat, rows, choices
        self._items, self._seen = structs, seen_structs
        self.item_count, self.wanted_count = len(runs), len(rows)
        self._further = [bytearray(_items(each, flat.buffer_info()[0])) for each in further]
        at = _address(structs)
        self.seen_at = at if seen is None else _address(seen_structs)
        self.tables = at, *map(_address, self._further)
        self.addresses = found.buffer_info()[0], at, rows.buffer_info()[0], _address(choices)
        edited = [
            (row, spec) for row, (_, spec) in enumerate(self.sampled) if not spec.plain or spec.drafted is not None
        ]
        self.logits, self.loud = _NONE, dict[int, int]()
        if edited or scores:
            self.logits, self.loud = self._logits(vocab_size, [row for row, spec in edited if loud(spec)])
        for row, spec in edited:
            if row not in self.loud:
                self._kept += fill(self.choices[row], spec, vocab_size)

    @cached_property
    def tokens(self) -> Array:
        """Returns the rows' tokens, int32."""
        return np.frombuffer(self._tokens, np.int32)

    @cached_property
    def flat(self) -> Array:
        """Returns all block tables one after the other, int32."""
        return np.frombuffer(self._flat, np.int32)

    @cached_property
    def items(self) -> Array:
        """Returns the items' structs, of dtype ITEM."""
        return np.frombuffer(self._items, ITEM)

    @cached_property
    def seen(self) -> Array:
        """Returns what attention sees of the items, of dtype ITEM."""
        return np.frombuffer(self._seen, ITEM)

    @cached_property
    def items_by_table(self) -> tuple[Array, ...]:
        """Returns the items as they are in each page table."""
        return self.items, *(np.frombuffer(each, ITEM) for each in self._further)

    @cached_property
    def wanted(self) -> Array:
        """Returns the numbers of the rows that choose tokens, then of those that are scored, int32."""
        return np.frombuffer(self._rows, np.int32)

    @cached_property
    def choices(self) -> Array:
        """Returns how each such row's token is chosen, of dtype CHOICE, and after the step the token."""
        return np.frombuffer(self._choices, CHOICE)

    def chosen(self) -> list[int]:
        """Returns the token of each entry of ``choices``, -1 where none was chosen."""
        words = memoryview(self._choices)
        return words.cast("i")[_TOKEN::_WORDS].tolist() if words else []

    def _runs(self, items: Sequence[SequenceStep]) -> tuple[list[int], list[int], list[int], list[int], list[Run]]:
        """Returns all tokens, all block tables, the rows that choose tokens, the rows that are scored, and the
        place of each item.

        One pass in plain Python: for a few items numpy's calls would take longer than their work.
        """
        tokens: list[int] = []
        table: list[int] = []
        wanted: list[int] = []
        scores: list[int] = []
        runs: list[Run] = []
        self.reach, self.pools, self._has_gaps = 0, False, False
        self.copies: list[tuple[Place, Place]] = []
        self.sampled: list[tuple[int, SampleSpec]] = []  # the sequences that choose tokens, and how
        self.scored: list[SequenceStep] = []
        for item in items:
            first, start, count, at = len(tokens), item.start, item.trunk, len(table)
            last = start + count
            tokens += item.tokens
            table += item.pages[: (last + BLOCK_TOKENS - 1) // BLOCK_TOKENS]
            runs.append((first, at, count, start))
            if (len(table) - at) * BLOCK_TOKENS < last:
                table.append(-1)  # too short: it is refused
            if last > self.reach:
                self.reach = last
            if item.draft_branches:
                for draft_branch, branch in zip(item.draft_branches, branches(item), strict=True):
                    runs.append((first + draft_branch.first, len(table), draft_branch.rows, branch.start))
                    table += branch.table
                    self.copies += branch.copies
                    self.reach = max(self.reach, branch.start + draft_branch.rows)
                count = len(item.tokens)
            if item.sample:
                self.sampled.append((item.seq, item.sample))
                if item.verify:
                    wanted += range(first + count - 1 - len(item.verify), first + count - 1)
                    self.sampled += [(item.seq, spec) for spec in item.verify]
                wanted.append(first + count - 1)
            if item.pool:
                self.pools = True
            if item.gap[1]:
                self._has_gaps = True
            if item.targets:
                scores += range(first, first + len(item.targets))
                self.scored.append(item)
        return tokens, table, wanted, scores, runs

    def _logits(self, vocab_size: int, asked: list[int]) -> tuple[Array, dict[int, int]]:
        """Returns memory for the logits, (rows that need them, vocab_size), and the index there of each row that
        chooses. ``asked`` are the rows that choose and need them; those that are scored do, too.
        """
        asked += range(len(self.sampled), self.wanted_count)
        logits = np.empty((len(asked), vocab_size), np.float32)
        for at, row in enumerate(asked):
            self.choices[row]["logits"] = logits.ctypes.data + at * logits.strides[0]
        return logits, {row: at for at, row in enumerate(asked)}


def _seen(
    items: Sequence[SequenceStep], runs: list[Run], table: list[int], selection: Selection | None
) -> list[Run]:
    """Returns what attention sees of each item, in parts; their tables join ``table``."""
    found = list[Run]()
    for item, (first, *_) in zip(items, runs, strict=True):
        for part in visible_parts(item, selection):
            found.append((first + part.first, len(table), part.queries, part.start))
            table += part.pages
    return found


def _tables(items: Sequence[SequenceStep]) -> int:
    """Returns the number of page tables that each item has beside its first."""
    return len(items[0].tables) if items else 0


def _further(items: Sequence[SequenceStep], runs: list[Run], table: list[int], number: int) -> list[Run]:
    """Returns the place of each item in its further page table ``number``; the tables join ``table``."""
    found = list[Run]()
    for item, (first, _, count, start) in zip(items, runs, strict=True):
        found.append((first, len(table), count, start))
        last = -(-(start + count) // BLOCK_TOKENS)
        own = item.tables[number][:last]
        table += own if len(own) == last else (-1,)  # too short: it is refused
    return found


def _within(numbers: list[int], limit: int) -> array[int] | None:
    """Returns ``numbers`` as uint32; None unless all are in 0 … ``limit`` - 1. For a few, numpy would take
    longer.
    """
    try:
        found = array("I", numbers)
    except OverflowError:  # below 0, too
        return None
    largest = max(numbers) if len(numbers) < FEW else int(np.frombuffer(found, np.uint32).max())
    return found if largest < limit else None


def _items(runs: list[Run], tables: int) -> bytes:
    """The items' structs; their block tables lie at ``tables``."""
    return b"".join([_ITEM.pack(first, tables + 4 * at, count, start) for first, at, count, start in runs])


def _address(memory: bytearray) -> int:
    """Returns the memory's address. Numpy's way to find an array's takes a dozen calls, cold between two steps."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory)) if memory else 0


def fill(choice: np.void, spec: SampleSpec, vocab_size: int) -> list[Array]:
    """Writes the sampling parameters of ``spec`` to ``choice``, one element of dtype CHOICE; returns the arrays to
    which it points, to be kept alive.
    """
    sampling, kept = spec.sampling, []

    def point(field: str, values: Array) -> None:
        kept.append(values)
        choice[field] = values.ctypes.data

    choice["repetition"], choice["top_p"] = sampling.repetition_penalty, sampling.top_p
    if sampling.temperature >= COLDEST:
        choice["temperature"], choice["top_k"] = sampling.temperature, sampling.top_k
        choice["min_p"], choice["uniform"] = sampling.min_p, uniform(sampling.seed, spec.choice, spec.position)
    if sampling.penalised:
        choice["frequency"], choice["presence"] = sampling.frequency_penalty, sampling.presence_penalty
        point("history", np.fromiter(spec.history, np.int32, len(spec.history)))
        choice["history_count"], choice["prompt_count"] = len(spec.history), spec.prompt_tokens
    if sampling.logit_bias:
        point("bias_ids", np.array(list(sampling.logit_bias), np.int32))
        point("bias", np.array(list(sampling.logit_bias.values()), np.float32))
        choice["bias_count"] = len(sampling.logit_bias)
    if spec.allowed is not None:
        point("allowed", np.ascontiguousarray(spec.allowed(vocab_size)).view(np.uint8))
    if spec.banned:
        point("banned", np.array(spec.banned, np.int32))
        choice["banned_count"] = len(spec.banned)
    return kept


def _explain(items: Sequence[SequenceStep], vocab_size: int, pages: int) -> NoReturn:
    """Raises an error for the first item that can't be computed."""
    for item in items:
        require_computable(item, vocab_size, pages)
    raise BatonError(f"a block table names a page outside 0 … {pages - 1}")


def loud(spec: SampleSpec) -> bool:
    """Returns whether the row's logits are needed outside of the native step."""
    return spec.sampling.logprobs is not None or spec.drafted is not None or spec.spread
