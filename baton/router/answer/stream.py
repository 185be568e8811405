"""Streams of answers: runs of token ids from dispatch become pieces of text per choice, cut at stop strings.

Knows nothing of REST or gRPC. Opening an answer opens every choice's stream; leaving its ``with`` block cancels all
of them, so a caller that is cancelled anywhere inside leaks nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from types import TracebackType

import msgspec

from baton.protos.errors import BatonError, ContextTooLong, ModelNotFound, Overloaded, RequestTooLarge
from baton.protos.nouns import TokenLogprobs, TokenRun
from baton.router.answer.generation import Generation
from baton.router.answer.metering import ChoiceMeter
from baton.router.answer.service import GenerationService
from baton.router.request.request import ChoiceStream, ChoiceSummary
from baton.router.text.detokenize import StopStrings
from baton.router.text.model import TextModel

QUEUED_PIECES = 64  # pieces of all choices that wait for the client at most
WINDOW = 64  # choices of one call that are with dispatch at once
# What dispatch refuses beside what may be tried again: nothing was computed.
REFUSALS = (ModelNotFound, ContextTooLong, RequestTooLarge)


class TextDelta(msgspec.Struct, frozen=True):
    """Holds one piece of one choice.

    ``text`` may lag behind ``token_ids``; ``logprobs`` is empty or has one entry per id. ``finish_reason`` is ""
    before the last piece. ``prompt_logprobs``, of the prompt's tokens from the second on, is on a choice's first
    piece where asked for. ``stop_string``: the stop string that ended the choice, "" if none did.
    """

    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str = ""
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    stop_string: str = ""


class Usage(msgspec.Struct, frozen=True):
    """Counts tokens of a call; ``cached_tokens`` are part of ``prompt_tokens``, ``accepted_drafts`` of
    ``completion_tokens``.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    accepted_drafts: int = 0
    rejected_drafts: int = 0


class ChoiceText:
    """Turns one choice's stream of token ids into pieces of text.

    ``index`` is unique within the call; ``prompt`` is the prompt's place.
    """

    def __init__(
        self,
        index: int,
        stream: ChoiceStream,
        generation: Generation,
        prompt: int,
        text: TextModel,
        meter: ChoiceMeter,
    ) -> None:
        options = generation.options
        self.index = index
        self.prompt = prompt
        self.stream = stream
        self.tokens = 0
        self.meter = meter
        context = generation.prompts[prompt] if options.continues else ()
        self._detokenizer = text.detokenizer(context, options.skip_special)
        self._stops = StopStrings(options.stops, options.include_stop)
        self._min_tokens = generation.samplings[prompt].min_tokens
        self._prompt_only = options.prompt_only
        self._stoppable = bool(options.stops)
        # Ids that end an answer within a grammar, which may say a moment later that one was the end.
        self._ends = frozenset(generation.entry.eos_token_ids if "grammar" in options.sampling else ())
        self._unsure: int | None = None  # such an id, the last one so far; no part of the text if it was the end
        self._scores: Callable[[], tuple[TokenLogprobs, ...]] | None = None

    def score_prompt(self, scores: Callable[[], tuple[TokenLogprobs, ...]]) -> None:
        """Makes the first piece carry the prompt's logprobs; ``scores`` is called for them when it is made."""
        self._scores = scores

    async def pieces(self) -> AsyncIterator[TextDelta]:
        """Yields pieces until the choice ends; after a stop string, cancels the rest of the token stream.

        Raises the BatonError that ended the stream.
        """
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

    def take(self, run: TokenRun) -> TextDelta:
        """Returns the piece that ``run`` makes; tokens after a stop string are dropped and not counted."""
        if self._prompt_only:
            return TextDelta(self.index, "", finish_reason=run.finish_reason)
        text, stopped = self._sure(run) if self._unsure is not None else ("", False)
        if stopped:
            return self._piece(run, 0, text, "stop")
        unshown = self._unshown(run)
        if not self._stoppable:
            return self._taken_whole(run, text, unshown)
        for taken, token_id in enumerate(run.token_ids, 1):
            released, stopped = self._push(token_id, ends=unshown and taken == len(run.token_ids))
            text += released
            if stopped:
                return self._piece(run, taken, text, "stop")
        if run.finish_reason:
            released, stopped = self._finish()
            return self._piece(run, len(run.token_ids), text + released, "stop" if stopped else run.finish_reason)
        return self._piece(run, len(run.token_ids), text, "")

    def _taken_whole(self, run: TokenRun, text: str, unshown: bool) -> TextDelta:
        """Returns ``text`` and a run's whole text, where no string can stop it."""
        self.tokens += len(run.token_ids)
        text += self._detokenizer.push_all(run.token_ids[:-1] if unshown else run.token_ids)
        if run.finish_reason:
            text += self._detokenizer.flush()
        return TextDelta(self.index, text, run.token_ids, run.logprobs, run.finish_reason)

    def _unshown(self, run: TokenRun) -> bool:
        """Returns whether the run's last id is no part of the text: it ended the choice, or may have done."""
        if run.finish_reason:
            return run.stop_token_id is not None
        if run.token_ids and run.token_ids[-1] in self._ends:
            self._unsure = run.token_ids[-1]
        return self._unsure is not None

    def _sure(self, run: TokenRun) -> tuple[str, bool]:
        """Returns the text of the id that may have ended the choice before ``run``, and whether it completes a stop
        string.
        """
        unsure, self._unsure = self._unsure, None
        assert unsure is not None
        if run.stop_token_id is not None and self._ends.issuperset(run.token_ids):
            return "", False  # also where another worker, which went on, chose the end anew
        return self._shown(unsure)

    def _scored(self, piece: TextDelta) -> TextDelta:
        if self._scores is None:
            return piece
        scores, self._scores = self._scores(), None
        return msgspec.structs.replace(piece, prompt_logprobs=scores)

    def _end(self, finish_reason: str) -> None:
        self.stream.summary.end(finish_reason)
        self.stream.cancel("stop_string")  # does nothing to a stream that ended by itself
        self.meter.ended(finish_reason)

    def _push(self, token_id: int, ends: bool) -> tuple[str, bool]:
        self.tokens += 1
        return ("", False) if ends else self._shown(token_id)

    def _shown(self, token_id: int) -> tuple[str, bool]:
        text = self._detokenizer.push(token_id)
        if self.tokens < self._min_tokens:  # too early for a stop string; what was held can't be part of one
            return self._stops.flush() + text, False
        return self._stops.push(text)

    def _finish(self) -> tuple[str, bool]:
        released, stopped = self._stops.push(self._detokenizer.flush())
        return released + self._stops.flush(), stopped

    def _piece(self, run: TokenRun, taken: int, text: str, finish_reason: str) -> TextDelta:
        ids, scores = run.token_ids[:taken], run.logprobs[:taken]
        return TextDelta(self.index, text, ids, scores, finish_reason, stop_string=self._stops.found)


