"""One simulated cluster: Redis, routers, workers, clients and faults of a scenario, on one seeded event loop."""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from baton.cluster.advice import RatioPin, pin_key
from baton.cluster.store.patience import WAIT_S
from baton.drill.checks.adapters import AdapterLedger
from baton.drill.checks.judge import Judge
from baton.drill.checks.keys import KeyWitness
from baton.drill.checks.queues import QueueWitness
from baton.drill.checks.roles import RoleWitness
from baton.drill.checks.watch import Departed, Witnesses
from baton.drill.coverage import Coverage
from baton.drill.faults import FaultInjector
from baton.drill.language import oracle
from baton.drill.loop import SeededLoop
from baton.drill.machines.cores import MachineCores
from baton.drill.machines.network import Conditions, Network
from baton.drill.machines.process import owning_factory
from baton.drill.parts.adapters import SimulatedFiles
from baton.drill.parts.aims import Aims
from baton.drill.parts.batches import BatchClients
from baton.drill.parts.calls import RouterCalls
from baton.drill.parts.clients import Clients
from baton.drill.parts.keys import SimulatedKeys
from baton.drill.parts.life import EPOCH_S, NAMESPACE
from baton.drill.parts.operators.adapters import AdapterOperators
from baton.drill.parts.pins import PinClients
from baton.drill.parts.placer import SimulatedPlacer
from baton.drill.parts.router import SimulatedRouter
from baton.drill.parts.worker import SimulatedWorker
from baton.drill.redis.server import SimulatedRedis
from baton.drill.scenario import ENDING, FAULTS, REDIS, Phase, Request, Scenario
from baton.drill.story import Story
from baton.protos.nouns import Sampling

UP_S = 60.0  # seconds in which a cluster comes up
BATCH_S = 240.0  # seconds after everything else within which a batch job is complete
SETTLE_S = 60.0  # seconds after the last fault and request within which everything has ended
REST_S = 12.0  # seconds after that, and after a lease's time, in which what was left by lost peers is given back
PHASES_S = 2 * (
    UP_S + SETTLE_S + BATCH_S + REST_S
)  # seconds after which no run lasts, beside its own load and rest
# Faults after which rates are counted by each router alone, or anew.
UNCOUNTED = {kind for kind in FAULTS if kind.startswith("redis_")} | {"clock_jumps", "no_descriptors"}
# Faults after which a router may not have heard of an adapter's change.
UNHEARD = {"cut", "cut_one_way", "half_open", "no_descriptors", "break", "torn", "router_dies", "tier_slow"}
FAR_S = 0.03  # seconds to Redis from which on a router's first question is late, so that it counts alone
# Faults that may end a lease by its time.
SWEEPING = ("cut", "cut_one_way", "half_open", "stuck", "slow", "tier_slow", "cancel_again")
# Faults beside which a worker hears that it is to let a prefix go.
REACHED = (*ENDING, "weights", "index_lies", "tier_fails", "cancel_again", "hold", "role", "ratio")
PATIENT = 0.1  # share of runs that wait for the last lease's time, though nothing seems to be left
LOOK_S, QUIET_S = 0.5, 3.0  # seconds between two looks at what is left, and after the last one
LATEST = 1.2  # times its time that a pin lasts at most, by a clock that drifts
# What a request that finds room needs until an engine has it, beside WAIT_S for a store that is late: delays,
# and seconds.
WAY_DELAYS, WAY_S = 15, 0.02
PROBES_FROM = 1_000_000  # numbers of the requests that are asked at rest
PLACED_S = 20.0  # seconds after which workers that were asked for have come, and others have left
PROBE_S = 30.0  # seconds within which one of them is answered
PROBED_S = 2.0  # seconds after which nothing of them is left
PATIENT_TTL_S = 30.0  # seconds of a lease below which a busy prefill worker may let one run out


