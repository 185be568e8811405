"""A simulation of vLLM 0.19's V1 engine: what each step holds and when its outputs are known. Torch-free.

Knows nothing of files or figures. It follows what vLLM documents and shows in its public sources, in our own words:

- one list of running requests, first come first served; each step gives every one of them its next token or the
next piece of its prompt, within a budget of tokens, then admits from the queue while budget and seats last;

- a request is admitted only if its whole prompt would fit the free pages (``reserve_full_isl``), and not in a step
that preempted somebody; a page shortage preempts the youngest, which goes to the queue's head and is computed again
from what the prefix cache still has of it;

- scheduling is asynchronous: step n + 1 is planned while step n runs, so that a request waits up to a step to be
seen, another until the step in flight is done, and its first token comes one step after that.

The page pool is the real one. Time is whatever ``step_seconds`` answers.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import msgspec

from baton.engine.request_checks import blocks_for, holdable
from baton.kv.pages.pool import PageLease, PagePool
from baton.planner.costs.operators import PrefillChunk
from baton.protos.errors import ConfigError, PoolExhausted
from baton.protos.nouns import BLOCK_TOKENS

StepSeconds = Callable[[Sequence[PrefillChunk], Sequence[int], int], float]


class VllmSettings(msgspec.Struct, frozen=True):
    """Holds the settings of the run's engine; ``pages`` counts usable ones (vLLM keeps one of its blocks for
    itself).
    """

    pages: int
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    reserve_full_isl: bool = True
    async_scheduling: bool = True
    prefix_caching: bool = True


class RequestTimes(msgspec.Struct):
    """Holds one request's times in seconds on the engine's clock, 0 (``scheduled``: -1) until they are known;
    ``prompt`` and ``outputs`` are tokens.
    """

    arrival: float
    prompt: int
    outputs: int
    queued: float = 0.0
    scheduled: float = -1.0
    first_token: float = 0.0
    last_token: float = 0.0
    preemptions: int = 0


class _LiveRequest:
    """A request in the engine. ``computed`` counts planned tokens too, ``ahead`` those that are in flight."""

    def __init__(self, index: int, timed: RequestTimes) -> None:
        self.index, self.timed = index, timed
        self.computed = self.known = self.ahead = self.sealed = 0
        self.lease: PageLease | None = None

    @property
    def tokens(self) -> int:
        return self.timed.prompt + self.known

    def hashes(self) -> list[bytes]:
        return [self.hash(i) for i in range(holdable(self.tokens))]

    def hash(self, block: int) -> bytes:
        return struct.pack("<II", self.index, block)


class _Step(msgspec.Struct):
    done: float
    sampling: list[_LiveRequest]


class VllmEngine:
    """Simulates one vLLM engine; ``step_seconds`` gives the duration of a step."""

    def __init__(self, settings: VllmSettings, step_seconds: StepSeconds) -> None:
        self.settings, self._seconds = settings, step_seconds
        self.pool = PagePool(settings.pages, eviction="lru")
        self.waiting: deque[_LiveRequest] = deque()
        self.running: list[_LiveRequest] = []
        self.steps = self.preemptions = 0

    def run(self, requests: Iterable[RequestTimes]) -> None:
        """Simulates all requests, in order of arrival, and fills in their times.

        Raises ConfigError for one that never fits the pages.
        """
        coming = deque(_LiveRequest(i, t) for i, t in enumerate(sorted(requests, key=lambda t: t.arrival)))
        in_flight: deque[_Step] = deque()
        depth = 2 if self.settings.async_scheduling else 1
        now = device_free = 0.0
        while coming or self.waiting or self.running or in_flight:
            if not (self.waiting or self.running or in_flight):
                now = max(now, coming[0].timed.arrival)
            while coming and coming[0].timed.arrival <= now:
                coming[0].timed.queued = now
                self._enqueue(coming.popleft())
            if (self.waiting or self.running) and len(in_flight) < depth:
                step, seconds = self._plan(now)
                if seconds:
                    device_free = step.done = max(now, device_free) + seconds
                    in_flight.append(step)
                    if len(in_flight) < depth:
                        continue
            if in_flight:
                step = in_flight.popleft()
                now = max(now, step.done)
                self._update(step, now)

    def _enqueue(self, live: _LiveRequest) -> None:
        if blocks_for(live.timed.prompt + live.timed.outputs) > self.pool.pages:
            raise ConfigError(
                f"{live.timed.prompt} + {live.timed.outputs} tokens of a request never fit {self.pool.pages} pages",
                "pages",
            )
        self.waiting.append(live)

    # ---- planning ----------------------------------------------------------------------------------------

    def _plan(self, now: float) -> tuple[_Step, float]:
        step, budget = _Step(0.0, []), self.settings.max_num_batched_tokens
        chunks: list[PrefillChunk] = []
        decodes: list[int] = []
        before = self.preemptions
        budget = self._advance_running(step, budget, chunks, decodes)
        if self.preemptions == before:
            self._admit(step, budget, chunks, now)
        if not chunks and not decodes:
            return step, 0.0
        self.steps += 1
        return step, self._seconds(chunks, decodes, len(step.sampling) - len(decodes))

    def _advance_running(self, step: _Step, budget: int, chunks: list[PrefillChunk], decodes: list[int]) -> int:
        at = 0
        while at < len(self.running) and budget > 0:
            live = self.running[at]
            take = min(live.tokens + live.ahead - live.computed, budget)
            if take == 0 or self._answered(live):
                at += 1
                continue
            if not self._grow(live, take):
                break
            if live.computed >= live.timed.prompt and take == 1:
                decodes.append(live.computed + 1)
            else:
                chunks.append(PrefillChunk(take, live.computed))
            self._take(step, live, take)
            budget -= take
            at += 1
        return budget

    @staticmethod
    def _answered(live: _LiveRequest) -> bool:
        """Returns whether the token in flight is the last one that was asked for."""
        return live.ahead > 0 and live.known + live.ahead >= live.timed.outputs

    def _grow(self, live: _LiveRequest, take: int) -> bool:
        assert live.lease is not None
        short = blocks_for(live.computed + take) - len(live.lease.pages)
        while short > 0:
            try:
                live.lease.extend(short)
                return True
            except PoolExhausted:
                victim = self.running.pop()
                self._preempt(victim)
                if victim is live:
                    return False
        return True

    def _preempt(self, live: _LiveRequest) -> None:
        assert live.lease is not None
        live.lease.close()
        live.lease, live.computed, live.sealed = None, 0, 0
        live.timed.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(live)

    def _admit(self, step: _Step, budget: int, chunks: list[PrefillChunk], now: float) -> None:
        while self.waiting and budget > 0 and len(self.running) < self.settings.max_num_seqs:
            live = self.waiting[0]
            take = self._open(live, budget)
            if take == 0:
                return
            self.waiting.popleft()
            self.running.append(live)
            if live.timed.scheduled < 0:
                live.timed.scheduled = now
            chunks.append(PrefillChunk(take, live.computed))
            self._take(step, live, take)
            budget -= take

    def _open(self, live: _LiveRequest, budget: int) -> int:
        """Pages for its first piece; how long that is, 0 when it can't be admitted now."""
        hashes = live.hashes() if self.settings.prefix_caching and live.timed.preemptions else []
        held = self.pool.match(hashes)
        take = min(live.tokens - held * BLOCK_TOKENS, budget)
        now, whole = blocks_for(held * BLOCK_TOKENS + take), blocks_for(live.tokens)
        try:
            reserve = whole - now if self.settings.reserve_full_isl else 0
            live.lease = self.pool.open(hashes[:held], now, reserve)
        except PoolExhausted:
            return 0
        live.computed, live.sealed = held * BLOCK_TOKENS, held
        return take

    def _take(self, step: _Step, live: _LiveRequest, take: int) -> None:
        live.computed += take
        if live.computed == live.tokens + live.ahead:
            live.ahead += 1
            step.sampling.append(live)
        if not self.settings.prefix_caching:
            return
        assert live.lease is not None
        while (live.sealed + 1) * BLOCK_TOKENS <= live.computed:
            live.lease.seal(live.sealed, live.hash(live.sealed))
            live.sealed += 1

    # ---- outputs -----------------------------------------------------------------------------------------

    def _update(self, step: _Step, now: float) -> None:
        ended = False
        for live in step.sampling:
            live.ahead -= 1
            live.known += 1
            if live.known == 1:
                live.timed.first_token = now
            if live.known == live.timed.outputs:
                live.timed.last_token = now
                self._end(live)
                ended = True
        if ended:
            self.running = [r for r in self.running if r.known < r.timed.outputs]

    def _end(self, live: _LiveRequest) -> None:
        if live.lease is None:
            self.waiting.remove(live)
            return
        live.lease.close()