class AnswerStream:
    """Iterates over the pieces of all choices of all prompts of one call; a choice's index is prompt x n + choice.

    ``choices`` are those opened so far. At most WINDOW choices are with dispatch at once: the next prompt is handed
    in as earlier choices end.
    """

    def __init__(self, generation: Generation, opening: PromptSubmitter) -> None:
        self.generation = generation
        self.choices = choices = opening.choices
        self._opening = opening
        self._feeders: list[asyncio.Task[None]] = []
        self._first: TextDelta | None = None
        self._pieces = choices[0].pieces() if self.count == 1 else self._merged()

    def __enter__(self) -> AnswerStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        gone = kind is None or not issubclass(kind, Exception)  # GeneratorExit and CancelledError: nobody listens
        self.close("client_gone" if gone else "failed")

    @property
    def count(self) -> int:
        """Returns the number of choices of the call: prompts x n."""
        return len(self.generation.prompts) * self.generation.options.n

    def close(self, reason: str) -> None:
        """Cancels every choice that goes on, with ``reason`` ("client_gone", "failed").

        Idempotent, doesn't wait.
        """
        for feeder in self._feeders:
            feeder.cancel()
        for choice in self.choices:
            choice.stream.cancel(reason)
            choice.meter.ended("cancelled")

    async def begun(self) -> None:
        """Waits for the first piece; raises an error that comes before it, while the whole call can still fail."""
        try:
            self._first = await anext(self._pieces)
        except BatonError as error:
            self._opening.give_back(error)
            raise

    async def __aiter__(self) -> AsyncIterator[TextDelta]:
        """Yields every piece, in each choice's order. Raises the first error of any choice."""
        if self._first is not None:
            first, self._first = self._first, None
            yield first
        try:
            async for piece in self._pieces:
                yield piece
        except BatonError as error:
            self._opening.give_back(error)
            raise

    @property
    def summaries(self) -> list[ChoiceSummary]:
        """Returns one summary per choice opened so far; each is complete once its choice has ended."""
        return [choice.stream.summary for choice in self.choices]

    def usage(self) -> Usage:
        """Returns the tokens counted so far.

        Of a prompt's choices only the first counts its cached tokens, because the others find what the first
        computed.
        """
        firsts = [choice for choice in self.choices if choice.index % self.generation.options.n == 0]
        completion_tokens = sum(choice.tokens for choice in self.choices)
        return Usage(
            prompt_tokens=self.generation.prompt_tokens,
            completion_tokens=completion_tokens,
            cached_tokens=sum(choice.stream.summary.cached_tokens for choice in firsts),
            accepted_drafts=min(completion_tokens, sum(one.accepted_drafts for one in self.summaries)),
            rejected_drafts=sum(one.rejected_drafts for one in self.summaries),
        )

    async def _merged(self) -> AsyncIterator[TextDelta]:
        queue: asyncio.Queue[TextDelta | Exception | None] = asyncio.Queue(QUEUED_PIECES)
        ended = 0
        while ended < self.count:
            self._open_more(queue, ended)
            found = await queue.get()
            if isinstance(found, Exception):
                raise found
            if found is None:
                ended += 1
            else:
                yield found

    def _open_more(self, queue: asyncio.Queue[TextDelta | Exception | None], ended: int) -> None:
        """Hand in prompts while there is room in the window; who finds the queue full waits for one of its own."""
        while self._opening.left and len(self.choices) - ended + self.generation.options.n <= WINDOW:
            try:
                self._opening.open_next()
            except Overloaded:
                if ended == len(self.choices):
                    raise
                break
        for choice in self.choices[len(self._feeders) :]:
            self._feeders.append(asyncio.create_task(_feed(choice, queue)))


