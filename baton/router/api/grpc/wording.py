"""Wording of an answer's pieces as gRPC's choices: of a conversation, thoughts and calls apart from the text.

Knows nothing of calls or where the pieces come from.
"""

from __future__ import annotations

from baton.protos.convert import logprobs_to_pb
from baton.protos.json import Json
from baton.protos.v1 import inference_pb2 as pb
from baton.router.answer.stream import TextDelta
from baton.router.text.chat_reader import AnswerFormat, ChatReader, MessageDelta


class ChoiceWording:
    """Words the pieces of one call's choices, each in its order. ``form`` is None for an answer that is text
    alone.
    """

    def __init__(self, form: AnswerFormat | None, with_ids: bool) -> None:
        self._form, self._with_ids = form, with_ids
        self._readers: dict[int, ChatReader] = {}

    def choice(self, piece: TextDelta) -> pb.Choice:
        """Returns what ``piece`` adds to its choice, which is all of it where the whole answer is one piece."""
        text: Json = {"text": piece.text}
        reason = piece.finish_reason
        if self._form is not None:
            reader = self._readers.setdefault(piece.index, self._form.reader())
            text = _told(reader.push(piece.text) + (reader.flush() if reason else []))
            reason = reader.finish_reason(reason, piece.stop_string) if reason else ""
        return pb.Choice(
            index=piece.index,
            token_ids=piece.token_ids if self._with_ids else (),
            logprobs=[logprobs_to_pb(entry) for entry in piece.logprobs],
            finish_reason=reason,
            prompt_logprobs=[logprobs_to_pb(entry) for entry in piece.prompt_logprobs or ()],
            **text,
        )


def _told(deltas: list[MessageDelta]) -> Json:
    """Returns the deltas' text, thoughts and calls as fields of a choice; the parts of a call are joined."""
    calls: dict[int, pb.ToolCall] = {}
    for part in (part for delta in deltas for part in delta.get("tool_calls", ())):
        call = calls.setdefault(part["index"], pb.ToolCall(index=part["index"]))
        call.id += part.get("id", "")
        call.name += part["function"].get("name", "")
        call.arguments += part["function"]["arguments"]
    return {
        "text": "".join(delta.get("content", "") for delta in deltas),
        "reasoning": "".join(delta.get("reasoning_content", "") for delta in deltas),
        "tool_calls": list(calls.values()),
    }
