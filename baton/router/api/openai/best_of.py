"""OpenAI's ``best_of``: more answers are written than are given out, the likeliest per token are kept.

Knows nothing of how an answer is worded: it wraps what words it. Nothing of it is streamed; usage counts all of it.
"""

from __future__ import annotations

from collections.abc import Iterator

from baton.router.access.json import Json
from baton.router.answer.stream import TextDelta, Usage
from baton.router.api.openai.shapes import Shape


class BestOf:
    """Words ``keep`` of each prompt's ``of`` choices, by rising index the likeliest first."""

    always_closes = False

    def __init__(self, shape: Shape, of: int, keep: int, shows_logprobs: bool) -> None:
        self._shape, self._of, self._keep, self._shows_logprobs = shape, of, keep, shows_logprobs

    def opening(self) -> Iterator[Json]:
        """Yields no chunk, because such an answer is never streamed."""
        return iter(())

    def chunks(self, piece: TextDelta) -> Iterator[Json]:
        """Yields no chunk, because such an answer is never streamed."""
        return iter(())

    def closing(self, usage: Usage) -> Json:
        """Returns the wrapped shape's closing chunk."""
        return self._shape.closing(usage)

    def whole(self, pieces: list[TextDelta], usage: Usage) -> Json:
        """Returns the response with the best choices only."""
        answer = self._shape.whole(pieces, usage)
        kept = [answer["choices"][at] | {"index": index} for index, at in enumerate(self._best(pieces))]
        if not self._shows_logprobs:  # asked of the engine for our own sake
            kept = [choice | {"logprobs": None} for choice in kept]
        return answer | {"choices": kept}

    def _best(self, pieces: list[TextDelta]) -> Iterator[int]:
        """Indices, prompt by prompt."""
        for first in range(0, len(pieces), self._of):
            group = range(first, first + self._of)
            yield from sorted(group, key=lambda at: -mean_logprob(pieces[at]))[: self._keep]


def mean_logprob(piece: TextDelta) -> float:
    """Returns the mean log-probability per token; nothing written is as good as certain."""
    logprobs = [entry.chosen.logprob for entry in piece.logprobs]
    return sum(logprobs) / len(logprobs) if logprobs else 0.0
