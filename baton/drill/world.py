"""One simulated cluster: routers, workers, clients and faults of a scenario, on one seeded event loop."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry

from baton.cluster.prefix_index import HASH_BYTES
from baton.cluster.sections.router import RouterConfig
from baton.cluster.telemetry import RouterMetrics
from baton.drill.judge import Judge
from baton.drill.network import Network
from baton.drill.process import Process, owning_factory
from baton.drill.rpc import SimulatedDialer
from baton.drill.scenario import FAULTS, Fault, FaultKind, Request, Scenario
from baton.drill.story import Story
from baton.drill.worker import MODEL_ID, Life, SimulatedWorker
from baton.protos.errors import BatonError
from baton.protos.nouns import WorkerInfo, WorkerLoad
from baton.router.access.keys import ApiKey
from baton.router.compose.core import CoreDependencies, RouterCore, running_core
from baton.router.dispatch.runner import DispatchSettings
from baton.router.request.context import RequestContext
from baton.router.request.request import ChoiceStream, RouterRequest

BEAT_S = 0.5  # seconds between two heartbeats of a worker
RESTART_S = 1.0  # seconds after which a killed worker's successor serves
SETTLE_S = 60.0  # seconds after the last fault and request within which everything has ended
REST_S = 45.0  # seconds after that in which leases and streams of lost peers run out
Play = Callable[[Fault, SimulatedWorker], Awaitable[None]]  # lets a fault happen, until it is over
NO_LEASE_SWEPT = ("cut", "cut_one_way", "stuck", "slow")


class Seat(msgspec.Struct, frozen=True):
    """What the directory knows of a worker; ``age_s`` is the time since its last heartbeat, in seconds."""

    info: WorkerInfo
    load: WorkerLoad
    age_s: float = 0.0


class Directory:
    """Who is here, as routers read it: a heartbeat old, and still there for a while after a death."""

    def __init__(self) -> None:
        self.seats: dict[str, Seat] = {}
        self.silent_until: dict[str, float] = {}

    def snapshot(self) -> Mapping[str, Seat]:
        """Returns every seat."""
        return dict(self.seats)


class Index:
    """Says how many leading blocks each worker holds; ``lying_until`` that time it makes numbers up."""

    def __init__(self, workers: dict[str, SimulatedWorker], rng: random.Random) -> None:
        self._workers, self._rng = workers, rng
        self.lying_until = 0.0

    async def longest(self, workers: Sequence[str], hashes: bytes) -> dict[str, int]:
        """Returns, by worker id, how many leading blocks of ``hashes`` (truncated, in a row) it holds."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._rng.uniform(0.0002, 0.003))
        blocks = [hashes[i : i + HASH_BYTES] for i in range(0, len(hashes), HASH_BYTES)]
        if loop.time() < self.lying_until:
            return {worker: self._rng.randint(0, len(blocks)) for worker in workers}
        return {worker: self._leading(worker, blocks) for worker in workers}

    def _leading(self, worker: str, blocks: list[bytes]) -> int:
        life = self._workers[worker].life if worker in self._workers else None
        held = life.held if life is not None else {}
        return next((i for i, block in enumerate(blocks) if block not in held), len(blocks))


