"""Keeps a score for each page that an answer still sees, and decides which page it gives up (H2O). Torch-free.

Knows nothing of leases or of attention. The pages that may go are those behind the answer's last ``window`` tokens.
A page's score is the attention that the answer's tokens have paid to it so far, summed over layers and heads.

Heavy hitters: https://arxiv.org/abs/2306.14048. Theirs are tokens by head; these are pages of all heads, so that
what is given up frees memory.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from baton.kv.layout.selection import AttentionSelection, PromptSelection


class RunningScores:
    """Keeps the scores of one sequence's pages, of ``block_tokens`` tokens each, while its answer is generated.

    Until the prompt is read, every page is kept. ``prompt`` is its number of tokens, ``kept`` what its end selects
    of it.
    """

    def __init__(
        self, observed: AttentionSelection, block_tokens: int, prompt: int, kept: PromptSelection | None
    ) -> None:
        self._terms = observed, block_tokens, prompt, kept
        self._size, self._window, self.prompt = block_tokens, observed.window, prompt
        self._slots = max(1, (observed.budget - observed.window) // block_tokens)
        self.first = self._first(prompt)  # index of the first block that is within the window
        self._count = self.first if kept is None else kept.slots  # pages before it
        self._scores = np.zeros(0)

    def fresh(self) -> RunningScores:
        """Returns scores of the same sequence before its answer."""
        return RunningScores(*self._terms)

    def cut(self, start: int, end: int) -> int:
        """Returns the position at which a step from ``start`` that could extend to ``end`` has to stop: at the
        prompt's end, or where the next page may go.
        """
        due = (self.first + 1) * self._size + self._window
        return min(end, self.prompt if start < self.prompt else max(due, start + 1))

    def sees(self, start: int) -> bool:
        """Returns whether the attention of tokens from position ``start`` on counts."""
        return start >= self.prompt

    def add(self, paid: NDArray[np.float32]) -> None:
        """Adds what each of a step's tokens paid to each run of 16 tokens that it sees, (tokens, runs), in their
        order.
        """
        for row in paid:
            runs = -len(row) % (self._size // 16)
            pages = np.pad(row.astype(np.float64), (0, runs)).reshape(-1, self._size // 16).sum(1)
            self._scores = np.pad(self._scores, (0, max(0, len(pages) - len(self._scores))))
            self._scores[: len(pages)] += pages

    def kept_at(self, tokens: int) -> list[int] | None:
        """Returns which pages before the window are kept once ``tokens`` tokens are computed; None if all are.

        The pages are numbered as they are seen: those kept before, then the blocks that have left the window since.
        The best scores are kept, of equal ones the older. ``first`` is then the first block within the window.
        """
        first = max(self.first, self._first(tokens))
        candidates, self.first = self._count + first - self.first, first
        if candidates <= self._slots:
            self._count = candidates
            return None
        scores = np.pad(self._scores, (0, max(0, candidates - len(self._scores))))
        kept = sorted(np.argsort(-scores[:candidates], kind="stable")[: self._slots].tolist())
        self._scores, self._count = np.concatenate((scores[kept], scores[candidates:])), self._slots
        return kept

    def _first(self, tokens: int) -> int:
        return max(0, tokens - self._window) // self._size
