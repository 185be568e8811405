"""A decode worker in simulated time with nothing compressed: the real scheduler, sequences and chains, step by
step.

Knows nothing of routers. It is slow and simple: the reference for ``decode_node.CompressedDecode``. A prompt's full
blocks are known by the trace's ids, as if they were hashes; outputs are made up, and hashed for real.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from baton.decode_worker.engine.job import DecodeJob
from baton.decode_worker.engine.scheduler import DecodeScheduler
from baton.engine.plan import StepPlan
from baton.engine.sequence import SequenceState
from baton.kv.pages.pool import PageLease, PagePool
from baton.planner.costs.worker import WorkerCosts
from baton.planner.simulator.flight import Flight
from baton.planner.simulator.starvation import retry_seconds
from baton.protos.errors import PoolExhausted
from baton.protos.nouns import BLOCK_TOKENS, EngineRequest, Sampling

NO_LIMIT = 1 << 40  # tokens of a context: none ends here
Stretched = Callable[[float, float], float]
"""When a step begins, and its seconds alone, to the seconds that it lasts beside others."""
VOCAB = 1 << 31  # ids of made-up tokens are below it


class StepwiseDecode:
    """Simulates a decode worker, with CompressedDecode's methods; ``block_tokens`` must be 16.

    ``stretched(begin, seconds)``, if given, returns how long a step lasts that takes ``seconds`` alone.
    """

    def __init__(
        self,
        costs: WorkerCosts,
        block_tokens: int,
        max_batch: int,
        chunk_tokens: int,
        stretched: Stretched | None = None,
    ) -> None:
        assert block_tokens == BLOCK_TOKENS, "the real scheduler's blocks hold 16 tokens"
        self.costs = costs
        self.pool = PagePool(max(1, costs.kv_tokens // BLOCK_TOKENS), watched=False)
        self.scheduler = DecodeScheduler(self.pool, max_batch, chunk_tokens)
        self.now = self.busy = 0.0
        self._stretched = stretched
        self._ages = 0
        self._may_prefill = False  # a prompt came to be read, or a preempted sequence will
        self._flights: dict[int, tuple[Flight, DecodeJob]] = {}
        self._step: tuple[StepPlan, float] | None = None  # in progress since ``now``, and when it ends
        self._firm = False  # it begins as another ends, so that who comes at that moment is too late

    @property
    def preemptions(self) -> int:
        """Returns the number of preemptions since the start."""
        return self.scheduler.preemptions

    @property
    def sequences(self) -> int:
        """Returns the number of sequences in the batch or preempted."""
        return len(self._flights)

    @property
    def prefilling(self) -> int:
        """Returns the number of prompts being prefilled here."""
        return sum(d.prefilling for d in self.scheduler.running) if self._may_prefill else 0

    @property
    def prefilling_tokens(self) -> int:
        """Returns the prompt tokens still to be computed here."""
        if not self._may_prefill:
            return 0
        found = sum(d.sequence.pending for d in self.scheduler.running if d.prefilling)
        self._may_prefill = bool(found or self.scheduler.waiting)
        return found

    def continue_totals(self, before: StepwiseDecode) -> None:
        """Goes on counting from the totals of ``before``."""
        self.busy = before.busy

    def reserve(self, flight: Flight) -> PageLease:
        """Returns a lease of pages, as the decode loop's admission gives it. Raises PoolExhausted."""
        if self.scheduler.waiting:
            raise PoolExhausted("preempted sequences wait for pages", "pages")
        blocks = -(-flight.prompt // BLOCK_TOKENS)
        limit = (flight.prompt - 1) // BLOCK_TOKENS
        return self.pool.open(flight.full_blocks, blocks, self.scheduler.growth_reserve, limit)

    def join(self, flight: Flight, lease: PageLease, local: bool, now: float) -> None:
        """Adds a request to the batch, which was advanced to ``now``, from the next step on; ``local``: its prompt
        is to be prefilled here.
        """
        if self._step is None or not (self._firm or self.now < now):
            self._step, self.now = None, max(self.now, now)
        self._ages += 1
        sampling = Sampling(max_tokens=flight.outputs, ignore_eos=True)
        request = EngineRequest("", _tokens(flight), flight.prompt, sampling)
        sequence = SequenceState(flight.index, request, (), NO_LIMIT)
        tokens, full = sequence.tokens, len(flight.full_blocks)
        sequence.tokens = tokens[full * BLOCK_TOKENS :]  # its full blocks have ids: they needn't be hashed
        job = DecodeJob(sequence, flight.index.to_bytes(32, "little"), lease, self._ages)
        job.chain.hashes[:0] = flight.full_blocks
        sequence.tokens = tokens
        self._flights[flight.index] = (flight, job)
        self._may_prefill = self._may_prefill or local
        if not local:
            job.advance(job.sequence.pending)
            self._take(flight, job)
        self.scheduler.add(job)

    def stop(self) -> None:
        """Does nothing, because sequences always know how many tokens they have generated."""

    def hears(self, now: float) -> float:
        """Returns when the engine, which was advanced to ``now``, listens next: the end of the step in progress."""
        return self._step[1] if self._step is not None and (self._firm or self.now < now) else now

    def next_event(self) -> float:
        """Returns the simulated time at which the next step ends; infinity if nothing runs."""
        return self._begin()[1] if self._flights else math.inf

    def advance(self, until: float) -> list[Flight]:
        """Takes every step that ends until then; returns the requests that ended, their times set. The step in
        progress at ``until`` has its members: requests that come meanwhile join the next one.
        """
        ended: list[Flight] = []
        firm = False
        while self._flights:
            plan, end = self._begin(firm)
            if end > until:
                break
            self.busy += end - self.now if plan.items else 0.0
            self.now, self._step = end, None
            self._finish(plan, ended)
            firm = True
        return ended

    def _begin(self, firm: bool = False) -> tuple[StepPlan, float]:
        """Returns the step in progress and when it ends; it is planned once, and who joins meanwhile waits for the
        one after.
        """
        if self._step is None:
            preempted = self.scheduler.preemptions
            plan = self.scheduler.plan()
            self._may_prefill = self._may_prefill or self.scheduler.preemptions > preempted
            self._firm, self._step = firm, (plan, self.now + self._seconds(plan))
        return self._step

    def _seconds(self, plan: StepPlan) -> float:
        if not plan.items:
            return retry_seconds(self.pool, sum(len(job.pages.pages) for job in self.scheduler.running))
        shape = plan.shape()
        seconds = self.costs.step_seconds(
            shape.prefill_tokens, shape.prefill_attention, shape.decode_sequences, shape.decode_context
        )
        return seconds if self._stretched is None else self._stretched(self.now, seconds)

    def _finish(self, plan: StepPlan, ended: list[Flight]) -> None:
        flights = self._flights
        for item in plan.items:
            flight, job = flights[item.seq]
            job.advance(len(item.tokens))
            if item.sample is not None and self._take(flight, job):
                self.scheduler.remove(job)
                del self._flights[item.seq]
                flight.last_token = self.now
                ended.append(flight)

    def _take(self, flight: Flight, job: DecodeJob) -> str:
        """The next token, whose id only has to be its own; why it was the last one, if it was."""
        sequence = job.sequence
        before = len(sequence.tokens) - flight.prompt
        token = (flight.index * 7919 + before) % VOCAB
        sequence.take(token)
        job.chain.append(token)
        flight.written = before + 1
        if flight.first_token < 0:
            flight.first_token = self.now
        return sequence.finish_reason


def _tokens(flight: Flight) -> tuple[int, ...]:
    """The prompt: what is in its full blocks is known by their ids, and the rest is its own."""
    full = len(flight.full_blocks) * BLOCK_TOKENS
    return (0,) * full + tuple((flight.index + i) % VOCAB for i in range(flight.prompt - full))