class World:
    """A cluster that plays ``scenario`` on ``loop``. With ``first_only`` the first violation ends the run."""

    def __init__(self, scenario: Scenario, story: Story, loop: SeededLoop, first_only: bool = False) -> None:
        self.scenario, self.story, self.loop = scenario, story, loop
        rng = random.Random(f"world {scenario.seed}")
        self.network = Network(rng, Conditions(scenario.delay_s, 2 * scenario.delay_s))
        self.coverage = Coverage()
        loop.coverage = self.coverage
        halt = loop.halt if first_only else lambda: None
        self.judge = Judge(
            bool(scenario.faults) or scenario.pages < 100 or scenario.placed,
            scenario.requests,
            halt,
            scenario.spares_requests,
            scenario.sight,
            scenario.pins,
        )
        self.workers: dict[str, SimulatedWorker] = {}
        self.operators: AdapterOperators | None = None
        self.pins: PinClients | None = None
        self.judge.keys = KeyWitness(scenario.keys, self.judge.violated)
        way_s = (0.0 if scenario.tenants else WAIT_S) + WAY_S + WAY_DELAYS * scenario.delay_s
        self.queues = QueueWitness(scenario, way_s, self.judge.violated)
        self.judge.queue_refuses = self.queues.strict
        self.keys = SimulatedKeys(scenario.keys, scenario.requests_per_min, self.judge.keys, self.tell)
        self._rng = rng
        self._disks = Path(tempfile.mkdtemp(prefix="baton-drill-")) if scenario.disk_pages else Path("/nowhere")
        loop.limit_s = scenario.ends_at + 2 * self._longest() + scenario.lease_ttl_s + self._slots_kept() + PHASES_S

    def tell(self, who: str, what: str) -> None:
        """Adds a line to the story: what happened to ``who``."""
        self.story.tell(self.loop.true_time(), who, what)

    async def run(self) -> None:
        """Plays the scenario to its end, then checks that nothing is left over; violations are in ``judge``."""
        loop, own = self.loop, self.scenario
        loop.set_task_factory(owning_factory)
        loop.set_exception_handler(self._unhandled)
        self.redis = SimulatedRedis(self.network, EPOCH_S)
        prefill, decode = own.slots
        roles = [("prefill", i) for i in range(prefill)] + [("decode", i) for i in range(decode)]
        departed: Departed = {}
        queues, aims = self.queues, Aims()
        self.roles = roles_seen = RoleWitness(own, self.judge.violated, self._changing, loop.true_time)
        witnesses = Witnesses(
            self.judge.violated, {}, departed, queues, self._pinned, self.judge.length, roles_seen.begins,
            roles_seen.serves,
        )  # fmt: skip

        def reached(router: str, phase: Phase) -> None:
            if phase == "turning":
                roles_seen.has_turn(router)
            aims.reached(router, phase, router)

        kinds = {fault.kind for fault in own.faults}
        unsure = bool(kinds.intersection(UNCOUNTED | UNHEARD)) or any(f.other == REDIS for f in own.faults)
        ledger = AdapterLedger(self.judge.violated, unsure)
        self.judge.adapters = ledger.of_request
        self.judge.short_of_memory = "no_memory" in kinds
        files = SimulatedFiles(loop.true_time, self._rng, ledger.of_request) if own.adapters else None
        numbers = [i for _, i in roles]
        cores = [MachineCores(sum(i % own.machines == at for i in numbers)) for at in range(own.machines)]
        self.workers = {
            f"{role}-{i}": SimulatedWorker(
                f"{role}-{i}",
                role,
                own,
                self.network,
                witnesses,
                self.tell,
                aims,
                files,
                self._disks,
                cores[i % len(cores)] if cores else None,
            )
            for role, i in roles
        }
        self.routers = [
            SimulatedRouter(
                f"router-{i}", own, self.network, self.judge.violated, self.tell, self.keys.path, reached
            )
            for i in range(own.routers)
        ]
        self.placer = SimulatedPlacer(own, self.workers, self.network, self.judge.violated, self.tell)
        if own.placed:
            self.placer.start()
        for worker in self.workers.values() if not own.placed else ():
            worker.start()
        for router in self.routers:
            router.start()
        await self._until_up()
        clients = Clients(
            self.routers,
            self.judge,
            self.tell,
            own.requests_per_min,
            queues=queues,
            tenants=own.tenants,
            departed=departed,
            ledger=ledger,
            network=self.network,
            requests=own.requests,
            stands_s=own.stands_s,
        )
        self.operators = AdapterOperators(files, ledger, self.routers, self.tell) if files else None
        if own.pins:
            self.pins = PinClients(self.routers, self.workers, self.judge.violated, self.tell, self._longest())
        await self._play(clients, aims, loop.time())
        await self._let_pins_go()
        await self._hold_numbers()
        await self._come_to_rest()
        for unjust in queues.unjust():
            self.judge.violated(unjust)
        await self._probe(clients)
        self._at_rest()
        await self._end()

    async def _until_up(self) -> None:
        async with asyncio.timeout(UP_S):
            while not all(r.parts and r.parts.core.dispatcher.ready() for r in self.routers):  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    async def _play(self, clients: Clients, aims: Aims, began: float) -> None:
        own = self.scenario
        changing = asyncio.ensure_future(self.operators.play(own.adapters, began)) if self.operators else None
        asking = [asyncio.ensure_future(clients.ask(request, began)) for request in own.requests]
        faults = FaultInjector(
            self.workers, self.routers, self.network, self.redis, self._rng, self.tell, self.coverage, aims,
            self.roles,
        )  # fmt: skip
        batches = BatchClients(
            self.network,
            own.faults,
            self.judge.violated,
            self.tell,
            own.sight,
            RouterCalls(self.routers, self.judge.violated),
        )
        bringing = [asyncio.ensure_future(batches.bring(i, batch, began)) for i, batch in enumerate(own.batches)]
        pinning = asyncio.ensure_future(self.pins.play(own.pins, began)) if self.pins else None
        playing = [asyncio.ensure_future(faults.play(fault, began)) for fault in own.faults]
        scaling = [asyncio.ensure_future(self.placer.scale(change, began)) for change in own.scales]
        for at in own.placer_dies:
            self.loop.call_later(at, self.placer.kill)
        await asyncio.gather(*playing, *scaling, self.keys.play(began))
        await faults.put_all_back()
        await self._all_end(asking, began)
        if changing is not None:
            await changing
        if pinning is not None:
            await pinning
        await asyncio.gather(*bringing)
        await asyncio.gather(*(batches.judge(i, batch, BATCH_S) for i, batch in enumerate(own.batches)))
        await asyncio.gather(*(batches.at_rest(i) for i in range(len(own.batches))))
        await batches.close()

    def _pinned(self) -> None:
        if self.pins is not None:
            self.pins.pinned()

    def _changing(self) -> dict[str, list[str]]:
        """Returns the workers for whose new roles each router waits now."""
        up = {router.name: router.parts for router in self.routers if router.parts}
        return {name: [one.worker for one in parts.core.roles.changing()] for name, parts in up.items()}

    async def _let_pins_go(self) -> None:
        """Has all pins be let go, and waits for the end of those of which a fault may have kept the word."""
        own = self.scenario
        if self.pins is None:
            return
        kinds = {fault.kind for fault in own.faults}
        told_all = not kinds.intersection(UNCOUNTED) and not any(f.other == REDIS for f in own.faults)
        await self.pins.at_rest(told_all and "roster_silent" not in kinds and "torn" not in kinds)
        changing = own.controller or kinds.intersection(("role", "ratio"))
        early = any(pin.leaves_after is not None or pin.unpin_after is not None for pin in own.pins)
        if not told_all or kinds - set(REACHED) or (changing and early):
            await asyncio.sleep(max(0.0, (self.pins.last_until - self.loop.true_time()) * LATEST))

    async def _all_end(self, asking: list[asyncio.Task[None]], began: float) -> None:
        left = max(began + self.scenario.ends_at, self.loop.time()) + SETTLE_S + self._longest() - self.loop.time()
        _, late = await asyncio.wait(asking, timeout=max(0.0, left)) if asking else ((), ())
        for task in asking:
            if task.done() and not task.cancelled() and task.exception() is not None:
                self.judge.violated(f"a client failed: {task.exception()!r}")
        if late:
            numbers = [r.number for r, t in zip(self.scenario.requests, asking, strict=True) if t in late]
            self.judge.violated(f"requests {numbers} have not ended {SETTLE_S:g} s after the last fault")
            for task in late:
                task.cancel()

    def _longest(self) -> float:
        """Returns the seconds that the whole load may take on one worker, with the pauses of slow readers."""
        tokens = sum(r.n * (len(r.prompt) + r.sampling.max_tokens) for r in self.scenario.requests)
        steps = sum(r.n * r.sampling.max_tokens for r in self.scenario.requests)
        pauses = max((r.read_pause * r.sampling.max_tokens for r in self.scenario.requests), default=0.0)
        pace = max(self.scenario.paces, default=1.0)
        return 2 * pace * (tokens * self.scenario.token_s + steps * self.scenario.step_s) + pauses

    def _slots_kept(self) -> float:
        """Returns the seconds by which Redis's clock may have put off the end of dead workers' leases on slots."""
        jumps = [fault.factor for fault in self.scenario.faults if fault.kind == "clock_jumps"]
        ends = any(fault.kind in ENDING or fault.kind == "weights" for fault in self.scenario.faults)
        return sum(jumps) if ends else 0.0

    # ---- at rest ----

    async def _hold_numbers(self) -> None:
        """Has controllers that add and remove workers stop, and checks that those are placed that are asked for."""
        own = self.scenario
        if not own.placed:
            return
        await self.placer.advise_only()
        await asyncio.sleep(PLACED_S)
        kept = {fault.kind for fault in own.faults}.isdisjoint(UNCOUNTED | {"torn"})
        for what in self.placer.unrest(kept):
            self.judge.violated(f"at rest: {what}")

    async def _probe(self, clients: Clients) -> None:
        """Sends each router one more request, which must be answered now that all faults are over."""
        roles = {worker.life.role for worker in self.workers.values() if worker.life is not None}
        if roles != {"prefill", "decode"}:
            self.judge.violated(f"at rest: every worker is a {' and '.join(sorted(roles))} worker")
            return
        for number, router in enumerate(self.routers, PROBES_FROM):
            prompt = tuple(self._rng.randrange(oracle.VOCABULARY) for _ in range(100))
            sampling = Sampling(temperature=0.0, max_tokens=8, ignore_eos=True)
            before = self.judge.answered
            probe = Request(number, 0.0, prompt, sampling, router=number - PROBES_FROM)
            try:
                async with asyncio.timeout(PROBE_S):
                    await clients.ask(probe, self.loop.time())
            except TimeoutError:
                self.judge.violated(f"at rest: {router.name} doesn't answer within {PROBE_S:g} s")
            if self.judge.answered != before + 1:
                self.judge.violated(f"at rest: {router.name} doesn't answer a request as it should")
            self.judge.answered = before
        await asyncio.sleep(PROBED_S)

    async def _come_to_rest(self) -> None:
        """Waits until nothing is left over, as long as a lost peer's leases may last, and QUIET_S more, in which
        nothing may come back. A share of runs waits for all of that time whatever it sees.
        """
        own, loop = self.scenario, self.loop
        until = loop.time() + REST_S + own.lease_ttl_s + self._slots_kept()
        # A Redis that forgot who has a slot gives it to an earlier holder; whoever serves it hears of that later.
        forgot = any(fault.kind == "redis_forgets" for fault in own.faults)
        patient = random.Random(f"rest {own.seed}").random() < PATIENT or forgot
        while loop.time() < until and (patient or any(self._left_over())):  # noqa: ASYNC110
            await asyncio.sleep(min(LOOK_S, until - loop.time()))
        await asyncio.sleep(min(QUIET_S, until - loop.time()))

    def _at_rest(self) -> None:
        own = self.scenario
        kinds = {fault.kind for fault in own.faults}
        away = kinds.intersection(UNCOUNTED) or any(f.other == REDIS for f in self.scenario.faults)
        if not away and self.scenario.delay_s < FAR_S:
            self.judge.rates_held(self.scenario.requests_per_min)
        sweeping = self.scenario.lease_ttl_s < PATIENT_TTL_S or kinds.intersection(SWEEPING)
        for worker in self.workers.values():
            swept = worker.life.engine.loop.extras().get("leases_swept", 0) if worker.life is not None else 0
            if swept and not sweeping:
                self.judge.violated(f"{worker.slot}: {swept} leases were swept without a partition")
        for what in self._left_over():
            self.judge.violated(f"at rest: {what}")
        roles = [worker.life.role for worker in self.workers.values() if worker.life is not None]
        pin = self.redis.store.values.get(pin_key(NAMESPACE).encode())
        held = msgspec.msgpack.decode(pin, type=RatioPin) if isinstance(pin, bytes) else None
        pinned = None if held is None else (held.prefill, held.decode)
        self.roles.at_rest((roles.count("prefill"), roles.count("decode")), pinned)

    def _left_over(self) -> Iterator[str]:
        """Yields what is held, or missing, that mustn't be at rest."""
        for worker in self.workers.values():
            if worker.life is not None:
                yield from worker.life.unrest()
            elif worker.placed or not self.scenario.placed:
                yield f"nobody serves {worker.slot}"
        ready = sorted(name for name, worker in self.workers.items() if worker.life is not None)
        for router in self.routers:
            yield from router.unrest(ready)

    async def _end(self) -> None:
        self.placer.stop()
        for worker in self.workers.values():
            worker.stop()
        for router in self.routers:
            await router.close()

    def close(self) -> None:
        """Frees the memory of every engine of the run, and removes the files of disk tiers."""
        self.keys.close()
        shutil.rmtree(self._disks, ignore_errors=True)
        for worker in self.workers.values():
            for life in (*worker.dead, *([worker.life] if worker.life else [])):
                life.close()

    def _unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        error = context.get("exception")
        self.judge.violated(f"unhandled: {context.get('message')}: {error!r}")
