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

import msgspec
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from baton.cluster.metering import telemetry
from baton.decode_worker.engine.loop import DecodeLimits, DecodeLoop
from baton.decode_worker.io import service as decode_service
from baton.decode_worker.io.intake import Intake
from baton.decode_worker.io.router_session import RouterSession, TokenFrame
from baton.decode_worker.io.service import DecodeService
from baton.engine.backends.paced.runner import PacedRunner, paced_answer
from baton.engine.steps.loop import EngineParts
from baton.kv.exchange.fetch import BlockFetcher
from baton.kv.exchange.filling import Filler
from baton.kv.exchange.source import BlockSource, FetchedPage
from baton.kv.exchange.warming import Warmer
from baton.kv.memory.host_pages import PageMemory
from baton.kv.pages.pool import PagePool
from baton.kv.transport.loopback import LoopbackTransport
from baton.prefill_worker.engine.loop import PrefillLoop
from baton.prefill_worker.io import service as prefill_service
from baton.prefill_worker.io.handoff_frames import Sender
from baton.prefill_worker.io.service import PrefillCall, PrefillService
from baton.protos import channel as ch
from baton.protos.errors import Draining, StaleEpoch, WorkerLost
from baton.protos.nouns import EngineRequest, Sampling
from tests.kernels.thorough import first_now

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
        warmer = Warmer(self.p.filler, fetcher, self.p.spec.fingerprint, self.p.spec.layout.fidelity)
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


async def test_every_way_gives_the_answer_that_the_request_has_alone() -> None:
    async with house() as h:
        requests = [request(f"r{n}", prompt_of(n, n % 3), max_tokens=1 + n % 9) for n in range(1, 200, 13)]
        answers = await asyncio.gather(*(h.answer(r, local=i % 3 == 0) for i, r in enumerate(requests)))
        assert answers == [oracle(r) for r in requests]
        assert await h.settles()


async def test_choices_after_the_first_find_its_blocks_on_the_decode_worker() -> None:
    async with house() as h:
        choices = [request(f"c{i}", prompt_of(100), i, temperature=1.0, seed=5) for i in range(4)]
        assert await h.answer(choices[0]) == oracle(choices[0])
        for choice in choices[1:]:
            admitted = await h.admit(choice, local=True)
            assert admitted.held_blocks == 6
            await h.router.finished[choice.request_id].wait()
            assert h.router.tokens[choice.request_id] == oracle(choice)
        assert await h.settles()


async def test_a_second_prefill_after_a_rearm_ships_only_what_is_missing() -> None:
    async with house() as h:
        r = request("r", prompt_of(500))
        admitted = await h.admit(r)
        first = asyncio.ensure_future(h.prefill.prefill(h.call(r, admitted)))
        while h.intake.received_blocks < 5:
            await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        h.decode.rearm(h.router.session, "r", admitted.lease, 2)
        rearmed = await h.router.said["r"].get()
        assert len(rearmed.received_blocks) >= 5
        with pytest.raises(StaleEpoch):
            await h.prefill.prefill(h.call(r, admitted))
        result = await h.prefill.prefill(h.call(r, admitted, 2, rearmed.received_blocks))
        assert result.shipped_blocks == 32 - len(rearmed.received_blocks)
        await h.router.finished["r"].wait()
        assert h.router.tokens["r"] == oracle(r)
        assert await h.settles()


async def test_a_closed_session_leaves_nothing_behind() -> None:
    async with house() as h:
        requests = [request(f"r{n}", prompt_of(100, n), max_tokens=400) for n in range(6)]
        leases = [await h.admit(r, local=i % 2 == 0) for i, r in enumerate(requests)]
        calls = [asyncio.ensure_future(h.prefill.prefill(h.call(requests[i], leases[i]))) for i in (1, 3, 5)]
        await asyncio.sleep(0.003)
        h.decode.close_session(h.router.session)
        await asyncio.gather(*calls, return_exceptions=True)
        assert await h.settles()


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


@pytest.mark.parametrize(("pages", "seed"), first_now([(60, 1), (300, 3), (60, 2), (300, 4)], 2))
async def test_whatever_breaks_answers_are_right_and_both_pools_come_back(pages: int, seed: int) -> None:
    async with house(pages) as h:
        chaos = Chaos(h, seed)
        await asyncio.gather(*(chaos.client(n) for n in range(150)))
        assert await h.settles()
        assert chaos.good > 20  # of 150, fewer the busier the machine
        assert chaos.gone > 10
        assert chaos.rearmed > 2
        assert h.d.loop.leases_swept == 0


async def test_a_request_id_can_be_used_again_at_once_after_its_cancel() -> None:
    async with house() as h:
        r = request("same", prompt_of(100), max_tokens=50)
        await h.admit(r, local=True)
        h.decode.cancel(h.router.session, "same", "retry")
        assert await h.answer(r, local=True) == oracle(r)
        assert await h.settles()


async def test_a_cancel_that_crosses_the_last_token_is_answered_all_the_same() -> None:
    async with house() as h:
        await h.admit(request("r", prompt_of(20), max_tokens=3), local=True)
        while h.d.loop.requests:
            await asyncio.sleep(0)
        assert any(isinstance(m, ch.Tokens) for m in h.d.outbox), "the last token is on its way"
        h.decode.cancel(h.router.session, "r", "client_gone")
        assert isinstance(await h.router.said["r"].get(), ch.Ended)
        assert await h.settles()


