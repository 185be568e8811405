"""One model's tokenizer and chat template; long texts are tokenized off the event loop, in turns of their tenants.

Knows nothing of REST, gRPC, sampling or workers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial
from pathlib import Path
from typing import TypeVar

from baton.protos.errors import InvalidRequest
from baton.router.access.caller import CALLER
from baton.router.text.chat_template import PLAIN, ChatMessage, ChatTemplate, load_chat_template
from baton.router.text.detokenize import Detokenizer
from baton.router.text.fair_threads import FairThreads
from baton.router.text.room import LOST_AT_CUT, MOST_PART, PromptRoom, long_chars, part_sizes
from baton.router.text.tokenizer import (
    ByteTokenizer,
    HfTokenizer,
    KeepingTokenizer,
    PairIds,
    Tokenizer,
    token_name,
)

INLINE_CHARS = 2048  # about 0.5 ms; a thread costs 0.1 ms
THREADS = 2  # of a model, for its long texts
INLINE_IDS = 4096  # tokens that are decoded on the event loop; more would hold it up
_T = TypeVar("_T")


class TextModel:
    """Joins a tokenizer and, where the model has one, its chat template."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self.tokenizer: Tokenizer = tokenizer
        self._keeping: dict[tuple[str, ...], TextModel] = {}  # by marks of a format, of which there are few
        self._template = template
        self._threads = FairThreads(THREADS, "tokenize")

    async def encode(self, text: str, add_special_tokens: bool = True, room: PromptRoom | None = None) -> list[int]:
        """Returns the token ids of a text, computed in a thread if it is over INLINE_CHARS.

        Raises as ``require_room`` if ``room`` is given.
        """
        if room is not None:
            await self.require_room(text, room)
        return await self._run(len(text) <= INLINE_CHARS, self.tokenizer.encode, text, add_special_tokens)

    async def require_room(self, text: str, room: PromptRoom) -> None:
        """Raises ContextTooLong for a long text that is sure not to fit ``room``: it is counted part by part, each
        with a turn of its own, until that shows. So such a text costs about as much as one that fits.
        """
        size, tokens = long_chars(room.max_model_len), 0
        if len(text) <= size:
            return
        size = min(size, MOST_PART)
        for begin in range(0, len(text), size):
            tokens += len(await self.encode(text[begin : begin + size], add_special_tokens=False)) - LOST_AT_CUT
            room.check(tokens, at_least=True)

    async def beginning(self, text: str, tokens: int) -> str:
        """Returns a part of ``text`` whose first ``tokens`` tokens are the text's own: of a long text its
        beginning, if that has so many.
        """
        for size in part_sizes(tokens, len(text)):
            part = text[:size]
            if len(await self.encode(part, add_special_tokens=False)) - LOST_AT_CUT >= tokens:
                return part
        return text

    async def ending(self, text: str, tokens: int) -> str:
        """Returns a part of ``text`` whose last ``tokens`` tokens are the text's own: of a long text its end.

        A run of digits or of one character is divided from where the text begins. So a part counts only if one
        that begins a character earlier ends in the same tokens.
        """
        for size in part_sizes(tokens, len(text)):
            part = text[-size:]
            ids = await self.encode(part, add_special_tokens=False)
            if len(ids) - LOST_AT_CUT < tokens:
                continue
            other = await self.encode(text[-size - 1 :], add_special_tokens=False)
            if ids[-tokens:] == other[-tokens:]:
                return part
        return text

    async def encode_pair(self, first: str, second: str, most: int, most_second: int | None) -> PairIds:
        """Returns the token ids of two texts as one prompt; arguments and errors as of
        ``Tokenizer.encode_pair``.
        """
        short = len(first) + len(second) <= INLINE_CHARS
        return await self._run(short, self.tokenizer.encode_pair, first, second, most, most_second)

    async def encode_prompt(self, text: str, add_special_tokens: bool, room: PromptRoom) -> list[int]:
        """Returns the token ids of a prompt to continue.

        Raises InvalidRequest for an empty text, even if the model would add a special token, and ContextTooLong as
        ``require_room`` does.
        """
        if not text:
            raise InvalidRequest(f"{room.param} is empty: give at least one token", room.param)
        return await self.encode(text, add_special_tokens, room)

    async def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        add_generation_prompt: bool = True,
        switches: Mapping[str, object] | None = None,
        continues: bool = False,
        room: PromptRoom | None = None,
    ) -> list[int]:
        """Returns the token ids of a conversation; special tokens come from the template only.

        Parameters and errors are ``render_chat``'s, and ``encode``'s for ``room``.
        """
        text = self.render_chat(messages, add_generation_prompt, switches, continues=continues)
        return await self.encode(text, add_special_tokens=False, room=room)

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

    def keeping(self, marks: tuple[str, ...]) -> TextModel:
        """Returns the model with those special tokens left in texts that ``marks`` are made of, though others are
        skipped.
        """
        if marks not in self._keeping:
            kept = frozenset(token_id for mark in marks for token_id in self._hidden(mark))
            model = copy(self) if kept else self
            if kept:
                model.tokenizer = KeepingTokenizer(self.tokenizer, kept)
            self._keeping[marks] = model
        return self._keeping[marks]

    def special_id(self, mark: str) -> int | None:
        """Returns the id of the special token that ``mark`` is; None if it is written as text."""
        hidden = self._hidden(mark)
        return hidden[0] if len(hidden) == 1 else None

    def _hidden(self, mark: str) -> list[int]:
        """Returns the special tokens of ``mark``, which a text that skips them lacks."""
        ids = self.tokenizer.encode(mark, add_special_tokens=False)
        return [i for i in ids if not self.tokenizer.token_bytes(i, skip_special_tokens=True)]

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
        return await self._threads.run(CALLER.get().tenant, partial(work, *args))


def load_text(directory: Path | None, vocab_size: int, special: Sequence[int] = ()) -> TextModel:
    """Returns the tokenizer and chat template of a model directory. Raises CheckpointError.

    For ``directory`` None (the paced engine), each byte is a token; ``special`` are ids that end a text, all below
    ``vocab_size``.
    """
    if directory is None:
        return TextModel(ByteTokenizer(vocab_size, special), ChatTemplate(PLAIN))
    return TextModel(HfTokenizer(directory / "tokenizer.json"), load_chat_template(directory))
