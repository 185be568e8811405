"""Follows which pages of a prompt an engine in this process still sees, where its end chooses some of them.

Knows nothing of measures. What a worker's loops do with leases, this does with a list of pages.
"""

from __future__ import annotations

import msgspec

from baton.engine.plan import SequenceStep, StepResult
from baton.kv.layout.selection import kept_of
from baton.protos.nouns import KvLayout


class KeptPages:
    """Holds the pages of one sequence, whose first ``prompt`` tokens are its prompt."""

    def __init__(self, layout: KvLayout, prompt: int, pages: list[int]) -> None:
        self._kept = kept_of(layout, prompt)
        self._gap = 0, 0
        self.pages = pages

    def cut(self, start: int, end: int) -> int:
        """Returns where a step from ``start`` that might go to ``end`` stops."""
        return end if self._kept is None else self._kept.cut(start, end)

    def marked(self, step: SequenceStep) -> SequenceStep:
        """Returns ``step`` with what it sees, and whether its tokens choose."""
        if self._kept is None:
            return step
        watch = self._kept.watched_in(step.start, step.start + len(step.tokens))
        return msgspec.structs.replace(step, gap=self._gap, watch=watch)

    def saw(self, step: SequenceStep, result: StepResult) -> None:
        """Takes what a step that was run has chosen."""
        if self._kept is None or step.watch is None:
            return
        first, pages = self._kept.first, self.pages
        chosen = [pages[block] for block in self._kept.chosen(result.observed[step.seq].tolist())]
        self._gap = self._kept.gap
        self.pages = [*chosen, *[pages[first]] * (first - len(chosen)), *pages[first:]]