async def test_a_request_id_that_is_in_use_is_refused() -> None:
    async with house() as h:
        r = request("same", prompt_of(100), max_tokens=500)
        await h.admit(r, local=True)
        h.decode.admit(h.router.session, r, "m", True, 0.0, "")
        assert (await h.router.said["same"].get()).error.param == "request_id"


async def test_a_cancel_right_after_admit_closes_the_intake_for_good() -> None:
    async with house() as h:
        r = request("r", prompt_of(100))
        h.router.expect("r")
        h.decode.admit(h.router.session, r, "m", False, 0.0, "")
        h.decode.cancel(h.router.session, "r", "client_gone")
        assert isinstance(await h.router.said["r"].get(), ch.Ended)
        assert not h.intake._by_key
        assert await h.settles()


async def test_another_model_is_refused_by_name() -> None:
    async with house() as h:
        h.router.expect("r")
        h.decode.admit(h.router.session, request("r", [1]), "other", True, 0.0, "")
        assert (await h.router.said["r"].get()).error.type == "ModelNotFound"


async def test_spans_of_both_workers_hang_under_the_routers(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    for module in (prefill_service, decode_service):
        tracer = provider.get_tracer("test")
        monkeypatch.setattr(
            module,
            "open_span",
            lambda n, t, a, tracer=tracer: tracer.start_span(n, telemetry._context(t), attributes=a),
        )
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with house() as h:
        r = request("r", prompt_of(100))
        h.router.expect("r")
        h.decode.admit(h.router.session, r, "m", False, 0.0, parent)
        admitted = await h.router.said["r"].get()
        await h.prefill.prefill(msgspec.structs.replace(h.call(r, admitted), traceparent=parent))
        await h.router.finished["r"].wait()
        assert await h.settles()
    spans = {s.name: s for s in exporter.get_finished_spans()}
    assert set(spans) == {"prefill", "transfer", "decode"}
    assert all(s.parent is not None and s.parent.span_id == 0xB7AD6B7169203331 for s in spans.values())
    transfer = spans["transfer"]
    assert 0 <= transfer.attributes["baton.kv.exposed_seconds"] * 1e9 <= transfer.end_time - transfer.start_time


async def test_a_lost_engine_ends_everything_with_worker_lost() -> None:
    async with house() as h:
        r, q = request("r", prompt_of(900), max_tokens=500), request("q", prompt_of(90), max_tokens=900)
        call = asyncio.ensure_future(h.prefill.prefill(h.call(r, await h.admit(r))))
        await h.admit(q, local=True)
        h.prefill.lost(WorkerLost("gone"))
        with pytest.raises(WorkerLost):
            await call
        h.decode.lost(WorkerLost("gone"))
        assert (await h.router.said["q"].get()).error.type == "WorkerLost"


async def test_a_drain_whose_grace_is_over_fails_prompts_with_draining() -> None:
    async with house() as h:
        r = request("r", prompt_of(1400))
        call = asyncio.ensure_future(h.prefill.prefill(h.call(r, await h.admit(r))))
        await asyncio.sleep(0)
        assert h.prefill.cancel_all("draining") == 1
        with pytest.raises(Draining):
            await call


async def test_fetch_gives_the_cached_blocks_and_unpins_them() -> None:
    async with house() as h:
        r = request("r", prompt_of(100))
        await h.answer(r)
        hashes = tuple(h.p.pool.findable())
        pages = [p async for p in h.p.source.fetch("m", (*hashes, b"x" * 32), h.p.spec.layout)]
        assert len(pages) == 6
        assert await h.settles()


@pytest.mark.parametrize(("address", "said", "fetched"), [("decode", 9, 9), ("decode", 99, 9), ("nowhere", 9, 0)])
async def test_a_prefill_worker_fetches_what_the_decode_worker_holds(address: str, said: int, fetched: int) -> None:
    async with house() as h:
        first = request("first", prompt_of(100), max_tokens=60)
        answer = await h.answer(first, local=True)  # only the decode worker has prompt and answer
        second = request("second", [*prompt_of(100), *answer, *prompt_of(30, 2)])
        admitted = await h.admit(second)
        call = msgspec.structs.replace(h.call(second, admitted), fetch_address=address, fetch_blocks=said)
        result = await h.prefill.prefill(call)
        assert (result.fetched_blocks, result.cached_tokens) == (fetched, 16 * fetched)
        await h.router.finished["second"].wait()
        assert h.router.tokens["second"] == oracle(second)
        assert await h.settles()


async def test_a_prefill_that_is_cancelled_while_it_fetches_leaves_nothing_behind() -> None:
    async with house() as h:
        await h.answer(request("first", prompt_of(400)), local=True)
        for turns in range(1, 40, 3):
            second = request(f"second{turns}", [*prompt_of(400), turns])
            admitted = await h.admit(second)
            call = msgspec.structs.replace(h.call(second, admitted), fetch_address="decode", fetch_blocks=25)
            prefill = asyncio.ensure_future(h.prefill.prefill(call))
            for _ in range(turns):
                await asyncio.sleep(0)
            prefill.cancel()
            await asyncio.gather(prefill, return_exceptions=True)
            h.decode.cancel(h.router.session, second.request_id, "test")
            h.p.pool.check()
        assert await h.settles()
