"""An answer under way: runs of ids from dispatch -> pieces of text per choice, stop strings obeyed.

Knows nothing of REST or gRPC. Opening it opens every choice's stream; leaving its ``with`` block gives all of
them back, so a caller that is cancelled anywhere inside leaks nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from types import TracebackType

import msgspec

from baton.protos.errors import BatonError
from baton.protos.nouns import TokenLogprobs, TokenRun
from baton.router.detokenize import StopStrings
from baton.router.generation import Frontend, Generation
from baton.router.metering import Meter, Unmetered
from baton.router.request import ChoiceStream, Summary
from baton.router.text import TextModel

QUEUED_PIECES = 64


class Piece(msgspec.Struct, frozen=True):
    """What one choice gained. ``text`` may lag behind ``token_ids``; ``logprobs`` is empty or one per id.

    ``prompt_logprobs``, of the prompt's tokens from the second on, is on a choice's first piece where asked for.
    """

    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str = ""
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None


class Usage(msgspec.Struct, frozen=True):
    """Tokens counted; ``cached_tokens`` are among the prompt's."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class Choice:
    """One choice's text, from its stream of ids."""

    def __init__(
        self,
        index: int,
        stream: ChoiceStream,
        generation: Generation,
        prompt: int,
        text: TextModel,
        meter: Meter | Unmetered,
    ) -> None:
        ask = generation.ask
        self.index = index
        self.prompt = prompt
        self.stream = stream
        self.tokens = 0
        self.meter = meter
        context = generation.prompts[prompt] if ask.continues else ()
        self._detokenizer = text.detokenizer(context, ask.skip_special)
        self._stops = StopStrings(ask.stops, ask.include_stop)
        self._min_tokens = generation.samplings[prompt].min_tokens
        self._prompt_only = ask.prompt_only
        self._stoppable = bool(ask.stops)
        self._scores: Callable[[], tuple[TokenLogprobs, ...]] | None = None

    def score_prompt(self, scores: Callable[[], tuple[TokenLogprobs, ...]]) -> None:
        """The first piece is to carry the prompt's logprobs, which ``scores`` gives by then."""
        self._scores = scores

    async def pieces(self) -> AsyncIterator[Piece]:
        """Until the choice ends; a stop string cancels what its stream would still bring."""
        try:
            async for run in self.stream:
                piece = self._scored(self.take(run))
                self.meter.took(len(piece.token_ids))
                if piece.finish_reason:
                    self._end(piece.finish_reason)
                yield piece
                if piece.finish_reason:
                    return
        except BatonError as error:
            self.meter.ended(error.label)
            raise

    def take(self, run: TokenRun) -> Piece:
        """The piece that ``run`` makes; tokens after a stop string are dropped, as if they had never come."""
        if self._prompt_only:
            return Piece(self.index, "", finish_reason=run.finish_reason)
        if not self._stoppable:
            return self._taken_whole(run)
        text = ""
        for taken, token_id in enumerate(run.token_ids, 1):
            is_last = bool(run.finish_reason) and taken == len(run.token_ids)
            released, stopped = self._push(token_id, ends=is_last and run.stop_token_id is not None)
            text += released
            if stopped:
                return self._piece(run, taken, text, "stop")
        if run.finish_reason:
            released, stopped = self._finish()
            return self._piece(run, len(run.token_ids), text + released, "stop" if stopped else run.finish_reason)
        return self._piece(run, len(run.token_ids), text, "")

    def _taken_whole(self, run: TokenRun) -> Piece:
        """Where no string can stop it. The id that ended the choice is no part of its text."""
        self.tokens += len(run.token_ids)
        shown = run.token_ids[:-1] if run.finish_reason and run.stop_token_id is not None else run.token_ids
        text = self._detokenizer.push_all(shown)
        if run.finish_reason:
            text += self._detokenizer.flush()
        return Piece(self.index, text, run.token_ids, run.logprobs, run.finish_reason)

    def _scored(self, piece: Piece) -> Piece:
        if self._scores is None:
            return piece
        scores, self._scores = self._scores(), None
        return msgspec.structs.replace(piece, prompt_logprobs=scores)

    def _end(self, finish_reason: str) -> None:
        self.stream.summary.finish_reason = finish_reason
        self.stream.cancel("stop_string")  # does nothing to a stream that ended by itself
        self.meter.ended(finish_reason)

    def _push(self, token_id: int, ends: bool) -> tuple[str, bool]:
        self.tokens += 1
        if ends:  # the id that ended the choice is no part of its text
            return "", False
        text = self._detokenizer.push(token_id)
        if self.tokens < self._min_tokens:  # too early for a stop string; what was held can't be part of one
            return self._stops.flush() + text, False
        return self._stops.push(text)

    def _finish(self) -> tuple[str, bool]:
        released, stopped = self._stops.push(self._detokenizer.flush())
        return released + self._stops.flush(), stopped

    def _piece(self, run: TokenRun, taken: int, text: str, finish_reason: str) -> Piece:
        return Piece(self.index, text, run.token_ids[:taken], run.logprobs[:taken], finish_reason)


