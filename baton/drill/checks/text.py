"""The text that a request over HTTP must give, and what is wrong with a reply. Shares no code with the router's."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import orjson

from baton.drill.language import oracle
from baton.drill.language.oracle import EOS
from baton.drill.language.vocabulary import bytes_of
from baton.drill.scenario import Request
from baton.protos.json import Json

DONE = "[DONE]"
CLOSE = 1e-5  # of numbers of a vector, by which sums in another order differ


class AnswerText(NamedTuple):
    """The text of one choice, the number of its tokens that count, and its finish reason."""

    text: str
    tokens: int
    finish: str


class TextReply(NamedTuple):
    """Holds what came of a reply.

    ``texts``, ``scored`` (tokens with log-probabilities), ``finishes`` and ``prompts`` (``prompt_logprobs`` as vLLM
    writes them) are by choice; ``error`` is its code, and ``whole`` says whether the reply ended as one does.
    """

    texts: Mapping[int, str]
    scored: Mapping[int, int]
    finishes: Mapping[int, list[str]]
    usage: Json | None
    error: str
    whole: bool
    prompts: Mapping[int, Sequence[Json | None]] = {}


def text_of(request: Request, tokens: Sequence[int], finish: str) -> AnswerText:
    """Returns what the oracle's ``tokens`` of one choice, which end by ``finish``, read as, up to a stop string."""
    own = request.sampling
    ends = set(own.stop_token_ids) | (set() if own.ignore_eos else {EOS})
    utf8, text = codecs.getincrementaldecoder("utf-8")("replace"), ""
    for count, token in enumerate(tokens, 1):
        last = count == len(tokens)
        hidden = last and finish == "stop" and token in ends and count > own.min_tokens
        text += "" if hidden else utf8.decode(_bytes(token))
        text += utf8.decode(b"", final=True) if last else ""
        found = [at for stop in request.stops if (at := text.find(stop)) >= 0]
        if found:
            return AnswerText(text[: min(found)], count, "stop")
    return AnswerText(text, len(tokens), finish)


def read(request: Request, body: bytes) -> TextReply:
    """Returns what a reply with status 200 held, streamed or not."""
    if request.over_http == "whole":
        whole = orjson.loads(body)
        return _read([whole], whole.get("usage"), True)
    lines = [line.removeprefix("data: ") for line in body.decode().split("\n\n") if line]
    events = [orjson.loads(line) for line in lines if line != DONE]
    usage = next((event["usage"] for event in events if event.get("usage")), None)
    return _read(events, usage, lines[-1:] == [DONE] and lines.count(DONE) == 1)


def _read(events: Sequence[Json], usage: Json | None, whole: bool) -> TextReply:
    texts: dict[int, str] = {}
    scored: dict[int, int] = {}
    finishes: dict[int, list[str]] = {}
    prompts: dict[int, Sequence[Json | None]] = {}
    for choice in (choice for event in events for choice in event.get("choices", ())):
        index, scores = choice["index"], choice["logprobs"]
        texts[index] = texts.get(index, "") + choice["text"]
        scored[index] = scored.get(index, 0) + (len(scores["tokens"]) if scores else 0)
        finishes.setdefault(index, []).extend([choice["finish_reason"]] if choice["finish_reason"] else [])
        if "prompt_logprobs" in choice:
            prompts[index] = choice["prompt_logprobs"]
    error = next((event["error"]["code"] for event in events if "error" in event), "")
    return TextReply(texts, scored, finishes, usage, error, whole, prompts)


def wrong(request: Request, reply: TextReply, want: Sequence[AnswerText]) -> Iterator[str]:
    """Yields what is wrong with a reply that came to its end without an error."""
    for index, text in enumerate(want):
        if reply.texts.get(index) != text.text:
            yield f"choice {index}: the text is not the oracle's: {reply.texts.get(index)!r}, not {text.text!r}"
        if reply.finishes.get(index) not in finishes(request, text):
            yield f"choice {index}: finish reasons {reply.finishes.get(index)}, the oracle's is {text.finish}"
        if request.sampling.logprobs is not None and reply.scored.get(index) != text.tokens:
            yield f"choice {index}: {reply.scored.get(index)} log-probabilities of {text.tokens} tokens"
    if not reply.whole or len(reply.texts) != len(want):
        yield f"{len(reply.texts)} choices of {len(want)}, ended as a reply does: {reply.whole}"
    yield from _prompt_wrong(request, reply)
    usage, written = reply.usage or {}, sum(text.tokens for text in want)
    if (usage.get("prompt_tokens"), usage.get("completion_tokens")) != (len(request.prompt), written):
        yield f"usage {usage}, and there are {len(request.prompt)} + {written} tokens"


def finishes(request: Request, text: AnswerText) -> Sequence[list[str]]:
    """Returns the finish reasons that a choice may have: the oracle's, or "length" where a grammar is complete at
    the last token that was allowed, because its word may come later.
    """
    at_once = request.sampling.grammar is not None and text.tokens == request.sampling.max_tokens
    return [[text.finish], ["length"]] if at_once else [[text.finish]]


def _prompt_wrong(request: Request, reply: TextReply) -> Iterator[str]:
    """Yields what is wrong with a prompt's log-probabilities: every choice tells them, if they were asked for."""
    top = request.sampling.prompt_logprobs
    told = sorted(reply.prompts)
    none = request.over_grpc and len(request.prompt) == 1  # a first token has none, and an empty list isn't told
    if told != ([] if top is None or none else list(range(request.n))):
        yield f"choices {told} of {request.n} have log-probabilities of the prompt, and {top} were asked for"
    want = oracle.scored(request.prompt, top or 0)
    for index, scores in reply.prompts.items():
        found = [
            None if one is None else {int(token): entry["logprob"] for token, entry in one.items()}
            for one in scores
        ]
        if len(found) != len(want) or not all(map(_alike, found, want)):
            yield f"choice {index}: the prompt's log-probabilities are not the oracle's"


def _alike(found: Mapping[int, float] | None, want: Mapping[int, float] | None) -> bool:
    if found is None or want is None:
        return found is want
    return found.keys() == want.keys() and all(abs(found[token] - want[token]) < CLOSE for token in want)


def vector_wrong(request: Request, body: bytes, adapter: str) -> Iterator[str]:
    """Yields what is wrong with the reply to an embedding's request, which is the oracle's at length 1."""
    reply = orjson.loads(body)
    want = np.frombuffer(oracle.pooled(request.prompt, request.sampling.pooling, adapter), "<f4")
    want = want / max(float(np.linalg.norm(want)), CLOSE)
    found = [np.asarray(one["embedding"], "<f4") for one in reply["data"]]
    if len(found) != 1 or found[0].shape != want.shape or not np.allclose(found[0], want, atol=CLOSE):
        yield f"the embedding is not the oracle's: {len(found)} of them"
    if reply["usage"] != {"prompt_tokens": len(request.prompt), "total_tokens": len(request.prompt)}:
        yield f"usage {reply['usage']}, and there are {len(request.prompt)} tokens"


def _bytes(token: int) -> bytes:
    return b"" if token == EOS else bytes_of(token)  # the end is a special one
