"""A decode worker in compressed time: equal steps are taken many at once; blocks may be of any size. Torch-free.

Knows nothing of routers. Steps are those of ``decode_worker.engine.scheduler``, which
``stepwise_decode.StepwiseDecode`` runs itself; tests hold the two equal where blocks have 16 tokens.

Times are exact: k decode steps of n sequences take k x (body(n) + sequence x n + context x C) + context x n x k (k
+ 1) / 2, where C is the tokens of KV read before.
"""

from __future__ import annotations

import math

from baton.kv.pages.pool import PageLease, PagePool
from baton.planner.costs.worker import WorkerCosts
from baton.planner.simulator.decode_batch import CompressedBatch
from baton.planner.simulator.flight import Flight
from baton.planner.simulator.starvation import retry_seconds


class CompressedDecode:
    """Simulates a decode worker; ``now``, its own clock, is when the step in progress began, in simulated seconds,
    or when the last one ended.

    ``busy`` is seconds in steps. ``writers_wait``: a step that computes prompts generates nothing, as in engines
    without chunked prefill.
    """

    def __init__(
        self,
        costs: WorkerCosts,
        block_tokens: int,
        max_batch: int,
        chunk_tokens: int,
        writers_wait: bool = False,
    ) -> None:
        self._mixed_steps = 0 if writers_wait else 1  # tokens that a writer gets in a step that reads
        self.costs, self.max_batch = costs, max_batch
        self.pool = PagePool(max(1, costs.kv_tokens // block_tokens), watched=False)
        self.batch = CompressedBatch(self.pool, block_tokens, chunk_tokens)
        self.now = self.busy = 0.0
        self._steps = 0  # equal steps from ``now`` to ``_end``, the first of them in progress; 0: none is
        self._end = 0.0
        self._firm = False  # the step in progress began as another ended: who comes at that moment is too late
        self._leased = 0  # pages leased when the steps in progress were planned

    @property
    def preemptions(self) -> int:
        """Returns the number of preemptions since the start."""
        return self.batch.preemptions

    @property
    def sequences(self) -> int:
        """Returns the number of sequences in the batch, prefilling or decoding, and of preempted ones."""
        return self.batch.sequences

    @property
    def prefilling(self) -> int:
        """Returns the number of prompts being prefilled here."""
        return len(self.batch.prompts)

    @property
    def prefilling_tokens(self) -> int:
        """Returns the prompt tokens still to be computed here."""
        return sum(self.batch.prompts)

    def continue_totals(self, before: CompressedDecode) -> None:
        """Goes on counting from the totals of ``before``."""
        self.busy = before.busy

    def reserve(self, flight: Flight) -> PageLease:
        """Returns a lease of pages for the prompt, leaving those that running sequences need soon.

        Raises PoolExhausted.
        """
        return self.batch.reserve(flight)

    def join(self, flight: Flight, lease: PageLease, local: bool, now: float) -> None:
        """Adds a request to the batch, which was advanced to ``now``, from the next step on; ``local``: its prompt
        is to be prefilled here.
        """
        self.batch.join(flight, lease, local)
        if self._in_progress(now):
            self._set_steps(1)
        else:
            self._steps, self.now = 0, max(self.now, now)

    def hears(self, now: float) -> float:
        """Returns when the engine, which was advanced to ``now``, listens next: the end of the step in progress."""
        return self.now + self._seconds(1) if self._in_progress(now) else now

    def next_event(self) -> float:
        """Returns the simulated time at which a sequence ends, or needs a page, or a mixed step ends; infinity if
        nothing runs.
        """
        if not self.sequences:
            return math.inf
        self._begin()
        if self.batch.waiting and self._leased != self.pool.snapshot_counts().leased:
            self._set_steps(1)  # somebody gave pages back: who waits may fit after this step
        return self._end

    def advance(self, until: float) -> list[Flight]:
        """Takes every step that ends until then; returns the requests that ended, their times set. The step in
        progress at ``until`` has its members: requests that come meanwhile join the next one.
        """
        ended: list[Flight] = []
        firm = False
        while self.sequences:
            self._begin(firm)
            if self._end > until:
                self._take_part(until)
                break
            self._take(ended)
            firm = True
        return ended

    def stop(self) -> None:
        """Ends the worker, and records in each sequence how many tokens it had generated."""
        self.batch.stop()

    # ---- steps ---------------------------------------------------------------------------------------------

    def _in_progress(self, now: float) -> bool:
        """Returns whether a step is in progress that a request of that moment is too late for."""
        return bool(self._steps) and (self._firm or self.now < now)

    def _begin(self, firm: bool = False) -> None:
        """Plans the next step, unless one is in progress."""
        if self._steps:
            return
        steps = self.batch.plan()
        self._firm = firm
        self._leased = self.pool.snapshot_counts().leased if self.batch.waiting else 0
        self._set_steps(steps)

    def _set_steps(self, steps: int) -> None:
        self._steps, self._end = steps, self.now + self._seconds(steps)

    def _seconds(self, steps: int) -> float:
        """Returns the seconds of the next ``steps`` steps, which are alike."""
        batch = self.batch
        if batch.starved:
            (alone,) = batch.members.values()
            return retry_seconds(self.pool, len(alone.lease.pages))
        if not batch.reading:
            return self._run_seconds(steps)
        tokens, pairs = batch.chunk_and_pairs()
        writing = batch.writing * self._mixed_steps
        return self.costs.step_seconds(tokens, pairs, writing, self._mixed_steps * (batch.context + writing))

    def _step_base(self) -> float:
        return self.costs.step_seconds(0, 0.0, self.batch.writing, self.batch.context)

    def _run_seconds(self, steps: int) -> float:
        context = self.costs.context_seconds(self.batch.writing)
        return steps * self._step_base() + context * self.batch.writing * steps * (steps + 1) / 2

    def _steps_until(self, until: float) -> int:
        """Returns how many of the steps in progress end at ``until`` or before; the last of them doesn't."""
        context = self.costs.context_seconds(self.batch.writing)
        a, b, c = context * self.batch.writing / 2, self._step_base(), self.now - until
        linear = b + a
        root = -c / linear if a <= 0 else (-linear + math.sqrt(linear * linear - 4 * a * c)) / (2 * a)
        return min(self._steps - 1, max(0, math.floor(root + 1e-9)))

    def _take_part(self, until: float) -> None:
        """Takes those of the steps in progress that ended until then; nobody ends or needs a page in them."""
        steps = self._steps_until(until) if self._steps > 1 else 0
        if steps:
            left = self._steps - steps
            self._pass(self._run_seconds(steps))
            self.batch.write(steps)
            self._firm = True
            self._set_steps(left)

    def _take(self, ended: list[Flight]) -> None:
        """Takes the steps in progress."""
        steps, self._steps = self._steps, 0
        if self.batch.starved:
            self.now = self._end
            return
        self._pass(self._end - self.now)
        if not self.batch.reading:
            self._written(steps, ended)
            return
        done = self.batch.read()
        self._written(self._mixed_steps, ended)
        for member in done:
            flight = member.flight
            if flight.first_token < 0:
                flight.first_token = self.now
            if self.batch.finish_reading(member):
                self._note_end(flight, ended)

    def _pass(self, seconds: float) -> None:
        self.now += seconds
        self.busy += seconds

    def _written(self, steps: int, ended: list[Flight]) -> None:
        for member in self.batch.write(steps):
            self._note_end(member.flight, ended)

    def _note_end(self, flight: Flight, ended: list[Flight]) -> None:
        flight.last_token = self.now
        ended.append(flight)
