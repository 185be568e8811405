"""The room that a model's context has for a prompt, and the parts by which a long text is seen not to fit.

Knows nothing of tokenizers or requests. A tokenizer chooses a token by the text about it, so a part's tokens are
the whole text's but for some about the cut.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from baton.protos.errors import ContextTooLong

CHARS_OF_TOKEN = 8  # most texts have 3 to 5
LEAST_LONG = 16_384  # characters from which a text may be long
MOST_PART = 1 << 18  # characters of a part at most: some 0.1 s
LARGER = 8  # times: how much larger the next part is where one has too few tokens
LEAST_TOKENIZED = 1 << 20  # characters that one call may have tokenized, however small the context is
LIMIT = "This model's maximum context length is {} tokens"  # OpenAI's words, because clients look for them
LOST_AT_CUT = 512  # tokens that a cut may add to a text at most: a long token falls apart into its bytes


class PromptRoom(msgspec.Struct, frozen=True):
    """Tells whether a prompt fits a context of ``max_model_len`` tokens with one more; ``param`` is the prompt's
    field, for errors.
    """

    max_model_len: int
    param: str = "prompt"

    def check(self, tokens: int, at_least: bool = False) -> None:
        """Raises ContextTooLong if ``tokens`` don't fit; ``at_least``: the prompt may have more than these."""
        over = tokens - self.max_model_len + 1
        if over <= 0:
            return
        raise ContextTooLong(
            f"{self.param} has {'over ' if at_least else ''}{tokens} tokens. {LIMIT.format(self.max_model_len)}, "
            f"the answer included: shorten it by at least {over}",
            self.param,
        )


def long_chars(tokens: int) -> int:
    """Returns how many characters make a text long beside ``tokens`` tokens: most texts of so many have more."""
    return max(LEAST_LONG, CHARS_OF_TOKEN * tokens)


def part_sizes(tokens: int, chars: int) -> Iterator[int]:
    """Yields the sizes, in characters, of parts of a text of ``chars`` in which to look for its first or last
    ``tokens`` tokens, smallest first; none for a text that isn't long.
    """
    size = long_chars(tokens)
    most = max(size, LEAST_TOKENIZED)
    while size < min(chars, most + 1):
        yield size
        size *= LARGER
