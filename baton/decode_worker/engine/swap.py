"""Copies the KV of preempted sequences to host memory, and back into pages when they continue.

Knows nothing of order or of the batch. Whether copying twice or computing again costs less is judged by
measurements in this process: of copies' durations, and of the last steps, to which a curve is fitted when needed.
Torch-free, single-threaded: pages are copied between steps, while nobody writes them.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from baton.cost.curves import prefill_seconds
from baton.cost.fit import StepFit
from baton.engine.abilities import Mirror, copies_left
from baton.protos.errors import BatonError, RankLost
from baton.protos.measurements import StepCurve, StepSample
from baton.protos.nouns import KvLayout

log = logging.getLogger("baton.engine")

SHARE = 4  # the area holds 1/SHARE of the pages' memory at most, because few sequences are preempted at once
REMEMBERED = 32  # steps that read prompts, and as many that only write, on which the curve is fitted
FIRST_GUESS_S = 1e-9  # seconds to copy a byte (1 GB/s), until a copy was measured
NEW = 0.3  # weight of the last copy in the mean, because one copy varies with what else runs


class SwapEntry(NamedTuple):
    """A copy of the KV of a sequence's first ``tokens`` tokens, page by page, and of the recurrent state after
    them.
    """

    pages: tuple[bytes, ...]
    tokens: int
    state: tuple[bytes, ...] = ()


class SwapArea:
    """Keeps copies of at most ``capacity`` bytes of the pages in ``memory``.

    ``page_bytes`` and ``block_tokens`` are those of a page. ``mirror`` brings what cards or other hosts have of
    pages before they are copied; None: the host has every page whole.
    """

    def __init__(
        self,
        memory: memoryview,
        page_bytes: int,
        block_tokens: int,
        capacity: int,
        clock: Callable[[], float] = time.perf_counter,
        mirror: Mirror | None = None,
    ) -> None:
        self.used = 0
        self.saved = self.restored = 0  # sequences, ever
        self._memory, self._page_bytes, self._block_tokens = memory, page_bytes, block_tokens
        self._capacity, self._clock, self._mirror = capacity, clock, mirror
        self._per_byte = FIRST_GUESS_S
        self._reads: deque[StepSample] = deque(maxlen=REMEMBERED)
        self._writes: deque[StepSample] = deque(maxlen=REMEMBERED)

    @classmethod
    def beside(
        cls,
        memory: memoryview,
        layout: KvLayout,
        pages: int,
        clock: Callable[[], float],
        mirror: Mirror | None = None,
    ) -> SwapArea:
        """Returns an area for ``pages`` pages with room for 1/SHARE of them; memory is allocated as it is used.

        ``clock`` returns monotonic seconds.
        """
        capacity = pages * layout.page_bytes // SHARE
        return cls(memory, layout.page_bytes, layout.block_tokens, capacity, clock, mirror)

    def observe(self, sample: StepSample) -> None:
        """Adds a step that was run to the data for the fit."""
        (self._reads if sample.prefill_tokens else self._writes).append(sample)

    def save(self, pages: Sequence[int], tokens: int, state: Sequence[int] = ()) -> SwapEntry | None:
        """Returns a copy of the pages of ``tokens`` tokens, and of those of the ``state`` after them.

        It is None if computing them again costs less, if there is no room, or if the host can't get them.
        """
        kept = pages[: -(-tokens // self._block_tokens)]
        size = (len(kept) + len(state)) * self._page_bytes
        if not kept or self.used + size > self._room(size) or not self._cheaper(size, tokens):
            return None
        began = self._clock()
        found = self._copies([*kept, *state])
        if found is None:
            return None
        copies, beside = found[: len(kept)], found[len(kept) :]
        self._note(size, began)
        self.used += size
        self.saved += 1
        return SwapEntry(copies, tokens, beside)

    def restore(self, entry: SwapEntry, pages: Sequence[int], held: int, state: Sequence[int] = ()) -> None:
        """Writes a copy into ``pages``, except the first ``held``, which have their content, and into ``state``;
        drops the copy.
        """
        began, copied = self._clock(), 0
        places = zip([*pages[held : len(entry.pages)], *state], [*entry.pages[held:], *entry.state], strict=True)
        for page, content in places:
            self._page(page)[:] = content
            copied += self._page_bytes
        if copied:
            self._note(copied, began)
        self.restored += 1
        self.drop(entry)

    def drop(self, entry: SwapEntry) -> None:
        """Frees the room of a copy, because its sequence has ended or was restored."""
        self.used -= (len(entry.pages) + len(entry.state)) * self._page_bytes

    def _room(self, size: int) -> int:
        """Returns the bytes that all copies may take now, where ``size`` more pass through the host's pages."""
        left = copies_left(self._mirror)
        return self._capacity if left is None else min(self._capacity, left * self._page_bytes - size)

    def _copies(self, pages: Sequence[int]) -> tuple[bytes, ...] | None:
        try:
            if self._mirror is not None:
                self._mirror.make_whole(pages)
        except RankLost:
            raise
        except BatonError as error:
            log.warning("a preempted sequence is computed again: %s", error.message)
            return None
        copies = tuple(bytes(self._page(page)) for page in pages)
        if self._mirror is not None:
            self._mirror.let_go(pages)
        return copies

    def _page(self, page: int) -> memoryview:
        return self._memory[page * self._page_bytes : (page + 1) * self._page_bytes]

    def _cheaper(self, size: int, tokens: int) -> bool:
        """Returns whether copying out and back takes less than computing the tokens again; False until steps were
        seen.
        """
        curve = self._curve()
        return curve is not None and 2 * size * self._per_byte < prefill_seconds(curve, tokens)

    def _curve(self) -> StepCurve | None:
        """Returns a fit to the last steps, None without any. It takes milliseconds, so it is made only when
        needed.
        """
        fit = StepFit()
        for sample in (*self._writes, *self._reads):
            fit.observe(sample)
        return fit.curve

    def _note(self, size: int, began: float) -> None:
        self._per_byte += NEW * ((self._clock() - began) / size - self._per_byte)
