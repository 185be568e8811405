"""Reads replies by the Open Inference Protocol, and finds what is wrong with them.

Shares no code with the router's. A stream names neither choices nor usage, and one over REST no finish reason.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import orjson

from baton.drill.checks.text import AnswerText, TextReply, finishes
from baton.drill.scenario import Request
from baton.protos.json import Json
from baton.protos.v1 import open_inference_pb2 as pb

# Codes, as other surfaces have them, of statuses that are told without one.
CODES = {404: "model_not_found", 429: "quota_exceeded", 503: "unavailable"}
OVER_RATE = "per minute) is used up"
FINAL = "triton_final_response"


def read_tensors(request: Request, body: bytes) -> TextReply:
    """Returns what a reply over REST with status 200 held, streamed or not."""
    if request.over_http == "whole":
        told = {one["name"]: one["data"] for one in orjson.loads(body)["outputs"]}
        return _whole(
            told["text_output"], told["finish_reason"], told["num_input_tokens"], told["num_output_tokens"]
        )
    parts = [part for part in body.decode().split("\n\n") if part]
    events: list[Json] = [orjson.loads(part.removeprefix("data: ")) for part in parts]
    error = next((said_code(event["error"]) for event in events if "error" in event), "")
    text = "".join(event.get("text_output", "") for event in events)
    return TextReply({0: text}, {}, {}, None, error, bool(events))


def said_code(message: str) -> str:
    """Returns a code for an error of which a stream tells the words alone."""
    return CODES[429] if OVER_RATE in message else f"said: {message}"


def status_code(status: int, body: bytes) -> str:
    """Returns the code of an error over REST, which tells its words alone; "" for none."""
    assert status == 200 or "error" in orjson.loads(body), f"status {status} has no error in its body"
    return "" if status == 200 else CODES.get(status, f"status {status}")


def read_messages(request: Request, messages: Sequence[pb.ModelInferResponse], error: str) -> TextReply:
    """Returns what the messages of a gRPC call held, up to its ``error``."""
    told = [_tensors(message) for message in messages]
    if error or not told:
        return TextReply({}, {}, {}, None, error, False)
    if request.over_http == "whole":
        (one,) = told
        texts, reasons = _strings(one["text_output"]), _strings(one["finish_reason"])
        return _whole(texts, reasons, _numbers(one["num_input_tokens"]), _numbers(one["num_output_tokens"]))
    text = "".join(part for one in told for part in _strings(one["text_output"]))
    reasons = [reason for one in told for reason in _strings(one["finish_reason"]) if reason]
    last = [at for at, message in enumerate(messages) if message.parameters[FINAL].bool_param]
    return TextReply({0: text}, {}, {0: reasons}, None, "", last == [len(messages) - 1])


def wrong_tensors(request: Request, reply: TextReply, want: Sequence[AnswerText]) -> Iterator[str]:
    """Yields what is wrong with a reply that came to its end without an error."""
    for index, text in enumerate(want):
        if reply.texts.get(index) != text.text:
            yield f"choice {index}: the text is not the oracle's: {reply.texts.get(index)!r}, not {text.text!r}"
        tells_reason = request.over_grpc or request.over_http == "whole"
        if tells_reason and reply.finishes.get(index) not in finishes(request, text):
            yield f"choice {index}: finish reasons {reply.finishes.get(index)}, the oracle's is {text.finish}"
    if not reply.whole or len(reply.texts) != len(want):
        yield f"{len(reply.texts)} choices of {len(want)}, ended as a reply does: {reply.whole}"
    counts = {"prompt_tokens": len(request.prompt), "completion_tokens": sum(text.tokens for text in want)}
    if request.over_http == "whole" and reply.usage != counts:
        yield f"usage {reply.usage}, and there are {counts}"


def _whole(texts: Sequence[str], reasons: Sequence[str], read: Sequence[int], written: Sequence[int]) -> TextReply:
    usage = {"prompt_tokens": read[0], "completion_tokens": written[0]}
    return TextReply(dict(enumerate(texts)), {}, {at: [one] for at, one in enumerate(reasons)}, usage, "", True)


def _tensors(message: pb.ModelInferResponse) -> dict[str, bytes]:
    return dict(zip((one.name for one in message.outputs), message.raw_output_contents, strict=True))


def _strings(raw: bytes) -> list[str]:
    found, at = [], 0
    while at < len(raw):
        (size,) = struct.unpack_from("<I", raw, at)
        found.append(raw[at + 4 : at + 4 + size].decode())
        at += 4 + size
    return found


def _numbers(raw: bytes) -> list[int]:
    return [*struct.unpack(f"<{len(raw) // 4}I", raw)]
