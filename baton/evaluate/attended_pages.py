"""Tracks which pages of a sequence an engine in this process still attends to, if the prompt's end selects some of
them, and which hold its recurrent state.

It does with a list of pages what a worker's loops do with leases.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from baton.engine.plan import SequenceStep, StepResult
from baton.kv.layout.running import RunningScores
from baton.kv.layout.selection import observed_of, prompt_selection_of
from baton.protos.nouns import KvLayout


class AttendedPages:
    """The pages of one sequence, whose first ``prompt`` tokens are its prompt.

    ``states`` are pages for two recurrent states, which change places after each step; empty for most models.
    """

    def __init__(self, layout: KvLayout, prompt: int, pages: list[int], states: Sequence[int] = ()) -> None:
        self._kept, observed = prompt_selection_of(layout, prompt), observed_of(layout)
        self._running: RunningScores | None = None
        if observed is not None and observed.running:
            self._running = RunningScores(observed, layout.block_tokens, prompt, self._kept)
        self._gap = 0, 0
        self.pages = pages
        self._states = states[: len(states) // 2], states[len(states) // 2 :]  # read, written

    def cut(self, start: int, end: int) -> int:
        """Returns the end at which a step from ``start``, which may reach ``end``, has to stop."""
        end = end if self._kept is None else self._kept.cut(start, end)
        return end if self._running is None else self._running.cut(start, end)

    def marked(self, step: SequenceStep) -> SequenceStep:
        """Returns ``step`` with the gap in the sequence's pages, and the range of tokens whose attention selects
        pages, and with the pages of its recurrent states.
        """
        if self._states[1]:
            source = self._states[0] if step.start else None
            step = msgspec.structs.replace(step, state_from=source, state_to=self._states[1])
        if self._running is not None and self._running.sees(step.start):
            return msgspec.structs.replace(step, gap=self._gap, watch=step.start, watch_rows=True)
        if self._kept is None:
            return step
        watch = self._kept.watched_in(step.start, step.start + len(step.tokens))
        return msgspec.structs.replace(step, gap=self._gap, watch=watch)

    def saw(self, step: SequenceStep, result: StepResult) -> None:
        """Processes the result of ``step``: the pages that it selected replace the prompt's, and the state that it
        wrote is read next.
        """
        self._states = self._states[1], self._states[0]
        if step.watch_rows and self._running is not None:
            self._running.add(result.observed[step.seq])
            kept = self._running.kept_at(step.start + len(step.tokens))
            if kept is not None:
                self._select(kept, self._running.first)
        elif self._kept is not None and step.watch is not None:
            self._select(self._kept.chosen(result.observed[step.seq].tolist()), self._kept.first)

    def _select(self, chosen: list[int], first: int) -> None:
        """Keeps, of the pages before block ``first``, those of indices ``chosen``."""
        before = self.pages[: self._gap[0]] + self.pages[self._gap[1] : first]
        kept, behind = [before[block] for block in chosen], self.pages[first:]
        self._gap = len(chosen), first
        self.pages = [*kept, *[self.pages[first]] * (first - len(chosen)), *behind]
