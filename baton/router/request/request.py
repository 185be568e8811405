"""The request that API surfaces hand to dispatch, and the stream that they get back for each choice.

Knows nothing of workers, policies, text or HTTP: ids in, runs of ids out.

open ──push──> [waiting runs] ──async for──> surface; ``emitted`` has every id once; cancel(reason) is the surface's
only way back.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from baton.protos.errors import BatonError, Cancelled
from baton.protos.nouns import Sampling, Station, TokenLogprobs, TokenRun
from baton.router.request.context import RequestContext
from baton.router.request.weights import WeightsPin

QUICK_S = 0.0025  # runs that follow one another sooner share a write; workers space their frames by twice as much
LATE_S = 0.003  # a reader that wakes this long after its run came: the event loop is behind
MOST_JOINED = 256  # tokens of a run for a reader that is behind, about: with 20 logprobs each, 8 ms to word
HOLD_TIMES, HOLD_MOST_S = 4, 0.025  # behind, a run is held that often the delay, so that others join it


class RouterRequest(msgspec.Struct, frozen=True):
    """Describes one validated prompt of a call, to be answered ``n`` times; ``sampling.seed`` is filled in.

    ``context``, ``pin`` (the version of the weights that answers) and ``prediction`` (token ids of the answer that
    the caller expects) are shared by all prompts of the call.
    """

    request_id: str
    model_id: str
    token_ids: tuple[int, ...]
    sampling: Sampling
    n: int = 1
    context: RequestContext = RequestContext()
    prediction: tuple[int, ...] = ()
    pin: WeightsPin = msgspec.field(default_factory=WeightsPin)


class ServedModel(msgspec.Struct, frozen=True):
    """Describes a model that workers serve; lengths are in tokens.

    ``has_text``: it has a tokenizer of its own, unlike a paced engine, whose tokens are bytes.
    """

    model_id: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    has_text: bool = False


class ChoiceSummary(msgspec.Struct):
    """Summarizes a choice; correct at any time, complete once its stream has ended.

    ``choice`` is its index in the request. ``stations``: seconds by name ("queue", "prefill", "transfer", "decode",
    "ttft", …), each by one process's clock. ``way`` is "local" or "prefill". SLOs are in seconds, the request's own
    or its class's. ``pooled`` is float32 little-endian. ``trace_id`` is set if the trace is kept. ``chain``: the
    concatenated hashes of the prompt's full blocks (cluster.prefix_index.truncated), if telemetry wants them.
    """

    prompt_tokens: int
    completion_tokens: int = 0
    accepted_drafts: int = 0
    rejected_drafts: int = 0
    cached_tokens: int = 0
    finish_reason: str = ""
    stop_token_id: int | None = None
    context_class: str = ""
    way: str = ""
    prefill_worker: str = ""
    decode_worker: str = ""
    attempts: int = 0
    stations: dict[str, float] = {}
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    pooled: bytes = b""
    slo_ttft_s: float = 0.0
    slo_tpot_s: float = 0.0
    trace_id: str = ""
    chain: bytes = b""
    choice: int = 0

    def took(self, station: Station) -> None:
        """Adds a station's seconds to those of earlier visits (a retry adds up)."""
        self.stations[station.name] = self.stations.get(station.name, 0.0) + station.seconds

    def place(self, way: str, prefill: str, decode: str, attempts: int) -> None:
        """Notes the way and the workers of the attempt that begins, the ``attempts``th of the choice."""
        self.way, self.prefill_worker, self.decode_worker, self.attempts = way, prefill, decode, attempts

    def score(self, pooled: bytes, prompt_logprobs: tuple[TokenLogprobs, ...]) -> None:
        """Notes what a worker computed of the prompt."""
        self.pooled, self.prompt_logprobs = pooled, prompt_logprobs

    def find_cached(self, tokens: int) -> None:
        """Notes how many tokens of the prompt were cached."""
        self.cached_tokens = min(tokens, self.prompt_tokens)

    def name_trace(self, trace_id: str) -> None:
        """Notes the id of the trace that is kept, "" if there is none."""
        self.trace_id = trace_id

    def name_blocks(self, chain: bytes) -> None:
        """Notes the concatenated hashes of the prompt's full blocks."""
        self.chain = chain

    def end(self, finish_reason: str) -> None:
        """Notes why the answer ended."""
        self.finish_reason = finish_reason