class World:
    """A scenario as it runs."""

    def __init__(self, scenario: Scenario, story: Story) -> None:
        self.scenario, self.story = scenario, story
        self.rng = random.Random(f"world {scenario.seed}")
        self.network = Network(self.rng)
        self.judge = Judge(bool(scenario.faults) or scenario.pages < 100, scenario.requests)
        roles = [("prefill", i) for i in range(scenario.prefill)] + [("decode", i) for i in range(scenario.decode)]
        self.workers = {
            f"{role}-{i}": SimulatedWorker(f"{role}-{i}", role, scenario, self.network) for role, i in roles
        }
        self.directory, self.index = Directory(), Index(self.workers, self.rng)
        self.routers: list[RouterCore] = []
        self._faults: dict[FaultKind, Play] = {
            "kill": self._kill,
            "stuck": self._stuck,
            "slow": self._slow,
            "cut": self._cut,
            "cut_one_way": self._cut_one_way,
            "break": self._break,
            "index_lies": self._index_lies,
            "roster_silent": self._roster_silent,
        }
        assert self._faults.keys() == set(FAULTS)
        self._dead: list[Life] = []
        self._clients: list[asyncio.Task[None]] = []

    def tell(self, who: str, what: str) -> None:
        """Adds a line to the story."""
        self.story.tell(asyncio.get_running_loop().time(), who, what)

    async def run(self) -> None:
        """Plays the scenario to its end and judges what is left."""
        loop = asyncio.get_running_loop()
        loop.set_task_factory(owning_factory)
        loop.set_exception_handler(self._unhandled)
        for worker in self.workers.values():
            self._start(worker)
        beating = asyncio.ensure_future(self._beat())
        async with _many(self._router(i) for i in range(self.scenario.routers)) as self.routers:
            await self._until_up()
            began = loop.time()
            self._clients = [asyncio.ensure_future(self._client(r, began)) for r in self.scenario.requests]
            faults = [asyncio.ensure_future(self._fault(f, began)) for f in self.scenario.faults]
            await self._all_end(began)
            await asyncio.gather(*faults)
            await asyncio.sleep(REST_S)
            self._at_rest()
        beating.cancel()
        self._end()

    # ---- parts ----

    def _start(self, worker: SimulatedWorker) -> None:
        life = worker.start()
        self.tell(worker.slot, f"starts as {life.info.incarnation}")

    @asynccontextmanager
    async def _router(self, number: int) -> AsyncIterator[RouterCore]:
        name, loop = f"router-{number}", asyncio.get_running_loop()
        process = Process(name)
        config = RouterConfig(
            policy=self.scenario.policy, local_prefill_max_tokens=self.scenario.local_max, max_queue=10_000
        )
        rng = random.Random(f"{self.scenario.seed} {name}")
        given = CoreDependencies(
            roster=self.directory,
            metrics=RouterMetrics(CollectorRegistry()),
            router_id=name,
            index=self.index,
            clock=loop.time,
            rng=rng,
            dialer=SimulatedDialer(self.network, process.name),
        )
        settings = DispatchSettings(hedge_factor=self.scenario.hedge)
        async with running_core(config, given, settings) as core:
            yield core

    async def _until_up(self) -> None:
        async with asyncio.timeout(30.0):
            while not all(router.dispatcher.ready() for router in self.routers):  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    async def _beat(self) -> None:
        while True:
            now = asyncio.get_running_loop().time()
            for slot, worker in self.workers.items():
                if worker.life is not None and now >= self.directory.silent_until.get(slot, 0.0):
                    self.directory.seats[slot] = Seat(worker.life.control.info, worker.life.load)
            await asyncio.sleep(BEAT_S)

    # ---- clients ----

    async def _client(self, request: Request, began: float) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(began + request.at - loop.time())
        name = f"client {request.number}"
        try:
            streams = self.routers[request.router].dispatcher.open(self._asked(request))
        except BatonError as error:
            self.tell(name, f"is refused: {error.label}")
            return
        self.tell(name, f"asks {len(request.prompt)} tokens, n {request.n}")
        if request.cancel_after is not None:
            for stream in streams:
                loop.call_later(request.cancel_after, stream.cancel, "client_gone")
        await asyncio.gather(*(self._read(request, stream) for stream in streams))

    def _asked(self, request: Request) -> RouterRequest:
        now = asyncio.get_running_loop().time()
        key = ApiKey("", "", request.tenant) if request.tenant else None
        return RouterRequest(
            request_id=f"r{request.number}",
            model_id=MODEL_ID,
            token_ids=request.prompt,
            sampling=request.sampling,
            n=request.n,
            context=RequestContext(
                tenant_salt=request.tenant.encode(),
                deadline=None if request.deadline_after is None else now + request.deadline_after,
                key=key,
            ),
        )

    async def _read(self, request: Request, stream: ChoiceStream) -> None:
        tokens: list[int] = []
        error: BaseException | None = None
        try:
            async for run in stream:
                if run.output_index != len(tokens):
                    self.judge.violated(
                        f"request {request.number}: output index {run.output_index} after {len(tokens)} tokens"
                    )
                tokens += run.token_ids
                if request.read_pause:
                    await asyncio.sleep(request.read_pause)
        except asyncio.CancelledError:
            raise
        except Exception as raised:
            error = raised
        self.judge.ended(request, stream, tokens, error)
        label = "complete" if error is None else getattr(error, "label", type(error).__name__)
        self.tell(f"client {request.number}", f"choice {stream.choice}: {len(tokens)} tokens, {label}")

    # ---- faults ----

    async def _fault(self, fault: Fault, began: float) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(began + fault.at - loop.time())
        self.tell(fault.target, f"fault: {fault.kind} {fault.other} for {fault.seconds:.3f} s")
        await self._faults[fault.kind](fault, self.workers[fault.target])

    async def _kill(self, fault: Fault, worker: SimulatedWorker) -> None:
        if worker.life is None:
            return
        self._dead.append(worker.life)
        worker.kill()
        await asyncio.sleep(RESTART_S + fault.seconds)
        if worker.life is None:
            self._start(worker)

    async def _stuck(self, fault: Fault, worker: SimulatedWorker) -> None:
        worker.stuck_until = asyncio.get_running_loop().time() + fault.seconds
        await asyncio.sleep(fault.seconds)

    async def _slow(self, fault: Fault, worker: SimulatedWorker) -> None:
        worker.slow = fault.factor
        await asyncio.sleep(fault.seconds)
        worker.slow = 1.0

    async def _cut(self, fault: Fault, worker: SimulatedWorker) -> None:
        await self._cut_ways(fault, both=True)

    async def _cut_one_way(self, fault: Fault, worker: SimulatedWorker) -> None:
        await self._cut_ways(fault, both=False)

    async def _cut_ways(self, fault: Fault, both: bool) -> None:
        a, b = self._process(fault.target), self._process(fault.other)
        ways = [(a, b), (b, a)] if both else [(a, b)]
        for way in ways:
            self.network.cut(*way)
        await asyncio.sleep(fault.seconds)
        for way in ways:
            self.network.heal(*way)

    async def _break(self, fault: Fault, worker: SimulatedWorker) -> None:
        self.network.break_between(self._process(fault.target), self._process(fault.other))

    async def _index_lies(self, fault: Fault, worker: SimulatedWorker) -> None:
        self.index.lying_until = asyncio.get_running_loop().time() + fault.seconds
        await asyncio.sleep(fault.seconds)

    async def _roster_silent(self, fault: Fault, worker: SimulatedWorker) -> None:
        until = asyncio.get_running_loop().time() + fault.seconds
        self.directory.silent_until[fault.target] = until
        await asyncio.sleep(fault.seconds)

    def _process(self, name: str) -> str:
        life = self.workers[name].life if name in self.workers else None
        return life.process.name if life is not None else name

    # ---- the end ----

    async def _all_end(self, began: float) -> None:
        left = began + self.scenario.ends_at + SETTLE_S + self._longest() - asyncio.get_running_loop().time()
        _, late = await asyncio.wait(self._clients, timeout=max(0.0, left)) if self._clients else ((), ())
        for task in self._clients:
            if task.done() and not task.cancelled() and task.exception() is not None:
                self.judge.violated(f"a client failed: {task.exception()!r}")
        if late:
            numbers = [r.number for r, t in zip(self.scenario.requests, self._clients, strict=True) if t in late]
            self.judge.violated(f"requests {numbers} have not ended {SETTLE_S:g} s after the last fault")
            for task in late:
                task.cancel()

    def _longest(self) -> float:
        """Seconds that the whole load takes on one worker, and what slow readers add."""
        tokens = sum(r.n * (len(r.prompt) + r.sampling.max_tokens) for r in self.scenario.requests)
        steps = sum(r.n * r.sampling.max_tokens for r in self.scenario.requests)
        pauses = max((r.read_pause * r.sampling.max_tokens for r in self.scenario.requests), default=0.0)
        return 2 * (tokens * self.scenario.token_s + steps * self.scenario.step_s) + pauses

    def _at_rest(self) -> None:
        partitioned = any(f.kind in NO_LEASE_SWEPT for f in self.scenario.faults)
        for worker in self.workers.values():
            if worker.life is None:
                continue
            for what in worker.life.unrest():
                self.judge.violated(f"at rest: {what}")
            swept = worker.life.loop.extras().get("leases_swept", 0)
            if swept and not partitioned:
                self.judge.violated(f"{worker.slot}: {swept} leases were swept without a partition")
        for number, router in enumerate(self.routers):
            if len(router.dispatcher):
                self.judge.violated(f"at rest: router {number} has {len(router.dispatcher)} choices open")
            if counts := router.view.own_counts():
                self.judge.violated(f"at rest: router {number} counts {counts}")

    def _end(self) -> None:
        for worker in self.workers.values():
            if worker.life is not None:
                self._dead.append(worker.life)
                worker.kill()
        for life in self._dead:
            life.memory.close()

    def _unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.judge.violated(f"unhandled: {context.get('message')}: {error!r}")


@asynccontextmanager
async def _many(parts: Any) -> AsyncIterator[list[Any]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(part) for part in parts]


class Complaints(logging.Handler):
    """Turns what the product logs as an error into a violation: nothing in a run is our own mistake."""

    def __init__(self, judge: Judge) -> None:
        super().__init__(logging.ERROR)
        self._judge = judge

    def emit(self, record: logging.LogRecord) -> None:
        """Notes the record."""
        error = record.exc_info[1] if record.exc_info else None
        self._judge.violated(f"logged: {record.getMessage()} {error!r}")
