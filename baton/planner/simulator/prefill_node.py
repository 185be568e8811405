"""A prefill worker in modelled time: the real scheduler and page pool, steps that last what they cost. Torch-free.

Knows nothing of routers. Prompts are counted in units of ``block_tokens / 16`` tokens: the scheduler's blocks
of 16 units are the trace's own blocks; with blocks of 16 tokens a unit is a token and nothing is rounded.
"""

from __future__ import annotations

from collections.abc import Callable

from baton.engine.plan import StepPlan
from baton.engine.sequence import SequenceState
from baton.kv.pages.pool import PagePool
from baton.planner.costs.worker import WorkerCosts
from baton.planner.simulator.flight import Flight, own_block
from baton.prefill_worker.engine.scheduler import AGING_TOKENS_PER_S, PrefillJob, PrefillScheduler
from baton.protos.errors import PoolExhausted
from baton.protos.nouns import BLOCK_TOKENS, EngineRequest, Sampling

SAMPLING = Sampling(max_tokens=1, ignore_eos=True)
NO_LIMIT = 1 << 40  # tokens of a context: none ends here
MAX_BATCH = 64  # prompts of a step at most


class PrefillNode:
    """Simulates a prefill worker: ``begin`` starts a step and returns its seconds, ``finish`` ends it.

    ``ship(flight, computed, last)`` is called with the prompt tokens computed so far. ``busy`` is seconds in steps.
    """

    def __init__(
        self, costs: WorkerCosts, block_tokens: int, chunk_tokens: int, ship: Callable[[Flight, int, bool], None]
    ) -> None:
        self.costs, self.unit = costs, block_tokens // BLOCK_TOKENS
        self.pool = PagePool(max(1, costs.kv_tokens // block_tokens), watched=False)
        chunk = max(1, chunk_tokens // self.unit)
        self.scheduler = PrefillScheduler(self.pool, chunk, MAX_BATCH, AGING_TOKENS_PER_S / self.unit)
        self.busy = 0.0
        self.computed_tokens = self.prompt_tokens = 0
        self._ship = ship
        self._flights: dict[int, Flight] = {}
        self._plan: StepPlan | None = None

    @property
    def running(self) -> bool:
        """Returns whether a step is in progress."""
        return self._plan is not None

    def continue_totals(self, before: PrefillNode) -> None:
        """Goes on counting from the totals of ``before``."""
        self.busy = before.busy
        self.computed_tokens, self.prompt_tokens = before.computed_tokens, before.prompt_tokens

    def add(self, flight: Flight, now: float) -> None:
        """Adds a prompt to prefill, at time ``now``."""
        units = -(-flight.prompt // self.unit)
        request = EngineRequest("", (0,) * units, units, SAMPLING)  # blocks are known by their ids
        hashes = flight.full_blocks[: units // BLOCK_TOKENS]
        hashes += (own_block(flight.index, i) for i in range(len(hashes), -(-units // BLOCK_TOKENS)))
        job = PrefillJob(SequenceState(flight.index, request, (), NO_LIMIT), hashes, now)
        self._flights[flight.index] = flight
        self.prompt_tokens += flight.prompt
        self.scheduler.add(job)

    def hold(self, blocks: list[bytes]) -> None:
        """Enters fetched blocks in the prefix cache, if there is room for them."""
        try:
            lease = self.pool.open(blocks, len(blocks))
        except PoolExhausted:
            return
        for index, block in enumerate(blocks):
            lease.seal(index, block)
        lease.close()

    def cancel(self, flight: Flight) -> None:
        """Removes a prompt that is no longer wanted, if it is here."""
        job = self.scheduler.remove(flight.index)
        if job is not None:
            del self._flights[flight.index]
            if job.lease is not None:
                job.lease.close()

    def flight_of(self, key: int) -> Flight:
        """Returns the flight with index ``key``, whose prompt is being prefilled here."""
        return self._flights[key]

    def begin(self, now: float) -> float:
        """Plans and starts a step; returns its seconds, 0 if there is nothing to do."""
        plan = self.scheduler.plan(now)
        if not plan.items:
            return 0.0
        self._plan = plan
        tokens, pairs = 0, 0.0
        for item in plan.items:
            prompt, start = self._flights[item.seq].prompt, item.start * self.unit
            new = min((item.start + len(item.tokens)) * self.unit, prompt) - start
            tokens += new
            pairs += new * (start + new / 2)
        seconds = self.costs.step_seconds(tokens, pairs, 0, 0.0)
        self.busy += seconds
        self.computed_tokens += tokens
        return seconds

    def finish(self) -> list[tuple[Flight, PrefillJob]]:
        """Ends the step, and returns the prompts that are completely prefilled; their blocks enter the prefix cache
        and are shipped.
        """
        assert self._plan is not None, "no step is under way"
        plan, self._plan = self._plan, None
        done = []
        for item in plan.items:
            if item.seq not in self.scheduler.jobs:
                continue  # cancelled while the step ran
            job, flight = self.scheduler.jobs[item.seq], self._flights[item.seq]
            before = job.sequence.computed
            job.sequence.computed = before + len(item.tokens)
            first, full = before // BLOCK_TOKENS, job.sequence.computed // BLOCK_TOKENS
            job.held_lease.seal_run(first, job.hashes[first:full])
            read = item.sample is not None
            self._ship(flight, min(job.sequence.computed * self.unit, flight.prompt), read)
            if read:
                self.scheduler.remove(item.seq)
                del self._flights[item.seq]
                flight.cached = min(job.held_lease.held * BLOCK_TOKENS * self.unit, flight.prompt)
                done.append((flight, job))
        return done
