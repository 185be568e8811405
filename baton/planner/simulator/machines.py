"""The machines of a simulated cluster: clock, workers, network; steps begin and end. Torch-free.

Knows nothing of who is placed where: ``cluster.ClusterSim`` is the router above it. One clock, one heap of events.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from heapq import heappush

from baton.kv.pages.pool import PageLease
from baton.planner.simulator.faults import check_pools
from baton.planner.simulator.flight import Flight
from baton.planner.simulator.place_maker import ClusterScenario, SimDecode, SimPrefill, SimWorkerMaker
from baton.planner.simulator.prefill_node import PrefillNode
from baton.planner.simulator.shared_cores import SharedCores
from baton.prefill_worker.engine.scheduler import PrefillJob
from baton.protos.errors import ConfigError
from baton.protos.nouns import BLOCK_TOKENS
from baton.router.policies import Option


class WorkerSimulation(ABC):
    """Simulates the machines of ``scenario``; a subclass places requests in ``pump``.

    ``now`` is simulated seconds; ``active`` holds the flights that are placed and have not ended, by index. Raises
    ConfigError for impossible settings.
    """

    def __init__(self, scenario: ClusterScenario) -> None:
        settings, pools = scenario.settings, scenario.pools
        if settings.decode < 1 or settings.prefill < 0:
            raise ConfigError("a cluster needs at least one decode worker, and no negative number of any", "decode")
        if settings.stepwise and settings.writers_wait:
            raise ConfigError("the real scheduler never lets writers wait: leave stepwise out", "writers_wait")
        if scenario.sharing and not settings.stepwise:
            raise ConfigError("workers that share cores are simulated step by step: set stepwise", "stepwise")
        check_pools(pools, (scenario.prefill, scenario.decode) if settings.prefill else (scenario.decode,))
        self.settings, self.now = settings, 0.0
        self.block = BLOCK_TOKENS if settings.stepwise else scenario.trace.block_tokens
        self.active: dict[int, Flight] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._leases: dict[int, PageLease] = {}
        self._jobs: dict[int, PrefillJob] = {}
        self._shipped: dict[int, int] = {}
        self._fetched: dict[int, int] = {}
        self._cores = SharedCores(scenario.sharing, self.at) if scenario.sharing else None
        self._maker = SimWorkerMaker(settings, self.block, self._ship, self._cores)
        self.prefills = self._maker.prefills(settings.prefill, scenario.prefill, pools)
        self.decodes = self._maker.decodes(settings.decode, scenario.decode, pools)

    @abstractmethod
    def pump(self) -> None:
        """Places waiting requests, because there may be room."""

    @abstractmethod
    def new_index(self) -> int:
        """Returns a new index, for a flight that continues another's answer."""

    @abstractmethod
    def put_back(self, flights: Sequence[Flight]) -> None:
        """Returns flights to their places in the router's queue."""

    @abstractmethod
    def drop(self, flight: Flight) -> None:
        """Removes a flight from its dead decode worker, with its lease."""

    @abstractmethod
    def lose_prefill_worker(self, flight: Flight) -> None:
        """Queues a flight whose prefill worker died for another one."""

    def at(self, when: float, act: Callable[[], None]) -> None:
        """Schedules ``act`` for time ``when``, in seconds of the simulated clock."""
        heappush(self._events, (when, next(self._order), act))

    def _then(self, flight: Flight, when: float, act: Callable[[], None]) -> None:
        """``act`` happens then, if the flight is still on the way that it is on now."""
        epoch = flight.epoch
        self.at(when, lambda: act() if flight.epoch == epoch else None)

    # ---- to the reader -------------------------------------------------------------------------------------

    def _between_steps(self, place: SimDecode) -> float:
        """Returns when a decode worker's engine, which listens between two steps, hears of what is said now."""
        self._ended(place, place.node.advance(self.now))
        self._expect(place)
        return place.node.hears(self.now)

    def _call(self, flight: Flight, taken: Option) -> None:
        """Admitted: the prefill worker is asked."""
        reader = self.prefills[taken.prefill]
        heard = self._fetch(flight, taken) + reader.costs.overhead.handoff
        self._then(flight, heard, lambda: self._enter(reader, flight))

    def _reader(self, flight: Flight) -> SimPrefill | SimDecode:
        return self.prefills[flight.prefill] if flight.prefill else self.decodes[flight.decode]

    def _fetch(self, flight: Flight, taken: Option) -> float:
        """Returns when another worker's blocks are at the reader's; now if there is nothing to fetch."""
        if not taken.fetch_blocks:
            return self.now
        blocks = taken.fetch_blocks * BLOCK_TOKENS // self.block
        source, reader = self._named(taken.fetch_from), self.prefills[taken.prefill]
        costs = source.costs
        held = reader.node.pool.match(flight.full_blocks[:blocks])
        size = (blocks - held) * self.block * costs.kv_bytes_per_token
        done = max(self.now, source.nic_free, reader.nic_free) + size * costs.transfer.per_byte
        source.nic_free = reader.nic_free = done
        self._fetched[flight.index] = blocks
        return done + costs.transfer.fixed

    def _named(self, name: str) -> SimPrefill | SimDecode:
        return self.prefills[name] if name in self.prefills else self.decodes[name]

    def _enter(self, reader: SimPrefill, flight: Flight) -> None:
        blocks = self._fetched.pop(flight.index, 0)
        if blocks:
            reader.node.hold(flight.full_blocks[:blocks])
        reader.node.add(flight, self.now)
        self._begin(reader)

    # ---- prefill and transfer ------------------------------------------------------------------------------

    def _begin(self, place: SimPrefill) -> None:
        if place.node.running:
            return
        seconds = place.node.begin(self.now)
        if seconds:
            node = place.node
            if self._cores:
                self._cores.read(place.name, self.now, seconds, lambda: self._end_step(place, node))
            else:
                self.at(self.now + seconds, lambda: self._end_step(place, node))

    def _end_step(self, place: SimPrefill, node: PrefillNode) -> None:
        if place.node is not node:
            return  # it died meanwhile
        done = node.finish()
        for flight, job in done:
            self._read(place, flight, job)
        self._begin(place)
        if done:
            self.pump()

    def _read(self, place: SimPrefill, flight: Flight, job: PrefillJob) -> None:
        """The prompt is read: its last blocks go to the decode worker, and its first token once those are taken."""
        place.pending_prompts -= 1
        place.pending_tokens -= flight.uncached
        place.sequences -= 1
        place.changed()
        flight.written = 1
        self._jobs[flight.index] = job
        fixed = place.costs.transfer.fixed
        self._then(flight, max(self.now, place.nic_free) + fixed, lambda: self._commit(flight))

    def _ship(self, flight: Flight, computed: int, last: bool) -> None:
        """Tokens that have KV now and aren't there yet go out, one worker's after one another."""
        sender, receiver = self.prefills[flight.prefill], self.decodes[flight.decode]
        fresh = computed - self._shipped[flight.index]
        if fresh <= 0:
            return
        self._shipped[flight.index] = computed
        costs = sender.costs
        start = max(self.now, sender.nic_free, receiver.nic_free)
        sender.nic_free = receiver.nic_free = start + fresh * costs.kv_bytes_per_token * costs.transfer.per_byte

    def _commit(self, flight: Flight) -> None:
        """Ends a handoff whose blocks have all come: the prefill worker's pages become free, the decode worker
        writes.
        """
        self._jobs.pop(flight.index).held_lease.close()
        self._begin(self.prefills[flight.prefill])
        self._join(flight, self.decodes[flight.decode], self._leases.pop(flight.index), local=False)

    # ---- decode --------------------------------------------------------------------------------------------

    def _join(self, flight: Flight, place: SimDecode, lease: PageLease, local: bool) -> None:
        heard = self._between_steps(place)
        if not local and flight.first_token < 0:
            flight.first_token = heard
        if not local and flight.written >= flight.outputs:
            lease.close()
            flight.last_token = heard
            self._ended(place, [flight])
        else:
            place.node.join(flight, lease, local, self.now)
        self._expect(place)

    def _expect(self, place: SimDecode) -> None:
        """Look at the worker again when its next event is due."""
        place.version += 1
        if self._cores:
            self._cores.writes(place.name, self.now, place.node.sequences > 0)
        when, version = place.node.next_event(), place.version
        if when < math.inf:
            self.at(max(when, self.now), lambda: self._look(place, version))

    def _look(self, place: SimDecode, version: int) -> None:
        if version != place.version:
            return
        ended = place.node.advance(self.now + 1e-12)
        self._expect(place)
        self._ended(place, ended)

    def _ended(self, place: SimDecode, ended: list[Flight]) -> None:
        prompt_tokens = place.node.prefilling_tokens
        local_left = place.node.prefilling if prompt_tokens else 0
        if not self.prefills or place.pending_prompts:
            place.pending_tokens, place.pending_prompts = prompt_tokens, local_left
            place.changed()
        for flight in ended:
            del self.active[flight.index]
            flight.landed()
        if ended:
            place.sequences -= len(ended)
            place.full = False
            place.changed()
        if ended or not self.prefills:
            self.pump()

    # ---- what deaths need (faults) ---------------------------------------------------------------------------

    def restart_prefill(self, worker: SimPrefill) -> None:
        """Ends a prefill worker; the engine that it starts again with has empty caches."""
        self._stop(worker.name)
        worker.die(self._maker.prefill_node(worker.costs))

    def restart_decode(self, worker: SimDecode) -> None:
        """Ends a decode worker; the engine that it starts again with has empty caches."""
        self._stop(worker.name)
        worker.die(self._maker.decode_node(worker.name, worker.costs))

    def _stop(self, name: str) -> None:
        if self._cores:
            self._cores.stop(name, self.now)

    def settle(self, place: SimDecode) -> None:
        """Takes the steps that a decode worker has begun."""
        ended = place.node.advance(self.now)
        self._ended(place, ended + place.node.advance(place.node.hears(self.now)))

    def awaits_kv(self, flight: Flight) -> bool:
        """Returns whether the flight's decode worker still waits for its prompt's KV."""
        return flight.index in self._leases
