"""Gives a simulated model's tokens their text, and makes its prompts of conversations.

A token below 256 is a byte. Most others read ``<id>``; some are marks of thoughts and whole tool calls, which a
hash chooses often enough. Knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from baton.drill.language.ranking import WORDS
from baton.router.text.chat_template import ChatTemplate
from baton.router.text.model import TextModel
from baton.router.text.tokenizer import ByteTokenizer

FIRST_PIECE = 800  # the ids from here on are pieces, by turns
PIECES = (
    b"<think>", b"</think>", b"</th", b"ink>", b"\n", b" ", b"<tool_", "é".encode()[:1], "é".encode()[1:],
    b'<tool_call>{"name": "look", "arguments": {"at": 1}}</tool_call>',
    b'<tool_call>\n{"name": "go", "arguments": {"to": ["<tool_call>", {"b": "}"}]}}\n</tool_call>',
)  # fmt: skip
TOOLS = ("look", "go")  # names of the functions that clients offer
ROLES = ("user", "assistant")  # of a conversation's messages, by turns
# The product finds the forms of thoughts and calls by the template's text.
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if tools %}{% for t in tools %}{{ t.function.name }} {% endfor %}by <tool_call>{% endif %}"
    "assistant:{% if enable_thinking %}<think>{% endif %}"
)


def bytes_of(token: int) -> bytes:
    """Returns what ``token`` reads as."""
    if token < 256:
        return bytes([token])
    return PIECES[token % len(PIECES)] if token >= FIRST_PIECE else f"<{token}>".encode()


def prompt_of(messages: Sequence[str], offers_tools: bool, thinks: bool) -> tuple[int, ...]:
    """Returns the token ids of a conversation, as TEMPLATE says."""
    lines = "".join(f"{ROLES[at % 2]}: {message}\n" for at, message in enumerate(messages))
    offered = "".join(f"{name} " for name in TOOLS) + "by <tool_call>" if offers_tools else ""
    return tuple((lines + offered + "assistant:" + ("<think>" if thinks else "")).encode())


class PieceTokenizer(ByteTokenizer):
    """Converts text as ByteTokenizer does, but for words that are one token, and ids to text by ``bytes_of``."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Returns the token ids of ``text``."""
        return [WORDS[text]] if text in WORDS else super().encode(text, add_special_tokens)

    def token_bytes(self, token_id: int, skip_special_tokens: bool = False) -> bytes:
        """Returns what the token reads as; b"" for a special one that is skipped."""
        return b"" if skip_special_tokens and token_id in self._special else bytes_of(token_id)


@cache
def simulated_text(source: Path | None, vocab_size: int, special: Sequence[int]) -> TextModel:
    """Returns the text functions of the simulated model; ``source`` has no effect."""
    return TextModel(PieceTokenizer(vocab_size, special), ChatTemplate(TEMPLATE))
