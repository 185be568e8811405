"""A prefill and a decode worker in one event loop: real services, loops, pools, intake and handoff; no sockets.

Each engine's loop runs as a task that takes its messages in batches, so that every interleaving of the two
halves occurs; the paced oracle says what the answers must be.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from baton.decode_worker.engine.limits import DecodeLimits
from baton.decode_worker.engine.loop import DecodeLoop
from baton.decode_worker.io.intake import Intake
from baton.decode_worker.io.router_session import RouterSession, TokenFrame
from baton.decode_worker.io.service import DecodeService
from baton.engine.backends.paced.runner import PacedRunner, paced_answer
from baton.engine.steps.parts import EngineParts
from baton.kv.exchange.fetch import BlockFetcher
from baton.kv.exchange.filling import Filler
from baton.kv.exchange.source import BlockSource, FetchedPage
from baton.kv.exchange.warming import BlockKind, Warmer
from baton.kv.memory.host_pages import PageMemory
from baton.kv.pages.pool import PagePool
from baton.kv.transport.loopback import LoopbackTransport
from baton.prefill_worker.engine.loop import PrefillLoop
from baton.prefill_worker.io.handoff_frames import Sender
from baton.prefill_worker.io.service import PrefillCall, PrefillService
from baton.protos import channel as ch
from baton.protos.errors import WorkerLost
from baton.protos.nouns import EngineRequest, Sampling

MODEL: dict[str, Any] = {"kv_bytes_per_token": 32, "vocab_size": 997, "max_model_len": 4096}
PAGES = 300


class Engine:
    """An engine process as a task: messages in batches, one step per turn of the event loop."""

    def __init__(self, pages: int, make: Any) -> None:
        runner = PacedRunner("test", step_seconds=lambda s: 0.0, **MODEL)
        self.memory = PageMemory.create(pages, runner.spec.layout.page_bytes)
        runner.bind(self.memory.view(), pages)
        self.spec, self.pool = runner.spec, PagePool(pages)
        self.loop = make(EngineParts.around(runner, self.pool, self, lambda: 0.0))
        self.service: Any = None
        self.source = BlockSource(self.tell, self.memory, self.spec.layout, "m")
        self.filler = Filler(self.tell, self.memory, lambda: 0.0)
        self.inbox: list[Any] = []
        self.outbox: list[Any] = []
        self.news = asyncio.Event()

    def send(self, message: Any) -> None:
        """Queues a message of the loop, delivered later and in order."""
        self.outbox.append(message)

    def tell(self, message: Any) -> None:
        """Queues a message of the I/O side."""
        self.inbox.append(message)
        self.news.set()

    async def run(self) -> None:
        """Runs the loop's turns for ever."""
        while True:
            messages, self.inbox = self.inbox, []
            busy = self.loop.turn(messages)
            await asyncio.sleep(0)
            said, self.outbox = self.outbox, []
            for message in said:
                if isinstance(message, ch.Pinned):
                    self.source.take(message)
                elif isinstance(message, ch.Filling):
                    self.filler.take(message)
                elif not isinstance(message, (ch.Stats, ch.CacheChanged)):
                    self.service.take(message)
            if not busy and not self.inbox:
                self.news.clear()
                await self.news.wait()

    def at_baseline(self) -> bool:
        """Returns whether nothing is leased, quarantined or remembered."""
        self.pool.check()
        counts = self.pool.snapshot_counts()
        return not (counts.leased or counts.quarantined or counts.leases)


class Router:
    """A session's other end: what came for each request."""

    def __init__(self, session: RouterSession) -> None:
        self.session = session
        self.tokens: dict[str, list[int]] = {}
        self.said: dict[str, asyncio.Queue[Any]] = {}
        self.finished: dict[str, asyncio.Event] = {}

    def expect(self, request_id: str) -> None:
        """Prepares to collect the answer to ``request_id``."""
        self.tokens[request_id] = []
        self.said[request_id], self.finished[request_id] = asyncio.Queue(), asyncio.Event()

    async def read(self) -> None:
        """Collects tokens and messages for ever."""
        async for item in self.session.outgoing():
            if not isinstance(item, TokenFrame):
                self.said[item.request_id].put_nowait(item.message)
                continue
            for request_id, output in item.outputs.items():
                assert output.run.output_index == len(self.tokens[request_id])
                self.tokens[request_id] += output.run.token_ids
                if output.run.finish_reason:
                    self.finished[request_id].set()


class Fetcher(BlockFetcher):
    """Asks an engine of the same process."""

    def __init__(self, engines: dict[str, Engine], layout: Any) -> None:
        super().__init__("m", layout)
        self._engines, self._asked = engines, layout

    async def blocks(self, address: str, hashes: tuple[bytes, ...]) -> AsyncGenerator[FetchedPage, None]:
        if address not in self._engines:
            raise WorkerLost(f"nobody at {address}")
        async for page in self._engines[address].source.fetch("m", hashes, self._asked):
            yield page


