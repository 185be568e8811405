"""One model's tokenizer and chat template; long texts are tokenized off the event loop.

Knows nothing of REST, gRPC, sampling or workers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

from baton.protos.errors import InvalidRequest
from baton.router.text.chat_template import PLAIN, ChatMessage, ChatTemplate, load_chat_template
from baton.router.text.detokenize import Detokenizer
from baton.router.text.tokenizer import ByteTokenizer, HfTokenizer, PairIds, Tokenizer, token_name

INLINE_CHARS = 2048  # about 0.5 ms; a thread costs 0.1 ms
INLINE_IDS = 4096  # tokens that are decoded on the event loop; more would hold it up
_T = TypeVar("_T")


class TextModel:
    """Joins a tokenizer and, where the model has one, its chat template."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self.tokenizer = tokenizer
        self._template = template
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenize")

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of a text, computed in a thread if it is over INLINE_CHARS."""
        return await self._run(len(text) <= INLINE_CHARS, self.tokenizer.encode, text, add_special_tokens)

    async def encode_pair(self, first: str, second: str, most: int, most_second: int | None) -> PairIds:
        """Returns the token ids of two texts as one prompt; arguments and errors as of
        ``Tokenizer.encode_pair``.
        """
        short = len(first) + len(second) <= INLINE_CHARS
        return await self._run(short, self.tokenizer.encode_pair, first, second, most, most_second)

    async def encode_prompt(self, text: str, add_special_tokens: bool = True, param: str = "prompt") -> list[int]:
        """Returns the token ids of a prompt to continue.

        Raises InvalidRequest, naming ``param``, for an empty text, even if the model would add a special token.
        """
        if not text:
            raise InvalidRequest(f"{param} is empty: give at least one token", param)
        return await self.encode(text, add_special_tokens)

    async def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        add_generation_prompt: bool = True,
        switches: Mapping[str, object] | None = None,
        continues: bool = False,
    ) -> list[int]:
        """Returns the token ids of a conversation; special tokens come from the template only.

        Parameters and errors are ``render_chat``'s.
        """
        text = self.render_chat(messages, add_generation_prompt, switches, continues=continues)
        return await self.encode(text, add_special_tokens=False)

    def render_chat(
        self,
        messages: Sequence[ChatMessage],
        add_generation_prompt: bool = True,
        switches: Mapping[str, object] | None = None,
        tools: Sequence[Mapping[str, object]] | None = None,
        documents: Sequence[Mapping[str, object]] | None = None,
        continues: bool = False,
    ) -> str:
        """Returns a conversation as prompt text, see ``ChatTemplate.render``; ``continues`` leaves the last message
        open at its end.

        Raises InvalidRequest without a template, or if the template refuses the conversation.
        """
        if self._template is None:
            raise InvalidRequest("this model has no chat template: use /v1/completions", "messages")
        if continues:
            return self._template.render_open(messages, switches, tools, documents)
        return self._template.render(messages, add_generation_prompt, switches, tools, documents)

    def hides(self, mark: str) -> bool:
        """Returns whether skipping special tokens would remove ``mark``, or a part of it, from a text."""
        ids = self.tokenizer.encode(mark, add_special_tokens=False)
        return any(not self.tokenizer.token_bytes(i, skip_special_tokens=True) for i in ids)

    def special_id(self, mark: str) -> int | None:
        """Returns the id of the special token that ``mark`` is; None if it is written as text."""
        ids = self.tokenizer.encode(mark, add_special_tokens=False)
        hidden = [i for i in ids if not self.tokenizer.token_bytes(i, skip_special_tokens=True)]
        return hidden[0] if len(hidden) == 1 else None

    @property
    def template_names(self) -> frozenset[str]:
        """Returns the names of the variables that the chat template reads."""
        return self._template.names if self._template else frozenset()

    @property
    def template_source(self) -> str:
        """Returns the chat template's source; "" without a template."""
        return self._template.source if self._template else ""

    async def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of ``ids``, decoded in a thread if they are over INLINE_IDS."""
        return await self._run(len(ids) <= INLINE_IDS, self.tokenizer.decode, ids, skip_special_tokens)

    def token_names(self, ids: Sequence[int]) -> list[str]:
        """Returns the text of each token as logprobs show it."""
        names = {token_id: token_name(self.tokenizer.token_bytes(token_id)) for token_id in set(ids)}
        return [names[token_id] for token_id in ids]

    def detokenizer(self, context: Sequence[int] = (), skip_special_tokens: bool = True) -> Detokenizer:
        """Returns a detokenizer for one choice whose text continues the token ids ``context``."""
        return self.tokenizer.detokenizer(context, skip_special_tokens)

    async def _run(self, inline: bool, work: Callable[..., _T], *args: object) -> _T:
        if inline:
            return work(*args)
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(work, *args))


def load_text(directory: Path | None, vocab_size: int, special: Sequence[int] = ()) -> TextModel:
    """Returns the tokenizer and chat template of a model directory. Raises CheckpointError.

    For ``directory`` None (the paced engine), each byte is a token; ``special`` are ids that end a text, all below
    ``vocab_size``.
    """
    if directory is None:
        return TextModel(ByteTokenizer(vocab_size, special), ChatTemplate(PLAIN))
    return TextModel(HfTokenizer(directory / "tokenizer.json"), load_chat_template(directory))
