"""What can be judged: something that says how likely a text is and continues a prompt. Torch-free.

Knows nothing of measures. Tokens are ids; a server that doesn't say ids names alternatives by their text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

TOP = 20  # alternatives per token, because most servers give no more

Ids = Sequence[int]
Key = int | str  # a token: its id, or its text where the server doesn't say the id


class Scored(NamedTuple):
    """One token's likelihood after those before it, in nats, and the likeliest tokens there with theirs."""

    logprob: float
    top: dict[Key, float]

    @property
    def best(self) -> Key:
        """Returns the likeliest token there."""
        return max(self.top, key=lambda key: self.top[key])


class Continuation(NamedTuple):
    """Holds one greedy continuation. ``tokens`` are ids where the server says them; ``logprobs`` are in nats."""

    text: str
    tokens: tuple[Key, ...]
    logprobs: tuple[float, ...]

    @property
    def ids(self) -> tuple[int, ...] | None:
        """The tokens' ids; None where the server gives texts alone."""
        found = tuple(token for token in self.tokens if isinstance(token, int))
        return found if len(found) == len(self.tokens) else None


class Subject(Protocol):
    """A model that is served in one particular way. ``context`` is the longest prompt and answer, in tokens."""

    name: str
    context: int

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a prompt, with those that the tokenizer puts before it."""

    def token_text(self, token: int) -> str:
        """Returns one token as text."""

    def scores(self, prompts: Sequence[Ids], top: int = 0) -> Iterator[list[Scored]]:
        """Yields for each prompt the likelihood of its tokens from the second on, with ``top`` alternatives."""

    def answers(
        self, prompts: Sequence[Ids], tokens: int, stop: Sequence[str] = (), to_the_end: bool = False
    ) -> list[Continuation]:
        """Returns a greedy continuation of each prompt, of ``tokens`` at most.

        It ends before the first of the ``stop`` strings; with ``to_the_end`` no end token ends it.
        """
