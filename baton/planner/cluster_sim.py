"""The simulated cluster: requests arrive, the real policy places them, workers compute, KV travels. Torch-free.

Knows nothing of consoles or sweeps. One clock, one heap of events: same settings and trace, same answer.

    arrival -> router's queue -> policy -> decode reserves pages -> prefill reads, blocks leave chunk by chunk
                                        └> (local way) decode reads     └> first token -> KV is in -> decode writes

Where the real router asks Redis for prefix hits, the simulator asks each pool: a hint that is never stale.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

import msgspec

from baton.kv.pool import PageLease
from baton.planner.costs import WorkerCosts
from baton.planner.decode_node import CompressedDecode
from baton.planner.flight import Flight, blocks_of
from baton.planner.place import Place
from baton.planner.prefill_node import PrefillNode
from baton.planner.real_decode import StepwiseDecode
from baton.planner.traces import Trace
from baton.prefill_worker.scheduler import PrefillJob
from baton.protos.errors import ConfigError, PoolExhausted
from baton.protos.nouns import BLOCK_TOKENS, KvLayout, WorkerInfo
from baton.router.admission import LOOK_AHEAD, PATIENCE_S
from baton.router.policies import Ask, ClusterSnapshot, Decision, Option, load_policy
from baton.router.policies._fetch import uncached, with_fetch


class SimSettings(msgspec.Struct, frozen=True):
    """The cluster. ``prefill`` 0: colocated, every worker reads and writes. ``stepwise``: nothing is compressed."""

    prefill: int
    decode: int
    policy: str = "cost"
    max_batch: int = 128
    prefill_chunk: int = 2048
    decode_chunk: int = 512
    window_tokens: int = 4096
    local_max_tokens: int = 64
    stepwise: bool = False
    seed: int = 0


class ClusterSim:
    """``run`` takes the whole trace through; the flights hold every time."""

    def __init__(self, settings: SimSettings, prefill: WorkerCosts, decode: WorkerCosts, trace: Trace) -> None:
        if settings.decode < 1 or settings.prefill < 0:
            raise ConfigError("a cluster needs at least one decode worker, and no negative number of any", "decode")
        self.settings, self.trace = settings, trace
        self.block = BLOCK_TOKENS if settings.stepwise else trace.block_tokens
        self.flights = [
            Flight(i, r, blocks_of(i, r, trace.block_tokens, self.block)) for i, r in enumerate(trace.requests)
        ]
        self.now = 0.0
        self.placements: dict[str, int] = {"local": 0, "prefill": 0}
        self.pages_leased: list[float] = []
        self.seats_taken: list[float] = []
        self._costs = {"prefill": prefill, "decode": decode}
        self._choose = load_policy(settings.policy)
        self._rng = random.Random(settings.seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._waiting: deque[Flight] = deque()
        self._turn = self._rng.randrange(1 << 16)
        self._leases: dict[int, PageLease] = {}
        self._jobs: dict[int, PrefillJob] = {}
        self._shipped: dict[int, int] = {}
        self._fetched: dict[int, int] = {}
        self.prefills = {f"p{i:03d}": self._prefill_place(f"p{i:03d}") for i in range(settings.prefill)}
        self.decodes = {f"d{i:03d}": self._decode_place(f"d{i:03d}") for i in range(settings.decode)}

    def run(self) -> None:
        """Until nothing is left to do."""
        for flight in self.flights:
            self._at(flight.arrival, lambda flight=flight: self._arrive(flight))  # type: ignore[misc]
        while self._events:
            self.now, _, act = heappop(self._events)
            act()
        for flight in self._waiting:
            flight.refused = True

    # ---- building ------------------------------------------------------------------------------------------

    def _info(self, name: str, role: str) -> WorkerInfo:
        costs = self._costs[role]
        layout = KvLayout("bfloat16", (), costs.kv_bytes_per_token * BLOCK_TOKENS, "bfloat16")
        pages = costs.kv_tokens // BLOCK_TOKENS
        return WorkerInfo(
            name,
            name,
            role,
            "",
            "model",
            "",
            layout,
            1 << 30,
            1 << 30,
            (),
            pages,
            max_batch=self.settings.max_batch,
        )

    def _prefill_place(self, name: str) -> Place:
        node = PrefillNode(
            self._costs["prefill"], self.block, self.settings.prefill_chunk,
            lambda flight, computed, last: self._ship(flight, computed, last),
        )  # fmt: skip
        return self._place(name, "prefill", node)

    def _decode_place(self, name: str) -> Place:
        kind = StepwiseDecode if self.settings.stepwise else CompressedDecode
        node = kind(self._costs["decode"], self.block, self.settings.max_batch, self.settings.decode_chunk)
        return self._place(name, "decode", node)

    def _place(self, name: str, role: str, node: Any) -> Place:
        return Place(self._info(name, role), node, self._costs[role], self.block)

    def _at(self, when: float, act: Callable[[], None]) -> None:
        heappush(self._events, (when, next(self._order), act))

    # ---- the router ----------------------------------------------------------------------------------------

    def _arrive(self, flight: Flight) -> None:
        room = self._costs["decode"].kv_tokens
        if flight.prompt + flight.outputs > room or (self.prefills and flight.prompt > self._prefill_room()):
            flight.refused = True
            return
        self._waiting.append(flight)
        self._look_around()
        self._pump()

    def _look_around(self) -> None:
        """What a newcomer finds: the shares of decode workers' pages and seats that are taken."""
        counts = [d.node.pool.snapshot_counts() for d in self.decodes.values()]
        self.pages_leased.append(sum(c.leased for c in counts) / sum(c.pages for c in counts))
        seats = self.settings.max_batch * len(self.decodes)
        self.seats_taken.append(sum(d.sequences for d in self.decodes.values()) / seats)

    def _prefill_room(self) -> int:
        return self._costs["prefill"].kv_tokens

    def _pump(self) -> None:
        """Place whom there is room for, as ``router.admission`` does."""
        misses, kept = 0, []
        while self._waiting and misses < LOOK_AHEAD:
            flight = self._waiting.popleft()
            if self._try(flight):
                continue
            kept.append(flight)
            misses += 1
            if self.now - flight.arrival > PATIENCE_S:
                break
        self._waiting.extendleft(reversed(kept))

    def _try(self, flight: Flight) -> bool:
        while True:
            ask = Ask(flight.prompt, flight.outputs, self._hits(flight))
            snapshot = self._snapshot()
            decision = self._choose(snapshot, ask)
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
        if not blocks or not self.trace.has_hashes:
            return {}
        found = {}
        for places in (self.prefills, self.decodes):
            for name, place in places.items():
                held = place.node.pool.match(blocks)
                if held:
                    found[name] = held * scale
        return found

    def _snapshot(self) -> ClusterSnapshot:
        return ClusterSnapshot(
            tuple(p.candidate() for p in self.prefills.values()),
            tuple(d.candidate() for d in self.decodes.values()),
            self._turn,
            self.settings.window_tokens,
            self.settings.local_max_tokens,
        )

    def _start(self, flight: Flight, decision: Decision, ask: Ask, lease: PageLease) -> None:
        taken = decision.taken
        self._turn += 1
        flight.placed, flight.way, flight.decode, flight.prefill = self.now, taken.way, taken.decode, taken.prefill
        self.placements[taken.way] += 1
        decode, reader = self.decodes[taken.decode], self._reader(flight)
        decode.sequences += 1
        if reader is not decode:
            reader.sequences += 1
        flight.unread = uncached(ask, taken)
        reader.unread_requests += 1
        reader.unread_tokens += flight.unread
        self._shipped[flight.index] = lease.held * self.block
        decode.changed()
        reader.changed()
        if taken.way == "local":
            flight.cached = lease.held * self.block
            self._join(flight, decode, lease, local=True)
            return
        self._leases[flight.index] = lease
        self._at(self._between_steps(decode), lambda: self._call(flight, taken, reader))

    def _between_steps(self, place: Place) -> float:
        """When a decode worker's engine, which listens between two steps, hears of what is said now."""
        self._ended(place, place.node.advance(self.now))
        self._expect(place)
        return max(self.now, place.node.now)

    def _call(self, flight: Flight, taken: Option, reader: Place) -> None:
        """Admitted: the prefill worker is asked."""
        self._at(self._fetch(flight, taken), lambda: self._enter(reader, flight))

    def _reader(self, flight: Flight) -> Place:
        return self.prefills[flight.prefill] if flight.prefill else self.decodes[flight.decode]

    def _fetch(self, flight: Flight, taken: Option) -> float:
        """When the blocks that another worker holds are at the reader's; now if there is nothing to fetch."""
        if not taken.fetch_blocks:
            return self.now
        blocks = taken.fetch_blocks * BLOCK_TOKENS // self.block
        source, reader = self._named(taken.fetch_from), self.prefills[taken.prefill]
        costs = self._costs["prefill"]
        held = reader.node.pool.match(flight.full_blocks[:blocks])
        size = (blocks - held) * self.block * costs.kv_bytes_per_token
        done = max(self.now, source.nic_free, reader.nic_free) + size * costs.transfer.per_byte
        source.nic_free = reader.nic_free = done
        self._fetched[flight.index] = blocks
        return done + costs.transfer.fixed

    def _named(self, name: str) -> Place:
        return self.prefills[name] if name in self.prefills else self.decodes[name]

    def _enter(self, reader: Place, flight: Flight) -> None:
        blocks = self._fetched.pop(flight.index, 0)
        if blocks:
            reader.node.hold(flight.full_blocks[:blocks])
        reader.node.add(flight, self.now)
        self._begin(reader)

    # ---- prefill and transfer ------------------------------------------------------------------------------

    def _begin(self, place: Place) -> None:
        if place.node.running:
            return
        seconds = place.node.begin(self.now)
        if seconds:
            self._at(self.now + seconds, lambda: self._end_step(place))

    def _end_step(self, place: Place) -> None:
        done = place.node.finish()
        for flight, job in done:
            self._read(place, flight, job)
        self._begin(place)
        if done:
            self._pump()

    def _read(self, place: Place, flight: Flight, job: PrefillJob) -> None:
        """The prompt is read: its last blocks go to the decode worker, and its first token once those are taken."""
        place.unread_requests -= 1
        place.unread_tokens -= flight.unread
        place.sequences -= 1
        place.changed()
        flight.written = 1
        self._jobs[flight.index] = job
        fixed = self._costs["prefill"].transfer.fixed
        self._at(max(self.now, place.nic_free) + fixed, lambda: self._commit(flight))

    def _ship(self, flight: Flight, computed: int, last: bool) -> None:
        """Tokens that have KV now and aren't there yet go out, one worker's after one another."""
        sender, receiver = self.prefills[flight.prefill], self.decodes[flight.decode]
        fresh = computed - self._shipped[flight.index]
        if fresh <= 0:
            return
        self._shipped[flight.index] = computed
        costs = self._costs["prefill"]
        start = max(self.now, sender.nic_free, receiver.nic_free)
        sender.nic_free = receiver.nic_free = start + fresh * costs.kv_bytes_per_token * costs.transfer.per_byte

    def _commit(self, flight: Flight) -> None:
        """Every block is in: the prefill worker's pages are free, the decode worker writes."""
        self._jobs.pop(flight.index).held_lease.close()
        self._begin(self.prefills[flight.prefill])
        self._join(flight, self.decodes[flight.decode], self._leases.pop(flight.index), local=False)

    # ---- decode --------------------------------------------------------------------------------------------

    def _join(self, flight: Flight, place: Place, lease: PageLease, local: bool) -> None:
        heard = self._between_steps(place)
        if not local:
            flight.first_token = heard
        if not local and flight.written >= flight.outputs:
            lease.close()
            flight.last_token = flight.first_token
            self._ended(place, [flight])
        else:
            place.node.join(flight, lease, local, self.now)
        self._expect(place)

    def _expect(self, place: Place) -> None:
        """Look at the worker again when its next event is due."""
        place.version += 1
        when, version = place.node.next_event(), place.version
        if when < math.inf:
            self._at(max(when, self.now), lambda: self._look(place, version))

    def _look(self, place: Place, version: int) -> None:
        if version != place.version:
            return
        ended = place.node.advance(self.now + 1e-12)
        self._expect(place)
        self._ended(place, ended)

    def _ended(self, place: Place, ended: list[Flight]) -> None:
        unread = place.node.reading_tokens
        local_left = place.node.readers if unread else 0
        if not self.prefills or place.unread_requests:
            place.unread_tokens, place.unread_requests = unread, local_left
            place.changed()
        if ended:
            place.sequences -= len(ended)
            place.full = False
            place.changed()
        if self._waiting and (ended or not self.prefills):
            self._pump()
