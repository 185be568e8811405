"""A simulated worker: the product's loops, pools, services and gRPC shells, over simulated time and network.

The engine process and the I/O process are two tasks here. The engine takes the messages that have come, runs one
turn of its loop, and tells the I/O side what came of it when the step's time has passed.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from typing import Any

import msgspec

from baton.cluster.prefix_index import HASH_BYTES
from baton.decode_worker.engine.loop import DecodeLimits, DecodeLoop
from baton.decode_worker.io.intake import Intake
from baton.decode_worker.io.service import DecodeService
from baton.decode_worker.io.shell import DecodeShell
from baton.drill.network import Network
from baton.drill.process import Process
from baton.drill.rpc import Server, SimulatedDialer
from baton.drill.scenario import EOS, VOCABULARY, Scenario
from baton.engine.backends.paced.runner import PacedRunner
from baton.engine.step_loop import EngineParts, StepLoop
from baton.kv.exchange.fetch import BlockFetcher
from baton.kv.exchange.filling import Filler
from baton.kv.exchange.source import BlockSource
from baton.kv.exchange.warming import Warmer
from baton.kv.memory.host_pages import PageMemory
from baton.kv.pages.pool import PagePool
from baton.kv.transport.grpc import GrpcTransport, handoff_handler
from baton.prefill_worker.engine.loop import PrefillLoop
from baton.prefill_worker.io.handoff import Sender
from baton.prefill_worker.io.service import PrefillService
from baton.prefill_worker.io.shell import PrefillShell
from baton.protos import channel as ch
from baton.protos.nouns import PROTOCOL, WorkerInfo, WorkerLoad
from baton.protos.v1 import worker_pb2_grpc as stubs
from baton.worker.control import WorkerControl, WorkerShell

MODEL_ID = "m"
MODEL: dict[str, Any] = {"kv_bytes_per_token": 16, "vocab_size": VOCABULARY, "max_model_len": 2048}
LEASE_TTL_S = 30.0
IDLE_LOOK_S = 0.5
CHECK_EVERY = 8  # turns between two checks of the whole pool


class SimulatedWorker:
    """A worker's slot: at most one incarnation lives in it at a time."""

    def __init__(self, slot: str, role: str, scenario: Scenario, network: Network) -> None:
        self.slot, self.role = slot, role
        self._scenario, self._network = scenario, network
        self._rng = random.Random(f"{scenario.seed} {slot}")
        self._lives = itertools.count(1)
        self.life: Life | None = None
        self.slow, self.stuck_until = 1.0, 0.0

    def start(self) -> Life:
        """Begins an incarnation."""
        assert self.life is None
        self.life = Life(self, next(self._lives), self._scenario, self._network, self._rng)
        self.life.begin()
        return self.life

    def kill(self) -> None:
        """Ends the incarnation without a word."""
        life, self.life = self.life, None
        if life is not None:
            self._network.process_died(life.process.name)
            life.process.kill()


