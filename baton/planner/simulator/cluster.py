"""The simulated cluster: requests arrive, the real policy places them, workers compute, KV travels. Torch-free.

Knows nothing of consoles or sweeps. One clock, one heap of events: same settings and trace, same answer.

    arrival -> router's queue -> policy -> decode reserves pages -> prefill reads, blocks leave chunk by chunk
                                        └> (local way) decode reads     └> first token -> KV is in -> decode writes

Where the real router asks Redis for prefix hits, the simulator asks each pool: a hint that is never stale. What
happens when a worker dies is in ``faults``.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from heapq import heappop

import msgspec

from baton.kv.pages.pool import PageLease
from baton.planner.simulator.failure_injection import FailureInjection
from baton.planner.simulator.flight import BlockIds, Flight
from baton.planner.simulator.machines import WorkerSimulation
from baton.planner.simulator.place_maker import ClusterScenario, SimDecode, SimPrefill, SimSettings
from baton.protos.errors import PoolExhausted
from baton.protos.nouns import BLOCK_TOKENS
from baton.router.dispatch.fair_queue import FairQueue, FairShares, Place
from baton.router.policies import Candidate, ClusterSnapshot, Option, RoutingDecision, RoutingRequest, load_policy
from baton.router.policies.adjustments.prefix_fetch import uncached, with_fetch

__all__ = ["ClusterScenario", "ClusterSim", "SimSettings"]

# Python frames at most per placement, because where decode workers alone read, one may begin within another.
FRAMES_PER_PLACEMENT = 16


class ClusterSim(WorkerSimulation):
    """Simulates a cluster over a trace; after ``run``, ``flights`` hold every request's times.

    ``placements`` counts local and disaggregated placements; ``pages_leased`` and ``seats_taken`` are the shares
    that each arrival found taken.
    """

    def __init__(self, scenario: ClusterScenario) -> None:
        super().__init__(scenario)
        settings, trace = scenario.settings, scenario.trace
        self.trace = trace
        self._prefixes_known = trace.has_hashes
        ids = BlockIds(trace.block_tokens, self.block)
        self.flights = [Flight(i, r, ids.of(r)) for i, r in enumerate(trace.requests)]
        self.placements: dict[str, int] = {"local": 0, "prefill": 0}
        self.pages_leased: list[float] = []
        self.seats_taken: list[float] = []
        self._choose = load_policy(settings.policy)
        self._rng = random.Random(settings.seed)
        self._shares = FairShares()
        self._waiting: FairQueue[Flight] = FairQueue()
        self._readerless: deque[Flight] = deque()
        self._index = len(self.flights)
        self._turn = self._rng.randrange(1 << 16)
        self._room = max(d.room for d in self.decodes.values())
        self._reading_room = max((p.room for p in self.prefills.values()), default=self._room)
        self._unlike = bool(scenario.pools or scenario.failures)
        self._way_in = scenario.decode.overhead.request  # all of it: nothing waits for a first token's way back
        self.faults = FailureInjection(self, scenario.failures)

    def run(self) -> None:
        """Processes events until none is left; requests still waiting then are marked refused."""
        for flight in self.flights:
            self.at(flight.arrival + self._way_in, lambda flight=flight: self._arrive(flight))  # type: ignore[misc]
        with _frames_for(len(self.flights)):
            while self._events:
                self.now, _, act = heappop(self._events)
                act()
        for flight in (*self._waiting, *self._readerless):
            self.active.pop(flight.index, None)
            (flight.origin or flight).refused = True
        for flight in self._readerless:
            self._leases.pop(flight.index).close()
            self.decodes[flight.decode].sequences -= 1

    # ---- the router ----------------------------------------------------------------------------------------

    def _arrive(self, flight: Flight) -> None:
        if flight.prompt + flight.outputs > self._room or flight.prompt > self._reading_room:
            flight.refused = True
            return
        flight.order = self._shares.order(flight.pool, flight.load)
        self._waiting.add(flight)
        self._look_around()
        self.pump()

    def _look_around(self) -> None:
        """Records what a newcomer finds: the shares of decode workers' pages and seats that are taken."""
        counts = [d.node.pool.snapshot_counts() for d in self.decodes.values()]
        self.pages_leased.append(sum(c.leased for c in counts) / sum(c.pages for c in counts))
        seats = self.settings.max_batch * len(self.decodes)
        self.seats_taken.append(sum(d.sequences for d in self.decodes.values()) / seats)

    def pump(self) -> None:
        """Places every waiting request for which there is room, by the router's queue; prompts whose reader died
        come first.
        """
        for _ in range(len(self._readerless)):
            if self._readerless and not self._read_again(flight := self._readerless.popleft()):
                self._readerless.append(flight)
        self._waiting.pump(self.now, self._try)
        for pool in self._shares.pools():
            if not self._waiting.waits(pool):
                self._shares.idle(pool)

    def _try(self, flight: Flight) -> bool:
        while True:
            ask = RoutingRequest(flight.prompt, flight.outputs, self._hits(flight))
            snapshot = self._snapshot(flight)
            decision = self._choose(snapshot, ask) if snapshot.decode else None
            if decision is None:
                return False
            decision = with_fetch(snapshot, ask, decision) if ask.hits else decision
            place = self.decodes[decision.taken.decode]
            try:
                lease = place.node.reserve(flight)
            except PoolExhausted:
                place.full = True
                place.changed()
                continue
            self._start(flight, decision, ask, lease)
            return True

    def _hits(self, flight: Flight) -> dict[str, int]:
        blocks, scale = flight.full_blocks, self.block // BLOCK_TOKENS
        if not blocks or not self._prefixes_known:
            return {}
        found = {}
        for places in (self.prefills, self.decodes):
            for name, place in places.items():
                if place.down:
                    continue
                held = flight.held_in(name, place.node.pool)
                if held:
                    found[name] = held * scale
        return found

    def _snapshot(self, flight: Flight, decode: tuple[Candidate, ...] = ()) -> ClusterSnapshot:
        """``decode``: a worker that has it already."""
        readers, writers = iter(self.prefills.values()), iter(self.decodes.values())
        if self._unlike:
            readers = (p for p in readers if p.takes(flight.prompt))
            writers = (d for d in writers if d.takes(flight.prompt + flight.outputs))
        return ClusterSnapshot(
            tuple(p.candidate() for p in readers),
            decode or tuple(d.candidate() for d in writers),
            self._turn,
            self.settings.window_tokens,
            self.settings.local_max_tokens,
        )

    def _start(self, flight: Flight, decision: RoutingDecision, ask: RoutingRequest, lease: PageLease) -> None:
        taken = decision.taken
        self._turn += 1
        self._shares.placed(flight.pool, Place(flight.order, flight.load))
        flight.placed, flight.decode = self.now, taken.decode
        flight.seen.clear()
        self.active[flight.index] = flight
        decode = self.decodes[taken.decode]
        decode.sequences += 1
        self._shipped[flight.index] = lease.held * self.block
        self._give(flight, taken, ask, decode, lease)

    def _give(
        self, flight: Flight, taken: Option, ask: RoutingRequest, decode: SimDecode, lease: PageLease
    ) -> None:
        """Passes an admitted request to the worker that computes its prompt."""
        flight.way, flight.prefill = taken.way, taken.prefill
        self.placements[taken.way] += 1
        reader = self._reader(flight)
        if reader is not decode:
            reader.sequences += 1
        flight.uncached = uncached(ask, taken)
        reader.pending_prompts += 1
        reader.pending_tokens += flight.uncached
        decode.changed()
        reader.changed()
        if taken.way == "local":
            flight.cached = lease.held * self.block
            self._join(flight, decode, lease, local=True)
            return
        self._leases[flight.index] = lease
        self._then(flight, self._between_steps(decode), lambda: self._call(flight, taken))

    def _read_again(self, flight: Flight) -> bool:
        """Another reader for a prompt whose decode worker waits with what it has of it."""
        place = self.decodes[flight.decode]
        seen = msgspec.structs.replace(place.candidate(), sequences=place.sequences - 1, full=False)
        ask = RoutingRequest(flight.prompt, flight.outputs, self._hits(flight))
        decision = self._choose(self._snapshot(flight, (seen,)), ask)
        if decision is None:
            return False
        self._give(flight, decision.taken, ask, place, self._leases.pop(flight.index))
        return True

    # ---- what deaths need (faults) ---------------------------------------------------------------------------

    def new_index(self) -> int:
        """Returns a new index, for a flight that continues another's answer."""
        self._index += 1
        return self._index - 1

    def put_back(self, flights: Sequence[Flight]) -> None:
        """Returns flights to their places in the router's queue."""
        for flight in flights:
            self._waiting.add(flight)

    def drop(self, flight: Flight) -> None:
        """Removes a flight from its dead decode worker, with its lease; the worker that prefills it stops."""
        flight.epoch += 1
        del self.active[flight.index]
        lease, job = self._leases.pop(flight.index, None), self._jobs.pop(flight.index, None)
        if lease is None:
            return
        if flight in self._readerless:
            self._readerless.remove(flight)
            return
        flight.written = 0
        reader = self.prefills[flight.prefill]
        if job is not None:
            job.held_lease.close()
        else:
            self._forget(reader, flight)
            reader.node.cancel(flight)
        self._begin(reader)

    def _forget(self, reader: SimPrefill, flight: Flight) -> None:
        reader.pending_prompts -= 1
        reader.pending_tokens -= flight.uncached
        reader.sequences -= 1
        reader.changed()

    def lose_prefill_worker(self, flight: Flight) -> None:
        """Queues a flight whose prefill worker died for another one; the KV at its decode worker stays."""
        if flight in self._readerless:
            return
        flight.epoch += 1
        flight.written = 0
        self._jobs.pop(flight.index, None)
        self._fetched.pop(flight.index, None)
        self._readerless.append(flight)


@contextmanager
def _frames_for(requests: int) -> Iterator[None]:
    """Raises Python's recursion limit, so that all of ``requests`` may be placed from within one another."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(before + FRAMES_PER_PLACEMENT * requests)
    try:
        yield
    finally:
        sys.setrecursionlimit(before)
