"""Tracks which pages of a sequence an engine in this process still attends to, if the prompt's end selects some of
them.

It does with a list of pages what a worker's loops do with leases.
"""

from __future__ import annotations

import msgspec

from baton.engine.plan import SequenceStep, StepResult
from baton.kv.layout.selection import kept_of
from baton.protos.nouns import KvLayout


class KeptPages:
    """The pages of one sequence, whose first ``prompt`` tokens are its prompt."""

    def __init__(self, layout: KvLayout, prompt: int, pages: list[int]) -> None:
        self._kept = kept_of(layout, prompt)
        self._gap = 0, 0
        self.pages = pages

    def cut(self, start: int, end: int) -> int:
        """Returns the end at which a step from ``start``, which may reach ``end``, has to stop."""
        return end if self._kept is None else self._kept.cut(start, end)

    def marked(self, step: SequenceStep) -> SequenceStep:
        """Returns ``step`` with the gap in the sequence's pages, and the range of tokens whose attention selects
        pages.
        """
        if self._kept is None:
            return step
        watch = self._kept.watched_in(step.start, step.start + len(step.tokens))
        return msgspec.structs.replace(step, gap=self._gap, watch=watch)

    def saw(self, step: SequenceStep, result: StepResult) -> None:
        """Processes the result of ``step``: the pages that it selected replace the prompt's."""
        if self._kept is None or step.watch is None:
            return
        first, pages = self._kept.first, self.pages
        chosen = [pages[block] for block in self._kept.chosen(result.observed[step.seq].tolist())]
        self._gap = self._kept.gap
        self.pages = [*chosen, *[pages[first]] * (first - len(chosen)), *pages[first:]]
