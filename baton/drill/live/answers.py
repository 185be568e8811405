"""Asks a live server for one completion, whole or as a stream, and lists every protocol violation in its answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable

import msgspec

from baton.drill.live.http import BROKEN, Http, Unreachable
from baton.protos.json import Json

DONE = "[DONE]"


class Question(msgspec.Struct, frozen=True):
    """One completion to ask for. ``needle`` is a word that occurs in this question's prompt only."""

    prompt: str
    max_tokens: int
    needle: str = ""
    n: int = 1  # choices
    seed: int = 0  # of the sampling


class Answer(msgspec.Struct):
    """A server's answer to one question: its texts by choice, or why there are none."""

    texts: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()  # violations that no server may commit
    failed: str = ""  # a status other than 200, or how the connection broke; "" if neither
    cut: str = ""  # why a stream ended before its time: an error in it, or its connection broke; "" if neither
    tokens: int | None = None  # completion tokens by the server's usage; None if it gives none

    @property
    def whole(self) -> bool:
        """Returns whether the answer came without failure and without violations."""
        return not (self.wrong or self.failed or self.cut)


class Asker:
    """Asks a server's /v1/completions for greedy answers, and allows each ``limit_s`` seconds."""

    def __init__(self, http: Http, model: str, limit_s: float) -> None:
        self._http, self._model, self._limit_s = http, model, limit_s

    async def whole(self, question: Question) -> Answer:
        """Returns the answer to ``question`` asked without streaming."""
        return await self._within(self._whole(question))

    async def streamed(self, question: Question) -> Answer:
        """Returns the answer to ``question`` asked as a stream, with the violations found among its events."""
        return await self._within(self._streamed(question))

    async def leave(self, question: Question, events: int) -> Answer:
        """Asks ``question`` as a stream and closes the connection after ``events`` events."""
        return await self._within(self._left(question, events))

    async def _within(self, asking: Awaitable[Answer]) -> Answer:
        try:
            async with asyncio.timeout(self._limit_s):
                answer = await asking
        except TimeoutError:
            return Answer(wrong=(f"no end within {self._limit_s:g} s",))
        except Unreachable as error:
            return Answer(failed=str(error))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            return Answer(wrong=(f"what came is not of the API's shape: {error!r}",))
        return answer

    def _body(self, question: Question, stream: bool) -> Json:
        body = {
            "model": self._model, "prompt": question.prompt, "max_tokens": question.max_tokens, "n": question.n,
            "temperature": 0.0, "seed": question.seed, "stream": stream,
        }  # fmt: skip
        return body | ({"stream_options": {"include_usage": True}} if stream else {})

    async def _whole(self, question: Question) -> Answer:
        reply = await self._http.ask("/v1/completions", self._body(question, False))
        if reply.status != 200:
            return Answer(failed=f"status {reply.status}: {json.dumps(reply.body)[:200]}")
        choices = sorted(reply.body.get("choices") or [], key=lambda choice: choice.get("index", 0))
        wrong = [f"{len(choices)} choices of {question.n}"] if len(choices) != question.n else []
        wrong += [f"choice {at} has no finish reason" for at, c in enumerate(choices) if not c.get("finish_reason")]
        tokens, more = _usage(reply.body.get("usage"), question)
        return Answer(tuple(str(c.get("text", "")) for c in choices), (*wrong, *more), tokens=tokens)

    async def _left(self, question: Question, events: int) -> Answer:
        async with self._http.events("/v1/completions", self._body(question, True)) as (status, data):
            if status != 200:
                return Answer(failed=f"status {status}")
            try:
                async for _ in data:
                    events -= 1
                    if events <= 0:
                        break
            except BROKEN as error:
                return Answer(cut=f"the connection breaks in the middle of a stream: {error!r}")
        return Answer()

    async def _streamed(self, question: Question) -> Answer:
        stream = _Stream(question)
        async with self._http.events("/v1/completions", self._body(question, True)) as (status, data):
            if status != 200:
                return Answer(failed=f"status {status}")
            try:
                async for event in data:
                    stream.take(event)
            except BROKEN as error:
                stream.cut(f"the connection breaks in the middle of a stream: {error!r}")
        return stream.answer()


class _Stream:
    """Reads the events of one stream."""

    def __init__(self, question: Question) -> None:
        self._question = question
        self._texts = [""] * question.n
        self._reasons: list[list[str]] = [[] for _ in range(question.n)]
        self._wrong: list[str] = []
        self._cut = ""
        self._usage: Json | None = None
        self._done = False

    def cut(self, why: str) -> None:
        """Marks the stream as ended before its time."""
        self._cut = self._cut or why

    def take(self, event: str) -> None:
        """Processes the data of one server-sent event."""
        if self._done:
            self._wrong.append("an event follows the stream's end")
        if event == DONE:
            self._done = True
            return
        try:
            chunk = json.loads(event)
        except ValueError:
            self._wrong.append(f"an event is no JSON: {event[:80]!r}")
            return
        if chunk.get("error"):
            self.cut(f"the stream ends in an error: {json.dumps(chunk['error'])[:160]}")
        self._usage = chunk.get("usage") or self._usage
        for choice in chunk.get("choices") or []:
            self._choice(choice)

    def _choice(self, choice: Json) -> None:
        at, text = choice.get("index", 0), choice.get("text") or ""
        if not 0 <= at < self._question.n:
            self._wrong.append(f"a choice of index {at}")
            return
        if self._reasons[at] and text:
            self._wrong.append(f"choice {at} goes on after its finish reason")
        self._texts[at] += text
        if choice.get("finish_reason"):
            self._reasons[at].append(choice["finish_reason"])

    def answer(self) -> Answer:
        """Returns the stream's answer; call it once the stream has ended. Of one that was cut the end is not
        judged.
        """
        wrong, reasons = list(self._wrong), [len(r) for r in self._reasons]
        if self._cut:
            wrong += [f"choice {at} has {count} finish reasons" for at, count in enumerate(reasons) if count > 1]
            return Answer(tuple(self._texts), tuple(wrong), cut=self._cut)
        if not self._done:
            wrong.append("the stream ends without [DONE]")
        wrong += [f"choice {at} has {count} finish reasons" for at, count in enumerate(reasons) if count != 1]
        tokens, more = _usage(self._usage, self._question)
        return Answer(tuple(self._texts), (*wrong, *more), tokens=tokens)


def _usage(usage: object, question: Question) -> tuple[int | None, list[str]]:
    """Returns the completion tokens that the server's ``usage`` counts (None if absent), and what is impossible in
    it.
    """
    if not isinstance(usage, dict) or "completion_tokens" not in usage:
        return None, []
    tokens, wrong = int(usage["completion_tokens"]), []
    if not 0 <= tokens <= question.max_tokens * question.n:
        wrong.append(f"usage says {tokens} tokens of {question.max_tokens * question.n} at most")
    if "total_tokens" in usage and usage["total_tokens"] != usage.get("prompt_tokens", 0) + tokens:
        wrong.append("usage's total is not the sum of its parts")
    return tokens, wrong
