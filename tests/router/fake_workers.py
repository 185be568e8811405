"""A router's dispatcher with workers that speak gRPC, a roster and an index, and the oracle's answers collected."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace

import msgspec
from prometheus_client import CollectorRegistry

from baton.cluster.metering.telemetry import RouterMetrics
from baton.cluster.prefix_index import HASH_BYTES
from baton.protos.nouns import Sampling
from baton.router.adapters.registry import AdapterRegistry
from baton.router.compose.core import CoreDependencies, RouterCore, running_core
from baton.router.dispatch.dispatcher import Dispatcher
from baton.router.dispatch.placing import LastWords
from baton.router.dispatch.runner import DispatchSettings
from baton.router.dispatch.view import ClusterView
from baton.router.request.context import RequestContext
from baton.router.request.context_class import ContextClass
from baton.router.request.request import ChoiceStream, RouterRequest
from baton.router.request.weights import WeightsPin
from tests.router.fake_prefill import FakePrefill
from tests.router.fake_services import FakeDecode, FakeRoster, FakeWorker

PATIENT = DispatchSettings(worker_wait_s=30.0, full_wait_s=0.05, late_reply_s=30.0, stall_s=30.0)
"""How long a router waits where nothing is to be lost: longer than a busy machine keeps anybody waiting."""
IMPATIENT = msgspec.structs.replace(PATIENT, worker_wait_s=0.3)
"""For tests in which nobody comes, so that their router waits only a short time."""


class FakeIndex:
    """Says the same to everybody; keeps what it was asked."""

    def __init__(self, held: dict[str, int] | None = None) -> None:
        self.held = held or {}
        self.asked: list[tuple[list[str], int]] = []

    async def longest(self, workers: Sequence[str], hashes: bytes) -> dict[str, int]:
        blocks = len(hashes) // HASH_BYTES
        self.asked.append((list(workers), blocks))
        return {k: min(self.held.get(k, 0), blocks) for k in workers}


class Cluster:
    """Fakes and the dispatcher before them."""

    def __init__(self, prefill: int, decode: int, **fields) -> None:
        self.p = [FakePrefill(f"p{i}") for i in range(prefill)]
        self.d = [FakeDecode(f"d{i}", **fields) for i in range(decode)]
        self.roster = FakeRoster()
        self.metrics = RouterMetrics(CollectorRegistry())
        self.core: RouterCore

    @property
    def dispatcher(self) -> Dispatcher:
        return self.core.dispatcher

    @property
    def view(self) -> ClusterView:
        return self.core.view

    def open(self, prompt: Sequence[int], max_tokens: int = 8, **fields) -> list[ChoiceStream]:
        request_id, n, pin = (
            fields.pop("request_id", "r"),
            fields.pop("n", 1),
            fields.pop("pin", None) or WeightsPin(),
        )
        sampling, context = Sampling(max_tokens=max_tokens), RequestContext(**fields)
        return self.dispatcher.open(RouterRequest(request_id, "m", tuple(prompt), sampling, n, context, pin=pin))

    async def start(self) -> None:
        for worker in (*self.p, *self.d):
            await worker.start()
            self.roster.join(worker)
        for p in self.p:
            p.decodes = {d.info.address: d for d in self.d}

    async def all_up(self, seconds: float = 30.0) -> None:
        want = len(self.roster.entries)
        await until(lambda: self.view.reachable("prefill") + self.view.reachable("decode") == want, seconds)

    async def silence(self, worker: FakeWorker, within_s: float = 0.3) -> None:
        """Stops a worker's engine; the router gives the worker up when a probe has waited for ``within_s`` seconds.

        Others have as long as ever: on a busy machine a healthy worker may take longer than that.
        """
        [link] = [link for link in self.view._links if link.info.worker_id == worker.info.worker_id]
        link._settings = msgspec.structs.replace(link._settings, stall_s=within_s)
        before = worker.probes
        await until(lambda: worker.probes >= before + 2)  # the first may be of those that would wait for long
        worker.hold_engine.clear()

    async def idle(self, seconds: float = 30.0) -> None:
        """Waits until nothing is left: tasks, counts, leases, calls, places in the queue."""
        await until(lambda: not self._left(), seconds, lambda: self._left())

    def _left(self) -> list[str]:
        left = [f"task {t.get_name()}" for t in self.dispatcher._open]
        left += [f"{d.info.worker_id} leases {list(d.leases)}" for d in self.d if d.leases]
        left += [f"{p.info.worker_id} runs {p.running}" for p in self.p if p.running]
        left += [str(self.view.local_counts())] if self.view.local_counts() else []
        queue = self.dispatcher._admission
        left += ["queue"] if queue._queue or any(queue._counted.values()) else []
        return left


async def until(done, seconds: float = 30.0, what=lambda: "") -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, f"never happened: {what()}"
        await asyncio.sleep(0.005)


async def collect(stream: ChoiceStream) -> list[int]:
    """Every id, with the indices checked: each once and in order."""
    ids: list[int] = []
    async for run in stream:
        assert run.output_index == len(ids)
        ids += run.token_ids
    return ids


async def collect_beyond(stream: ChoiceStream, worker: FakeDecode, tokens: int) -> list[int]:
    """Returns every id of an answer whose ``worker``, told to stall after ``tokens`` of them, is killed then."""
    reading = asyncio.create_task(collect(stream))
    await until(lambda: len(stream.emitted) >= tokens)
    await worker.die()
    return await reading


@asynccontextmanager
async def cluster(
    prefill: int = 1,
    decode: int = 1,
    *,
    policy: str = "round_robin",
    max_queue: int = 100,
    local_max: int = 4,
    index: FakeIndex | None = None,
    settings: DispatchSettings = PATIENT,
    max_inflight_bytes: int = 1 << 30,
    adapters: AdapterRegistry | None = None,
    prepare: Callable[[Cluster], object] = lambda cluster: None,
    last_words: LastWords = lambda role, model_id: "",
    **fields,
) -> AsyncIterator[Cluster]:
    """Yields a running cluster; on leaving, everything is stopped and no task of the router may be left."""
    before = asyncio.all_tasks()
    running = Cluster(prefill, decode, **fields)
    prepare(running)
    await running.start()
    config = SimpleNamespace(
        policy=policy,
        context_classes=(ContextClass("short", 64), ContextClass("long", 0)),
        max_queue=max_queue,
        local_prefill_max_tokens=local_max,
        max_inflight_bytes=max_inflight_bytes,
    )
    try:
        given = CoreDependencies(
            running.roster,
            running.metrics,
            "router",
            index,
            clock=time.monotonic,
            rng=random.Random(1),
            adapters=adapters or AdapterRegistry(),
            last_words=last_words,
        )
        async with running_core(config, given, settings) as running.core:
            await running.all_up()
            yield running
    finally:
        for worker in (*running.p, *running.d):
            await worker.die()
    ours = ("r choice", "link", "session", "cluster", "load of")
    left = [t for t in asyncio.all_tasks() - before if t.get_name().startswith(ours)]
    assert not left, left