class Answer:
    """All choices of all prompts of one call, as one stream of pieces. Index = prompt x n + choice."""

    def __init__(self, generation: Generation, choices: list[Choice]) -> None:
        self.generation = generation
        self.choices = choices
        self._feeders: list[asyncio.Task[None]] = []
        self._first: Piece | None = None
        self._pieces = choices[0].pieces() if len(choices) == 1 else self._merged()

    def __enter__(self) -> Answer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        gone = kind is None or not issubclass(kind, Exception)  # GeneratorExit and CancelledError: nobody listens
        self.close("client_gone" if gone else "failed")

    def close(self, reason: str) -> None:
        """Give back every choice that goes on. Idempotent, at once."""
        for feeder in self._feeders:
            feeder.cancel()
        for choice in self.choices:
            choice.stream.cancel(reason)
            choice.meter.ended("cancelled")

    async def begun(self) -> None:
        """Returns when the first piece is there, so that an error before it is still an error of the whole call."""
        self._first = await anext(self._pieces)

    async def __aiter__(self) -> AsyncIterator[Piece]:
        """Every piece, in each choice's order. Raises the first error of any choice."""
        if self._first is not None:
            first, self._first = self._first, None
            yield first
        async for piece in self._pieces:
            yield piece

    @property
    def summaries(self) -> list[Summary]:
        """One per choice; complete when the answer is."""
        return [choice.stream.summary for choice in self.choices]

    def usage(self) -> Usage:
        """Counted so far. A prompt's cached tokens are its first choice's: the others find what that one left."""
        firsts = [choice for choice in self.choices if choice.index % self.generation.ask.n == 0]
        return Usage(
            prompt_tokens=self.generation.prompt_tokens,
            completion_tokens=sum(choice.tokens for choice in self.choices),
            cached_tokens=sum(choice.stream.summary.cached_tokens for choice in firsts),
        )

    async def _merged(self) -> AsyncIterator[Piece]:
        queue: asyncio.Queue[Piece | Exception | None] = asyncio.Queue(QUEUED_PIECES)
        self._feeders = [asyncio.create_task(_feed(choice, queue)) for choice in self.choices]
        left = len(self._feeders)
        while left:
            found = await queue.get()
            if isinstance(found, Exception):
                raise found
            if found is None:
                left -= 1
            else:
                yield found


async def _feed(choice: Choice, queue: asyncio.Queue[Piece | Exception | None]) -> None:
    try:
        async for piece in choice.pieces():
            await queue.put(piece)
    except Exception as error:
        await queue.put(error)
    else:
        await queue.put(None)


def _scores_of(stream: ChoiceStream) -> tuple[TokenLogprobs, ...]:
    return stream.summary.prompt_logprobs


def open_answer(frontend: Frontend, generation: Generation, text: TextModel) -> Answer:
    """Hand every prompt to dispatch. Raises what it raises (Overloaded, …), with nothing left open."""
    choices: list[Choice] = []
    streams: list[ChoiceStream] = []
    prompt = 0
    try:
        for prompt, request in enumerate(generation.requests()):
            streams += (opened := frontend.serving.open(request))
            for stream in opened:
                meter = frontend.meter(generation, stream, prompt)
                choices.append(Choice(len(choices), stream, generation, prompt, text, meter))
                if generation.samplings[prompt].prompt_logprobs is not None:
                    choices[-1].score_prompt(partial(_scores_of, choices[prompt * generation.ask.n].stream))
    except BaseException as error:
        for stream in streams:
            stream.cancel("failed")
        if isinstance(error, BatonError):
            context_class = frontend.class_of(len(generation.prompts[prompt]))
            frontend.metrics.requests.labels(generation.entry.model_id, context_class, error.label).inc()
        raise
    return Answer(generation, choices)