class ChoiceStream:
    """Streams runs of one choice's tokens, each output index exactly once and in order.

    Iterate it to its end, or ``cancel`` it: otherwise its KV pages stay leased. Iterating raises the BatonError
    that ended the choice, after the runs that came before it.
    """

    def __init__(self, choice: int, summary: ChoiceSummary, clock: Callable[[], float] = time.monotonic) -> None:
        self.choice = choice
        self.summary = summary
        self.emitted: list[int] = []
        self.cancel_reason = ""
        self._clock = clock
        self._waiting: list[TokenRun] = []
        self._loop: asyncio.AbstractEventLoop | None = None  # the reader's, which costs a system call to ask for
        self._wake: asyncio.Future[None] | None = None  # the reader's, while it waits for anything
        self._holding = False  # it waits for the end alone: what comes joins what waits
        self._ended = False
        self._error: BatonError | None = None
        self._came_at = 0.0
        self._given_at: float | None = None
        self._on_cancel: Callable[[], object] = lambda: None

    # ---- the surface's side --------------------------------------------------------------------------

    def __aiter__(self) -> ChoiceStream:
        return self

    async def __anext__(self) -> TokenRun:
        """The next run; everything that waits comes as one. Raises the error that ended the choice."""
        while not self._waiting:
            if self._error is not None:
                raise self._error
            if self._ended:
                raise StopAsyncIteration
            await self._woken()
        if self._given_at is not None and not self._ended:
            await self._hold(self._given_at)
        self._given_at = self._clock()
        runs = self._some()
        return runs[0] if len(runs) == 1 else joined(runs)

    def _some(self) -> list[TokenRun]:
        """Takes runs that wait, of about MOST_JOINED tokens: all that wait for a slow client may be many thousands,
        whose words hold up everybody.
        """
        tokens, count = 0, 0
        for run in self._waiting:
            count += 1
            tokens += len(run.token_ids)
            if tokens >= MOST_JOINED:
                break
        runs, self._waiting = self._waiting[:count], self._waiting[count:]
        return runs

    async def _hold(self, given_at: float) -> None:
        """Let more join what waits, where each run is a write too many: they come quick, or the loop is behind."""
        now = self._clock()
        late = now - self._came_at
        behind = min(HOLD_MOST_S, HOLD_TIMES * late) if late > LATE_S else 0.0
        seconds = max(behind, given_at + QUICK_S - now)
        if seconds > 0:
            self._holding = True
            timer = self._reading_loop().call_later(seconds, self._tell)
            try:
                await self._woken()
            finally:
                self._holding = False
                timer.cancel()

    async def _woken(self) -> None:
        self._wake = self._reading_loop().create_future()
        try:
            await self._wake
        finally:
            self._wake = None

    def _reading_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self._loop

    def _tell(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def cancel(self, reason: str) -> None:
        """Stops the choice now ("client_gone", "stop_string", "deadline", "shutdown"); idempotent, doesn't wait.

        A reader that goes on iterating gets ``Cancelled``. After the stream's end it does nothing.
        """
        if not self._ended:
            self.cancel_reason = reason
            self.fail(Cancelled(f"cancelled: {reason}"))
            self._on_cancel()

    # ---- dispatch's side -----------------------------------------------------------------------------

    @property
    def ended(self) -> bool:
        """Returns whether no more runs will be pushed."""
        return self._ended

    @property
    def error(self) -> BatonError | None:
        """Returns the error that ended the choice early; None if there is none."""
        return self._error

    def on_cancel(self, callback: Callable[[], object]) -> None:
        """Sets the function that ``cancel`` calls, once at most."""
        self._on_cancel = callback

    def push(self, run: TokenRun) -> int:
        """Appends ``run`` without the tokens that were emitted before; returns the number of new tokens.

        A run with a finish_reason ends the stream: the summary must be complete by then. Raises BatonError if
        tokens are missing before it.
        """
        if self._ended:
            return 0
        fresh = unseen(run, len(self.emitted))
        if fresh is None:
            return 0
        self.emitted += fresh.token_ids
        self.summary.completion_tokens = len(self.emitted)
        self.summary.accepted_drafts += fresh.accepted_drafts
        self.summary.rejected_drafts += fresh.rejected_drafts
        if not self._waiting:
            self._came_at = self._clock()
        self._waiting.append(fresh)
        if fresh.finish_reason:
            self.summary.finish_reason, self.summary.stop_token_id = fresh.finish_reason, fresh.stop_token_id
            self._ended = True
        if self._ended or not self._holding:
            self._tell()
        return len(fresh.token_ids)

    def fail(self, error: BatonError, cancel_reason: str = "") -> None:
        """Ends the stream with ``error``, unless it has ended already; ``cancel_reason``, if given, is what workers
        are told.
        """
        self.cancel_reason = cancel_reason or self.cancel_reason
        if not self._ended:
            self._ended, self._error = True, error
            self._tell()


class ServingBackend(Protocol):
    """Declares what API surfaces need of dispatch; ``router.dispatch.dispatcher.Dispatcher`` implements it."""

    def open(self, request: RouterRequest) -> list[ChoiceStream]:
        """Opens one stream per choice.

        Raises Overloaded (queue full) and ModelNotFound; iterating raises the rest.
        """

    def models(self) -> tuple[ServedModel, ...]:
        """Returns the models that workers serve, by id; a model stays for some minutes after its last worker
        left.
        """

    def ready(self) -> bool:
        """Returns whether some worker could answer a request now."""


def unseen(run: TokenRun, emitted: int) -> TokenRun | None:
    """Returns ``run`` without the tokens before output index ``emitted``; None if no token or finish_reason is
    left.

    Raises BatonError if ``run`` begins after ``emitted``, because outputs between are missing.
    """
    seen = emitted - run.output_index
    if seen == 0:
        return run
    if seen < 0:
        raise BatonError(f"outputs {emitted} to {run.output_index - 1} never came; the answer would have a hole")
    if seen >= len(run.token_ids) and not run.finish_reason:
        return None
    return msgspec.structs.replace(
        run,
        output_index=emitted,
        token_ids=run.token_ids[seen:],
        logprobs=run.logprobs[seen:],
        accepted_drafts=min(run.accepted_drafts, len(run.token_ids) - seen),
    )


def joined(runs: list[TokenRun]) -> TokenRun:
    """Returns consecutive runs as one."""
    ids = tuple(i for run in runs for i in run.token_ids)
    logprobs = tuple(p for run in runs for p in run.logprobs)
    last = runs[-1]
    accepted, rejected = sum(run.accepted_drafts for run in runs), sum(run.rejected_drafts for run in runs)
    return TokenRun(runs[0].output_index, ids, logprobs, last.finish_reason, last.stop_token_id, accepted, rejected)