async def _feed(choice: ChoiceText, queue: asyncio.Queue[TextDelta | Exception | None]) -> None:
    try:
        async for piece in choice.pieces():
            await queue.put(piece)
    except Exception as error:
        await queue.put(error)
    else:
        await queue.put(None)


def _scores_of(stream: ChoiceStream) -> tuple[TokenLogprobs, ...]:
    return stream.summary.prompt_logprobs


class PromptSubmitter:
    """Hands a call's prompts to dispatch, one after the other; ``choices`` are those of the prompts handed in."""

    def __init__(self, service: GenerationService, generation: Generation, text: TextModel) -> None:
        self._service, self._generation, self._text = service, generation, text
        self._requests = generation.requests()
        self._prompt = 0
        self.choices: list[ChoiceText] = []

    @property
    def left(self) -> int:
        """Returns the number of prompts that are not handed in yet."""
        return len(self._generation.prompts) - self._prompt

    def open_next(self) -> None:
        """Hands the next prompt to dispatch and adds its choices.

        Raises what dispatch raises (Overloaded, …), with nothing of this prompt left open.
        """
        generation, prompt = self._generation, self._prompt
        streams = self._service.serving.open(self._requests[prompt])
        try:
            meters = self._service.metering.meters(generation, streams, prompt)
            self.choices += [self._choice(prompt, *pair) for pair in zip(streams, meters, strict=True)]
        except BaseException:
            for stream in streams:
                stream.cancel("failed")
            raise
        self._prompt += 1
        if generation.samplings[prompt].prompt_logprobs is not None:
            for choice in self.choices[-len(streams) :]:
                choice.score_prompt(partial(_scores_of, streams[0]))

    def _choice(self, prompt: int, stream: ChoiceStream, meter: ChoiceMeter) -> ChoiceText:
        index = prompt * self._generation.options.n + stream.choice
        return ChoiceText(index, stream, self._generation, prompt, self._text, meter)

    def refused(self, error: BatonError) -> None:
        """Counts in the metrics that the next prompt was refused with ``error``."""
        self._service.metering.refused(self._generation, self._prompt, error)

    def give_back(self, error: BatonError) -> None:
        """Refunds to the caller's key the choices without a token, and the prompts of which none has one, if
        ``error`` ended the call because no worker could take it.
        """
        if not error.retryable and not isinstance(error, REFUSALS):
            return
        prompts, n = self._generation.prompts, self._generation.options.n
        begun = [choice.prompt for choice in self.choices if choice.stream.emitted]
        tokens = sum(len(ids) for prompt, ids in enumerate(prompts) if prompt not in begun)
        self._service.quotas.refund(self._generation, len(prompts) * n - len(begun), tokens)


def open_answer(service: GenerationService, generation: Generation, text: TextModel) -> AnswerStream:
    """Hands the prompts that fit WINDOW to dispatch and returns the stream of all pieces.

    Raises what dispatch raises (Overloaded, …), with nothing left open.
    """
    opening = PromptSubmitter(service, generation, text)
    try:
        while opening.left and (not opening.choices or len(opening.choices) + generation.options.n <= WINDOW):
            opening.open_next()
    except BaseException as error:
        for choice in opening.choices:
            choice.stream.cancel("failed")
        if isinstance(error, BatonError):
            opening.refused(error)
            opening.give_back(error)
        raise
    return AnswerStream(generation, opening)
