"""Conversion of an answer's pieces to Anthropic's message object and stream events.

Knows nothing of HTTP or of where the pieces come from. https://docs.anthropic.com/en/api/messages-streaming
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import orjson
from pydantic_core import from_json

from baton.protos.json import Json
from baton.router.answer.generation import Generation
from baton.router.answer.stream import TextDelta, Usage
from baton.router.request.context import MarkedTokens
from baton.router.text.chat_reader import AnswerFormat, MessageDelta
from baton.router.text.surrogates import whole_pairs

REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesShape:
    """Words one answer as content blocks, in the order in which the model begins them: thinking, text, tool use."""

    always_closes = True
    recounts = False

    def __init__(self, generation: Generation, form: AnswerFormat) -> None:
        self._id, self._model = generation.request_id, generation.entry.name
        self._prompt_tokens, self._marked = generation.prompt_tokens, generation.context.marked
        self._reader = form.reader()
        self._blocks: list[Json] = []
        self._is_open = False
        self._arguments = ""  # of the open tool_use block, as JSON text
        self._reason: str | None = None
        self._stop: str | None = None

    def opening(self) -> Iterator[Json]:
        """Yields the event message_start, whose usage counts the whole prompt as uncached: no more is known yet."""
        message = self._message(_usage(Usage(self._prompt_tokens, 0, 0), self._marked))
        yield {"type": "message_start", "message": message}

    def chunks(self, piece: TextDelta) -> Iterator[Json]:
        """Yields the events for what ``piece`` adds to blocks; the last piece also ends the open block."""
        for delta in self._reader.push(piece.text):
            yield from self._take(delta)
        if piece.finish_reason:
            for delta in self._reader.flush():
                yield from self._take(delta)
            yield from self._close()
            self._end(piece)

    def closing(self, usage: Usage) -> Json:
        """Returns the event message_delta, with the reason why the answer ended and the usage."""
        delta = {"stop_reason": self._reason, "stop_sequence": self._stop}
        return {"type": "message_delta", "delta": delta, "usage": _usage(usage, self._marked)}

    def whole(self, pieces: list[TextDelta], usage: Usage) -> Json:
        """Returns the unstreamed message object."""
        for _ in self.chunks(pieces[0]):
            pass
        return self._message(_usage(usage, self._marked))

    def _end(self, piece: TextDelta) -> None:
        reason = self._reader.finish_reason(piece.finish_reason, piece.stop_string)
        self._reason = REASONS.get(reason, "end_turn")
        if piece.stop_string and self._reason == "end_turn":
            self._reason, self._stop = "stop_sequence", piece.stop_string

    def _take(self, delta: MessageDelta) -> Iterator[Json]:
        if "content" in delta:
            yield from self._write("text", "text_delta", delta["content"])
        if "reasoning_content" in delta:
            yield from self._write("thinking", "thinking_delta", delta["reasoning_content"])
        for call in delta.get("tool_calls", ()):
            yield from self._call(call)

    def _write(self, kind: str, event: str, text: str) -> Iterator[Json]:
        if not self._is_open or self._blocks[-1]["type"] != kind:
            signed: Json = {"signature": ""} if kind == "thinking" else {}
            yield from self._begin({"type": kind, kind: "", **signed})
        self._blocks[-1][kind] += text
        yield self._of_block("content_block_delta", delta={"type": event, kind: text})

    def _call(self, call: Json) -> Iterator[Json]:
        if "id" in call:
            block = {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}}
            yield from self._begin(block)
            return
        part = call["function"]["arguments"]
        self._arguments += part
        yield self._of_block("content_block_delta", delta={"type": "input_json_delta", "partial_json": part})

    def _begin(self, block: Json) -> Iterator[Json]:
        yield from self._close()
        self._blocks.append(block)
        self._is_open = True
        yield self._of_block("content_block_start", content_block=dict(block))

    def _close(self) -> Iterator[Json]:
        """Ends the block that is open."""
        if not self._is_open:
            return
        block = self._blocks[-1]
        if block["type"] == "tool_use":
            block["input"], self._arguments = _input(self._arguments), ""
        self._is_open = False
        yield self._of_block("content_block_stop")

    def _of_block(self, kind: str, **fields: object) -> Json:
        return {"type": kind, "index": len(self._blocks) - 1, **fields}

    def _message(self, usage: Json) -> Json:
        return {
            "id": f"msg_{self._id}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [dict(block) for block in self._blocks],
            "stop_reason": self._reason,
            "stop_sequence": self._stop,
            "usage": usage,
        }


def _input(arguments: str) -> Json | orjson.Fragment:
    """Returns a call's arguments as an object; of arguments that ``max_tokens`` or a stop string cut, what is
    complete.
    """
    try:
        found = from_json(whole_pairs(arguments) or "{}", allow_partial=True)
        return _encodable(found) if isinstance(found, dict) else {}
    except ValueError:
        return {}


def _encodable(found: Json) -> Json | orjson.Fragment:
    """Returns ``found``, or its JSON text if it has integers of over 64 bits, which orjson doesn't write.

    Raises ValueError for what no JSON text can hold.
    """
    try:
        orjson.dumps(found)
    except TypeError:
        return orjson.Fragment(json.dumps(found, allow_nan=False))
    return found


def _usage(usage: Usage, marked: MarkedTokens) -> Json:
    """Returns the usage as Anthropic counts.

    Of the tokens that the cache didn't have, those before a breakpoint are ``cache_creation_input_tokens``, by its
    time to live, and the others are ``input_tokens``.
    """
    read = usage.cached_tokens
    hour = max(0, marked.hour - read)
    minutes = max(0, marked.minutes - max(read, marked.hour))
    return {
        "input_tokens": usage.prompt_tokens - read - hour - minutes,
        "cache_creation_input_tokens": hour + minutes,
        "cache_creation": {"ephemeral_5m_input_tokens": minutes, "ephemeral_1h_input_tokens": hour},
        "cache_read_input_tokens": read,
        "output_tokens": usage.completion_tokens,
    }
