"""OpenAI's ``best_of``: more answers are generated than are returned; those with the highest mean logprob are kept.

Knows nothing of how an answer is worded: it wraps another shape. Nothing of it is streamed; usage counts all
answers.
"""

from __future__ import annotations

from collections.abc import Iterator

from baton.protos.json import Json
from baton.router.answer.stream import TextDelta, Usage
from baton.router.api.openai.shapes import Shape


class BestOf:
    """Wraps a response shape to return ``keep`` of each prompt's ``of`` choices, renumbered, the likeliest
    first.
    """

    always_closes = False
    recounts = False

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
        """Returns the wrapped shape's response with the best choices only."""
        answer = self._shape.whole(pieces, usage)
        kept = [answer["choices"][at] | {"index": index} for index, at in enumerate(self._best(pieces))]
        if not self._shows_logprobs:  # asked of the engine for our own sake
            kept = [choice | {"logprobs": None} for choice in kept]
        return answer | {"choices": kept}

    def _best(self, pieces: list[TextDelta]) -> Iterator[int]:
        """Yields the indices of the best choices, prompt by prompt."""
        for first in range(0, len(pieces), self._of):
            group = range(first, first + self._of)
            yield from sorted(group, key=lambda at: -mean_logprob(pieces[at]))[: self._keep]


def mean_logprob(piece: TextDelta) -> float:
    """Returns the mean log-probability of the generated tokens; 0.0 (certain) for no tokens."""
    logprobs = [entry.chosen.logprob for entry in piece.logprobs]
    return sum(logprobs) / len(logprobs) if logprobs else 0.0
