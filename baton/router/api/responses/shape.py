"""Conversion of an answer's pieces to the objects and events of OpenAI's Responses API.

Knows nothing of HTTP or of where the pieces come from.
https://platform.openai.com/docs/api-reference/responses-streaming
"""

from __future__ import annotations

from collections.abc import Iterator

from baton.protos.json import Json
from baton.router.answer.generation import Generation
from baton.router.answer.stream import TextDelta, Usage
from baton.router.api.openai.shapes import logprob_json
from baton.router.api.responses.schemas import ResponsesBody
from baton.router.text.chat_reader import AnswerFormat, MessageDelta
from baton.router.text.token_spans import TokenSpans
from baton.router.text.tokenizer import Tokenizer

CACHE_WRITES = 0  # tokens whose writing is told as written to the cache, because nothing is charged for it here
DONE = {"message": "response.output_text", "reasoning": "response.reasoning_text"}


class ResponsesShape:
    """Words one answer as output items, in the order in which the model begins them: reasoning, message, function
    calls.
    """

    always_closes = True
    recounts = True  # the thoughts

    def __init__(
        self, generation: Generation, tokenizer: Tokenizer, created: int, body: ResponsesBody, form: AnswerFormat
    ) -> None:
        self._id, self._model, self._created = generation.request_id, generation.entry.name, created
        self._max_tokens = generation.samplings[0].max_tokens
        self._tokenizer, self._body, self._reader = tokenizer, body, form.reader()
        self._skip_special = generation.options.skip_special
        undivided = form.tools is None and form.reasoning is None
        self._spans = TokenSpans(self._bytes, form.marks, undivided)
        self._items: list[Json] = []
        self._open: Json | None = None
        self._sequence = -1
        self._reason = ""

    def opening(self) -> Iterator[Json]:
        """Yields the events response.created and response.in_progress."""
        yield self.event("response.created", response=self._response("in_progress", None))
        yield self.event("response.in_progress", response=self._response("in_progress", None))

    def chunks(self, piece: TextDelta) -> Iterator[Json]:
        """Yields the events for what ``piece`` adds to output items; the last piece also ends the open item."""
        self._spans.add(piece.text, piece.logprobs)
        for delta in self._reader.push(piece.text):
            yield from self._take(delta)
        if piece.finish_reason:
            self._reason = piece.finish_reason
            for delta in self._reader.flush():
                yield from self._take(delta)
            yield from self._close()

    def closing(self, usage: Usage) -> Json:
        """Returns the last event, response.completed or response.incomplete, with the whole response."""
        status = self._status
        return self.event(f"response.{status}", response=self._response(status, usage))

    def whole(self, pieces: list[TextDelta], usage: Usage) -> Json:
        """Returns the unstreamed response object."""
        for _ in self.chunks(pieces[0]):
            pass
        return self._response(self._status, usage)

    # ---- items ---------------------------------------------------------------------------------------

    def _take(self, delta: MessageDelta) -> Iterator[Json]:
        if "content" in delta:
            yield from self._write("message", delta["content"])
        if "reasoning_content" in delta:
            yield from self._write("reasoning", delta["reasoning_content"])
        for call in delta.get("tool_calls", ()):
            yield from self._call(call)

    def _write(self, kind: str, text: str) -> Iterator[Json]:
        if self._open is None or self._open["type"] != kind:
            yield from self._begin_text(kind)
        assert self._open is not None
        part, scores = self._open["content"][0], self._spans.take(text)
        part["text"] += text
        told: Json = {}
        if kind == "message":
            told = {"logprobs": [logprob_json(one, self._tokenizer, self._skip_special) for one in scores]}
            part["logprobs"] += told["logprobs"]  # in place: a copy for each token would be quadratic
        yield self._of_item(f"{DONE[kind]}.delta", content_index=0, delta=text, **told)

    def _begin_text(self, kind: str) -> Iterator[Json]:
        role: Json = {"role": "assistant"} if kind == "message" else {"summary": []}
        yield from self._begin({"type": kind, **role, "content": []}, "msg" if kind == "message" else "rs")
        assert self._open is not None
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._open["content"].append(part if kind == "message" else {"type": "reasoning_text", "text": ""})
        added = {name: [] if name == "logprobs" else value for name, value in self._open["content"][0].items()}
        yield self._of_item("response.content_part.added", content_index=0, part=added)

    def _call(self, call: Json) -> Iterator[Json]:
        if "id" in call:
            item = {
                "type": "function_call",
                "call_id": call["id"],
                "name": call["function"]["name"],
                "arguments": "",
            }
            yield from self._begin(item, "fc")
            return
        assert self._open is not None
        self._open["arguments"] += call["function"]["arguments"]
        yield self._of_item("response.function_call_arguments.delta", delta=call["function"]["arguments"])

    def _begin(self, item: Json, prefix: str) -> Iterator[Json]:
        yield from self._close()
        self._open = {"id": f"{prefix}_{self._id}{len(self._items)}", "status": "in_progress", **item}
        self._items.append(self._open)
        added = self._open | ({"content": []} if "content" in self._open else {})
        yield self.event("response.output_item.added", output_index=len(self._items) - 1, item=added)

    def _close(self) -> Iterator[Json]:
        """End the item that is open."""
        item = self._open
        if item is None:
            return
        if item["type"] == "function_call":
            yield self._of_item(
                "response.function_call_arguments.done", name=item["name"], arguments=item["arguments"]
            )
        else:
            part = item["content"][0]
            told = {"logprobs": part["logprobs"]} if item["type"] == "message" else {}
            yield self._of_item(f"{DONE[item['type']]}.done", content_index=0, text=part["text"], **told)
            yield self._of_item("response.content_part.done", content_index=0, part=dict(part))
        item["status"] = "incomplete" if self._reason == "length" else "completed"
        yield self.event("response.output_item.done", output_index=len(self._items) - 1, item=dict(item))
        self._open = None

    # ---- objects -------------------------------------------------------------------------------------

    @property
    def _status(self) -> str:
        return "incomplete" if self._reason == "length" else "completed"

    def _bytes(self, token_id: int) -> bytes:
        return self._tokenizer.token_bytes(token_id, self._skip_special)

    def event(self, kind: str, **fields: object) -> Json:
        """Returns the next event of the stream, by its number."""
        self._sequence += 1
        return {"type": kind, "sequence_number": self._sequence, **fields}

    def _of_item(self, kind: str, **fields: object) -> Json:
        assert self._open is not None
        return self.event(kind, item_id=self._open["id"], output_index=len(self._items) - 1, **fields)

    def _response(self, status: str, usage: Usage | None) -> Json:
        body = self._body
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": f"resp_{self._id}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": cut,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self._model,
            "output": [dict(item) for item in self._items],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "store": False,
            "temperature": body.temperature,
            "text": _format(body),
            "tool_choice": body.model_dump(include={"tool_choice"})["tool_choice"] or "auto",
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs,
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else self._usage(usage),
            "metadata": body.metadata or {},
        }

    def _usage(self, usage: Usage) -> Json:
        thoughts = [item["content"][0]["text"] for item in self._items if item["type"] == "reasoning"]
        thought = sum(len(self._tokenizer.encode(text, add_special_tokens=False)) for text in thoughts)
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": CACHE_WRITES},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": min(thought, usage.completion_tokens)},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }


def _format(body: ResponsesBody) -> Json:
    asked = body.text.format if body.text else None
    return {"format": {"type": "text"} if asked is None else asked.model_dump(by_alias=True, exclude_none=True)}
