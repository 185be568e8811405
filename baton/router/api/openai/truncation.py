"""Truncation of prompts that are longer than the client allows, from either side.

Knows nothing of models. As vLLM's ``truncate_prompt_tokens``, except that tokens that the tokenizer adds by itself
stay.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Literal

import msgspec

from baton.protos.errors import InvalidRequest
from baton.router.answer.validate import check_tokenized
from baton.router.api.request_body import RequestBody
from baton.router.text.model import TextModel
from baton.router.text.room import PromptRoom

ALL_THAT_FITS = -1  # stands for as many tokens as the model takes beside the answer


class PromptCut(msgspec.Struct, frozen=True):
    """Describes a truncation to at most ``tokens`` tokens: the prompt's last ones, or its first if
    ``keeps_first``.
    """

    tokens: int
    keeps_first: bool = False

    def of(self, ids: Sequence[int]) -> Sequence[int]:
        """Returns the kept part of the token ids."""
        if len(ids) <= self.tokens:
            return ids
        return ids[: self.tokens] if self.keeps_first else ids[len(ids) - self.tokens :]

    async def needed(self, text: TextModel, prompt: str) -> str:
        """Returns as much of ``prompt`` as has the kept tokens: of a long one its beginning or its end.

        Raises InvalidRequest for one of which too much would have to be tokenized.
        """
        part = await (text.beginning if self.keeps_first else text.ending)(prompt, self.tokens)
        check_tokenized(len(part), self.tokens, "truncate_prompt_tokens")
        return part


class TruncatedBody(RequestBody):
    """Declares how a prompt is truncated; ``truncate_prompt_tokens`` -1 means as many as the context holds."""

    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None

    def cut(self, max_model_len: int, answer_tokens: int = 1) -> PromptCut | None:
        """Returns the truncation that was asked for, or None; -1 leaves room for ``answer_tokens`` in the context.

        Raises InvalidRequest.
        """
        asked = self.truncate_prompt_tokens
        if asked is None:
            return None
        if asked != ALL_THAT_FITS and not 1 <= asked <= max_model_len:
            text = f"truncate_prompt_tokens is {asked}: give 1 to {max_model_len}, or -1 for as many as fit"
            raise InvalidRequest(text, "truncate_prompt_tokens")
        tokens = max(1, max_model_len - answer_tokens) if asked == ALL_THAT_FITS else asked
        return PromptCut(tokens, self.truncation_side == "right")


TURN = 8  # short prompts tokenized in a row, some 0.5 ms each


async def all_ids(
    text: TextModel,
    prompts: Sequence[str | Sequence[int]],
    add_special_tokens: bool,
    cut: PromptCut | None,
    room: PromptRoom,
) -> AsyncIterator[Sequence[int]]:
    """Yields each prompt's token ids as ``prompt_ids`` does, and yields to the event loop every TURN prompts."""
    for at, prompt in enumerate(prompts):
        if at % TURN == TURN - 1:
            await asyncio.sleep(0)
        yield await prompt_ids(text, prompt, add_special_tokens, cut, room)


async def prompt_ids(
    text: TextModel,
    prompt: str | Sequence[int],
    add_special_tokens: bool,
    cut: PromptCut | None,
    room: PromptRoom,
) -> Sequence[int]:
    """Returns a prompt's token ids: given ids as they are, text tokenized; both truncated by ``cut``.

    Raises InvalidRequest for an empty text, and ContextTooLong for a long one that can't fit ``room`` uncut.
    """
    if not isinstance(prompt, str):
        return prompt if cut is None else cut.of(prompt)
    if cut is None or not prompt:
        return await text.encode_prompt(prompt, add_special_tokens, room)
    prompt = await cut.needed(text, prompt)
    ids = await text.encode(prompt, add_special_tokens)
    if len(ids) <= cut.tokens:
        return ids
    bare = await text.encode(prompt, add_special_tokens=False) if add_special_tokens else ids
    return _cut_inside(ids, bare, cut)


def _cut_inside(ids: list[int], bare: list[int], cut: PromptCut) -> Sequence[int]:
    """``bare`` cut so far that with what ``ids`` has around it, it fits."""
    added = len(ids) - len(bare)
    heads = (head for head in range(added + 1) if ids[head : head + len(bare)] == bare)
    head = next(heads, None)
    if head is None or added >= cut.tokens:
        return cut.of(ids)
    inside = msgspec.structs.replace(cut, tokens=cut.tokens - added).of(bare)
    return [*ids[:head], *inside, *ids[head + len(bare) :]]