class Life:
    """One incarnation of a worker."""

    def __init__(
        self, worker: SimulatedWorker, number: int, scenario: Scenario, network: Network, rng: random.Random
    ) -> None:
        self.worker, self._scenario, self._network = worker, scenario, network
        self.process = Process(f"{worker.slot}#{number}")
        self._now = asyncio.get_running_loop().time
        runner = PacedRunner("drill", step_seconds=lambda s: 0.0, clock=self._now, eos_token_ids=(EOS,), **MODEL)
        self.memory = PageMemory.create(scenario.pages, runner.spec.layout.page_bytes)
        runner.bind(self.memory.view(), scenario.pages)
        self.pool, self.spec = PagePool(scenario.pages), runner.spec
        self.loop: StepLoop = self._loop(runner, rng)
        self._inbox: list[Any] = []
        self._outbox: list[Any] = []
        self._news = asyncio.Event()
        self.load = WorkerLoad()
        self.held: dict[bytes, None] = {}  # blocks that are findable here, by the index's truncated hashes
        self.turns = 0
        self.info = self._info(number)

    def _info(self, number: int) -> WorkerInfo:
        return WorkerInfo(
            worker_id=self.worker.slot,
            incarnation=f"{self.worker.slot}-{number}",
            role=self.worker.role,
            address=f"{self.worker.slot}:8100",
            model_id=MODEL_ID,
            fingerprint=self.spec.fingerprint,
            layout=self.spec.layout,
            max_model_len=self.spec.max_model_len,
            vocab_size=self.spec.vocab_size,
            eos_token_ids=self.spec.eos_token_ids,
            pages=self._scenario.pages,
            max_batch=self._scenario.max_batch,
            device="paced:drill",
            protocol=PROTOCOL,
        )

    def _loop(self, runner: PacedRunner, rng: random.Random) -> StepLoop:
        chunk, batch = self._scenario.chunk_tokens, self._scenario.max_batch
        swaps = self._scenario.swap and self.worker.role == "decode"
        parts = EngineParts.around(runner, self.pool, self, self._now, memory=self.memory.view() if swaps else None)
        if self.worker.role == "prefill":
            return PrefillLoop(parts, chunk_tokens=chunk, max_batch=batch)
        return DecodeLoop(parts, DecodeLimits(max_batch=batch, chunk_tokens=chunk), rng.randbytes)

    # ---- both processes ----

    def begin(self) -> None:
        """Starts the engine, the I/O side and the server."""
        self.process.spawn(self._engine(), "engine")
        server = Server(self.process.spawn)
        self._serve(server)
        self._network.listen(self.info.address, self.process.name, server)

    def _serve(self, server: Server) -> None:
        tell, layout = self.tell, self.spec.layout
        dialer = SimulatedDialer(self._network, self.process.name)
        self.source = BlockSource(tell, self.memory, layout, MODEL_ID)
        self.filler = Filler(tell, self.memory, self._now)
        fetcher = BlockFetcher(MODEL_ID, layout, dialer)
        warmer = Warmer(self.filler, fetcher, self.spec.fingerprint, layout.fidelity)
        self.intake = Intake(self.memory, layout, self.spec.fingerprint, tell)
        self.service: PrefillService | DecodeService
        if self.worker.role == "prefill":
            sender = Sender(self.worker.slot, MODEL_ID, self.spec.fingerprint, layout)
            self.service = PrefillService(
                tell, self.memory, sender, GrpcTransport(dialer), self._now, warmer=warmer
            )
            stubs.add_PrefillWorkerServicer_to_server(PrefillShell(self.service), server)
        else:
            self.service = DecodeService(tell, self.intake, MODEL_ID, LEASE_TTL_S, warmer)
            stubs.add_DecodeWorkerServicer_to_server(DecodeShell(self.service, lambda: self.control.info), server)
            server.add_generic_rpc_handlers((handoff_handler(self.intake.accept),))
        self.control = WorkerControl(self.info, tell, self.service)
        stubs.add_WorkerServicer_to_server(WorkerShell(self.control, self.source), server)

    # ---- the engine's side ----

    def send(self, message: Any) -> None:
        """Takes a message of the loop; the I/O side gets it when the step is over."""
        self._outbox.append(message)

    def poll(self, timeout_s: float) -> list[Any]:
        """Is never called: this class waits for messages itself."""
        raise AssertionError("the simulated engine doesn't poll")

    async def _engine(self) -> None:
        while True:
            await self._until_unstuck()
            messages, self._inbox = self._inbox, []
            before = self.loop.log.tokens_prefilled + self.loop.log.tokens_decoded
            busy = self.loop.turn(messages)
            computed = self.loop.log.tokens_prefilled + self.loop.log.tokens_decoded - before
            self.turns += 1
            if self.turns % CHECK_EVERY == 0:
                self.pool.check()
            if computed:
                step = self._scenario.step_s + computed * self._scenario.token_s
                await asyncio.sleep(step * self.worker.slow)
            said, self._outbox = self._outbox, []
            for message in said:
                self._take(message)
            if not busy and not self._inbox:
                await self._wait()

    async def _until_unstuck(self) -> None:
        left = self.worker.stuck_until - self._now()
        if left > 0:
            await asyncio.sleep(left)
            await self._until_unstuck()

    async def _wait(self) -> None:
        self._news.clear()
        try:
            async with asyncio.timeout(min(IDLE_LOOK_S, max(0.001, self.loop.patience()))):
                await self._news.wait()
        except TimeoutError:
            return

    # ---- the I/O side ----

    def tell(self, message: Any) -> None:
        """Sends the engine a message."""
        if self.process.alive:
            self._inbox.append(message)
            self._news.set()

    def _take(self, message: Any) -> None:
        if isinstance(message, ch.Stats):
            self.load = self._load(message)
        elif isinstance(message, ch.SnapshotIs):
            self.control.answered(message)
        elif isinstance(message, ch.Pinned):
            self.source.take(message)
        elif isinstance(message, ch.Filling):
            self.filler.take(message)
        elif isinstance(message, ch.CacheChanged):
            self._publish(message)
        elif not isinstance(message, ch.CacheIdle):
            self.service.take(message)

    def _publish(self, message: ch.CacheChanged) -> None:
        for block in message.removed:
            self.held.pop(block[:HASH_BYTES], None)
        self.held.update(dict.fromkeys(block[:HASH_BYTES] for block in message.added))

    def _load(self, stats: ch.Stats) -> WorkerLoad:
        return msgspec.structs.replace(
            self.load,
            running=stats.running,
            waiting=stats.waiting,
            waiting_tokens=stats.waiting_tokens,
            free_pages=stats.free_pages,
            cached_pages=stats.cached_pages,
            leased_pages=stats.leased_pages,
        )

    def unrest(self) -> list[str]:
        """Names everything that is still held here; empty at rest."""
        self.pool.check()
        counts = self.pool.snapshot_counts()
        held = {"leased pages": counts.leased, "quarantined pages": counts.quarantined, "leases": counts.leases}
        held |= {"requests of the service": self.service.active, "open streams": self.intake.open_streams}
        return [f"{self.process.name}: {count} {what}" for what, count in held.items() if count]
