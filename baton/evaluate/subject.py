"""The interface of what can be evaluated: it scores texts and continues prompts. Torch-free.

Knows nothing of measures. Tokens are ids; a server that doesn't give ids names alternatives by their text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

TOP = 20  # alternatives per token, because most servers give no more

Ids = Sequence[int]
TokenKey = int | str  # a token: its id, or its text where the server doesn't say the id


class TokenScore(NamedTuple):
    """The log-likelihood of one token of a text, and those of the likeliest tokens in its place, in nats."""

    logprob: float
    top: dict[TokenKey, float]

    @property
    def best(self) -> TokenKey:
        """Returns the likeliest token in the scored token's place."""
        return max(self.top, key=lambda key: self.top[key])


class Continuation(NamedTuple):
    """One greedy continuation of a prompt."""

    text: str
    tokens: tuple[TokenKey, ...]  # ids, or texts if the server gives no ids
    logprobs: tuple[float, ...]  # of the tokens, in nats

    @property
    def ids(self) -> tuple[int, ...] | None:
        """Returns the tokens' ids; None if the server gives only texts."""
        found = tuple(token for token in self.tokens if isinstance(token, int))
        return found if len(found) == len(self.tokens) else None


def text_before(text: str, stops: Sequence[str]) -> str:
    """Returns ``text`` up to the first of the strings ``stops`` in it."""
    return text[: min((text.find(stop) for stop in stops if stop in text), default=len(text))]


class Subject(Protocol):
    """A model served in one particular way. ``context`` is the most tokens of a prompt with its answer."""

    name: str
    context: int

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of ``text`` as a prompt, with those that the tokenizer puts before it."""

    def token_text(self, token: int) -> str:
        """Returns the text of one token id."""

    def scores(self, prompts: Sequence[Ids], top: int = 0) -> Iterator[list[TokenScore]]:
        """Yields, for each prompt, the log-likelihoods of its tokens from the second on, with ``top`` alternatives
        each.
        """

    def answers(
        self, prompts: Sequence[Ids], tokens: int, stop: Sequence[str] = (), to_the_end: bool = False
    ) -> list[Continuation]:
        """Returns a greedy continuation of each prompt, of at most ``tokens`` tokens.

        It ends before the first of the ``stop`` strings; with ``to_the_end`` it does not end at end tokens.
        """