class House:
    """Both workers, and a router's calls."""

    def __init__(self, pages: int) -> None:
        self.d = Engine(
            pages,
            lambda parts: DecodeLoop(parts, DecodeLimits(max_batch=16, chunk_tokens=64), os.urandom),
        )
        self.p = Engine(pages, lambda parts: PrefillLoop(parts, chunk_tokens=64, max_batch=8))
        self.intake = Intake(self.d.memory, self.d.spec.layout, self.d.spec.fingerprint, self.d.tell)
        self.decode = DecodeService(self.d.tell, self.intake, "m", 30.0)
        self.transport = LoopbackTransport({"decode": self.intake.accept})
        sender = Sender("prefill-0", "m", self.p.spec.fingerprint, self.p.spec.layout)
        fetcher = Fetcher({"decode": self.d}, self.p.spec.layout)
        warmer = Warmer(self.p.filler, fetcher, BlockKind(self.p.spec.fingerprint, self.p.spec.layout.fidelity))
        self.prefill = PrefillService(
            self.p.tell, self.p.memory, sender, self.transport, lambda: 0.0, warmer=warmer
        )
        self.d.service, self.p.service = self.decode, self.prefill
        self.router = Router(self.decode.open_session("router"))

    async def admit(self, request: EngineRequest, local: bool = False) -> ch.Admitted:
        self.router.expect(request.request_id)
        self.decode.admit(self.router.session, request, "m", local, 0.0, "")
        answered = await self.router.said[request.request_id].get()
        if isinstance(answered, ch.Refused):
            raise AssertionError(answered.error)
        return answered

    def call(self, request: EngineRequest, lease: ch.Admitted, epoch: int = 1, received: Any = ()) -> PrefillCall:
        return PrefillCall(request, "m", "decode", lease.lease, epoch, lease.held_blocks, tuple(received))

    async def answer(self, request: EngineRequest, local: bool = False) -> list[int]:
        admitted = await self.admit(request, local)
        if not local:
            await self.prefill.prefill(self.call(request, admitted))
        await self.router.finished[request.request_id].wait()
        return self.router.tokens[request.request_id]

    async def settles(self) -> bool:
        for _ in range(10_000):
            if self.p.at_baseline() and self.d.at_baseline() and not self.decode.active and not self.prefill.active:
                return not self.intake.open_streams and not self.d.loop.receives and not self.p.loop.shipments
            await asyncio.sleep(0.001)
        return False


@asynccontextmanager
async def house(pages: int = PAGES) -> AsyncIterator[House]:
    built = House(pages)
    tasks = [asyncio.ensure_future(work) for work in (built.d.run(), built.p.run(), built.router.read())]
    try:
        yield built
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await built.transport.close()


def request(name: str, prompt: list[int], choice: int = 0, **sampling: Any) -> EngineRequest:
    fields = {"temperature": 0.0, "max_tokens": 8} | sampling
    return EngineRequest(name, tuple(prompt), len(prompt), Sampling(**fields), choice)


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(7 * i + 131 * salt + 3) % 997 for i in range(length)]


def oracle(r: EngineRequest) -> list[int]:
    return paced_answer(r.token_ids, r.sampling, r.choice, **MODEL)


class Chaos:
    """Clients that leave, prefills that break and are tried again, a pool that may be too small for all."""

    def __init__(self, h: House, seed: int) -> None:
        self.h, self.rng = h, random.Random(seed)
        self.good = self.gone = self.rearmed = 0

    async def client(self, n: int) -> None:
        """One request, patient or not; its answer is right whenever there is one."""
        rng = self.rng
        r = request(f"r{n}", prompt_of(rng.randrange(1, 300), n % 5), max_tokens=rng.randrange(1, 40))
        await asyncio.sleep(rng.random() * 0.05)
        try:
            async with asyncio.timeout(rng.random() * 0.05 if rng.random() < 0.5 else 200):
                await self.answered(r)
        except TimeoutError:
            self.gone += 1
            self.h.decode.cancel(self.h.router.session, r.request_id, "client_gone")
        else:
            self.good += 1
            assert self.h.router.tokens[r.request_id] == oracle(r)

    async def answered(self, r: EngineRequest) -> None:
        """Admit until there is room, prefill until it works, wait for the end."""
        local, lease = self.rng.random() < 0.3, None
        while lease is None:
            try:
                lease = await self.h.admit(r, local)
            except AssertionError:
                await asyncio.sleep(0.002)
        epoch, received = 1, ()
        while not local and not await self.prefilled(self.h.call(r, lease, epoch, received)):
            self.h.decode.rearm(self.h.router.session, r.request_id, lease.lease, epoch + 1)
            answered = await self.rearm_answer(r.request_id)
            if not isinstance(answered, ch.Rearmed):
                break  # it is decoding already, or has even ended
            epoch, received, self.rearmed = answered.epoch, answered.received_blocks, self.rearmed + 1
        await self.h.router.finished[r.request_id].wait()

    async def prefilled(self, call: PrefillCall) -> bool:
        """One try, which may be broken off at any moment."""
        running = asyncio.ensure_future(self.h.prefill.prefill(call))
        try:
            if self.rng.random() < 0.4:
                await asyncio.sleep(self.rng.random() * 0.004)
                running.cancel()
            await asyncio.wait({running})
            return not running.cancelled() and running.exception() is None
        finally:
            running.cancel()

    async def rearm_answer(self, request_id: str) -> Any:
        """The answer, or None where the request's end came instead."""
        said = asyncio.ensure_future(self.h.router.said[request_id].get())
        over = asyncio.ensure_future(self.h.router.finished[request_id].wait())
        await asyncio.wait({said, over}, return_when=asyncio.FIRST_COMPLETED)
        over.cancel()
        return said.result() if said.done() else said.cancel() and None
