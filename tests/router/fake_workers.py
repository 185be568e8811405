"""Workers that really speak gRPC, and answer by an oracle instead of a model.

Each token is a hash of all tokens before it, so a wrong replay, a lost or a doubled token changes the answer.
They keep what they were told, and can be scripted to refuse, stall, fail and die.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from types import SimpleNamespace

import grpc
import grpc.aio
import msgspec
from prometheus_client import CollectorRegistry

from baton.cluster.metering.telemetry import RouterMetrics
from baton.cluster.prefix_index import HASH_BYTES
from baton.protos.adapter_id import adapter_id
from baton.protos.convert import error_to_pb, info_to_pb
from baton.protos.errors import (
    AdapterChanged,
    AdapterNotLoaded,
    AdapterRefused,
    AdapterUnknown,
    AlreadyCommitted,
    BatonError,
    Cancelled,
    LeaseUnknown,
    PoolExhausted,
    StaleEpoch,
    WorkerLost,
    to_info,
)
from baton.protos.measurements import WorkerLoad
from baton.protos.nouns import KvLayout, Sampling, WorkerInfo
from baton.protos.rpc import abort
from baton.protos.v1 import common_pb2 as c
from baton.protos.v1 import worker_pb2 as w
from baton.protos.v1 import worker_pb2_grpc as stubs
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

LAYOUT = KvLayout("bytes", (), 256, "bytes")
PATIENT = DispatchSettings(worker_wait_s=30.0, full_wait_s=0.05, late_reply_s=30.0, stall_s=30.0)
"""How long a router waits where nothing is to be lost: longer than a busy machine keeps anybody waiting."""
IMPATIENT = msgspec.structs.replace(PATIENT, worker_wait_s=0.3)
"""For tests in which nobody comes, so that their router waits only a short time."""


def next_token(tokens: Sequence[int], choice: int, adapter: str = "") -> int:
    seen = (list(tokens), choice, adapter) if adapter else (list(tokens), choice)
    digest = hashlib.blake2b(repr(seen).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % 1000


def answer_of(prompt: Sequence[int], count: int, choice: int = 0, adapter: str = "") -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, choice, adapter))
    return tokens[len(prompt) :]


def info(worker_id: str, role: str, **fields) -> WorkerInfo:
    defaults = {
        "incarnation": f"{worker_id}-1",
        "address": "127.0.0.1:1",
        "model_id": "m",
        "fingerprint": "f",
        "layout": LAYOUT,
        "max_model_len": 4096,
        "vocab_size": 1000,
        "eos_token_ids": (),
        "pages": 1000,
        "device": "paced:fake",
    }
    return WorkerInfo(worker_id=worker_id, role=role, **defaults | fields)


# What gRPC itself says: of the calls of a server that ends, and of one that serves another role's calls.
SERVER_SAYS = {Cancelled: grpc.StatusCode.CANCELLED, BatonError: grpc.StatusCode.UNIMPLEMENTED}


class FakeWorker(stubs.WorkerServicer):
    """A server on a free port; ``die`` breaks every connection at once.

    ``files`` are the digests of the adapters that it could read, by path; it holds ``most_adapters`` of them, and
    ``load_refusals`` are given to the next loads. What it holds is announced by ``announce``.
    """

    role = ""
    most_adapters = 1000
    says_incarnation = ""

    def __init__(self, worker_id: str, **fields) -> None:
        self.info = info(worker_id, self.role, **fields)
        self.server: grpc.aio.Server | None = None
        self.probes = 0
        self.hold_engine = asyncio.Event()
        self.hold_engine.set()
        self.engine_died: BatonError | None = None  # what a worker whose engine is gone says until its server ends
        self.files: dict[str, str] = {}
        self.loads: list[w.LoadAdapterRequest] = []
        self.unloads: list[str] = []
        self.load_refusals: list[BatonError] = []
        self.adapters: dict[str, str] = {}  # path by id, the least recently used first
        self.hold_loads = asyncio.Event()
        self.hold_loads.set()

    async def start(self, port: int = 0) -> None:
        """Serves on a free port, or on ``port``, which the caller keeps bound meanwhile (``held_port``)."""
        self.server = grpc.aio.server(options=[("grpc.so_reuseport", int(port > 0))])
        stubs.add_WorkerServicer_to_server(self, self.server)
        self.register(self.server)
        port = self.server.add_insecure_port(f"127.0.0.1:{port}")
        self.info = msgspec.structs.replace(self.info, address=f"127.0.0.1:{port}")
        await self.server.start()

    def register(self, server: grpc.aio.Server) -> None:
        raise NotImplementedError

    async def die(self) -> None:
        if self.server is not None:
            server, self.server = self.server, None
            await server.stop(None)

    async def Describe(self, request, context):
        return info_to_pb(self.info)

    async def LoadAdapter(self, request, context):
        self.loads.append(request)
        await self.hold_loads.wait()
        try:
            return w.AdapterInfo(id=self._load(request), path=request.path, rank=8, bytes=1)
        except BatonError as error:
            await abort(context, error)

    def _load(self, request: w.LoadAdapterRequest) -> str:
        if self.load_refusals:
            raise self.load_refusals.pop(0)
        digest = self.files.get(request.path)
        if digest is None:
            raise AdapterRefused(f"there is no adapter at {request.path}", "lora_path")
        if request.digest not in ("", digest):
            raise AdapterChanged(f"{request.path} has changed", "lora_path")
        found = adapter_id(request.name, digest)
        if found not in self.adapters and len(self.adapters) >= self.most_adapters:
            self.adapters.pop(next(iter(self.adapters)))
        self.adapters[found] = request.path
        return found

    async def UnloadAdapter(self, request, context):
        self.unloads.append(request.id)
        if self.adapters.pop(request.id, None) is None:
            await abort(context, AdapterUnknown(f"{request.id} is not held"))
        return w.AdapterInfo(id=request.id)

    def require_adapter(self, wanted: str) -> None:
        if wanted and wanted not in self.adapters:
            raise AdapterNotLoaded(f"{self.info.worker_id} doesn't hold {wanted}")

    def announce(self, roster: FakeRoster) -> None:
        """Says in the roster what it holds."""
        self.info = msgspec.structs.replace(self.info, adapters=tuple(sorted(self.adapters)))
        roster.join(self)

    async def Snapshot(self, request, context):
        self.probes += 1
        await self.hold_engine.wait()
        if self.engine_died is not None:
            await abort(context, self.engine_died)
        return w.PoolSnapshot(pages=self.info.pages, incarnation=self.says_incarnation)


@contextmanager
def held_port() -> Iterator[int]:
    """Reserves a port, which nobody else gets while the block runs, also while no server listens there."""
    with socket.socket() as holding:
        holding.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holding.bind(("127.0.0.1", 0))
        yield holding.getsockname()[1]


class FakeDecode(FakeWorker, stubs.DecodeWorkerServicer):
    """``refusals`` are given to the next Admits; holds stall.

    While ``hold_tokens`` is cleared, an answer stalls once its first ``free_tokens`` were written.
    """

    role = "decode"

    def __init__(self, worker_id: str, **fields) -> None:
        super().__init__(worker_id, **fields)
        self.admits: list[w.Admit] = []
        self.rearms: list[w.Rearm] = []
        self.cancels: list[tuple[str, str]] = []
        self.refusals: list[BatonError] = []
        self.rearm_refusals: list[BatonError] = []
        self.dies_at_rearm = False
        self.end_with: list[BatonError] = []
        self.hold_admits = asyncio.Event()
        self.hold_tokens = asyncio.Event()
        self.hold_admits.set()
        self.hold_tokens.set()
        self.pace_s = 0.0
        self.per_frame = 1
        self.free_tokens = 0
        self.held_blocks = 0
        self.pages_free = 1 << 30  # a page per lease
        self.granted: list[str] = []
        self.leases: dict[str, SimpleNamespace] = {}
        self.sessions = 0
        self.most = 0

    def register(self, server: grpc.aio.Server) -> None:
        stubs.add_DecodeWorkerServicer_to_server(self, server)

    def stall_after(self, tokens: int) -> None:
        """Makes each answer stall here, from now on, once so many tokens were written."""
        self.free_tokens = tokens
        self.hold_tokens.clear()

    async def Session(self, requests, context):
        self.sessions += 1
        out: asyncio.Queue[w.SessionDown] = asyncio.Queue()
        mine: set[str] = set()
        reading = asyncio.create_task(self._take(requests, out, mine))
        try:
            while True:
                await context.write(await out.get())
        finally:
            reading.cancel()
            for request_id in mine:
                self._end(request_id)

    async def _take(self, requests, out, mine) -> None:
        async for up in requests:
            kind = up.WhichOneof("message")
            if kind == "hello":
                out.put_nowait(w.SessionDown(welcome=w.Welcome(worker=info_to_pb(self.info))))
            elif kind == "admit":
                await self._admit(up.admit, out, mine)
            elif kind == "rearm":
                self._rearm(up.rearm, out)
            elif kind == "cancel":
                self.cancels.append((up.cancel.request_id, up.cancel.reason))
                self._end(up.cancel.request_id)

    async def _admit(self, admit: w.Admit, out, mine) -> None:
        self.admits.append(admit)
        if self.engine_died is not None:
            return  # nobody is there to answer
        if len(self.leases) >= self.pages_free and not self.refusals:
            self.refusals.append(PoolExhausted("no page"))
        try:
            self.require_adapter(admit.adapter_id)
        except BatonError as error:
            self.refusals.append(error)
        if self.refusals:
            refused = w.Refused(request_id=admit.request_id, error=error_to_pb(to_info(self.refusals.pop(0))))
            out.put_nowait(w.SessionDown(refused=refused))
            return
        lease = SimpleNamespace(
            admit=admit, id=random.randbytes(16), epoch=1, out=out, committed=False, task=None, received=[]
        )
        self.leases[admit.request_id] = lease
        self.most = max(self.most, len(self.leases))
        mine.add(admit.request_id)
        self.granted.append(admit.request_id)
        lease.task = asyncio.create_task(self._answer(lease))

    async def _answer(self, lease) -> None:
        await self.hold_admits.wait()
        admitted = w.Admitted(
            request_id=lease.admit.request_id, lease=lease.id, epoch=1, held_blocks=self.held_blocks
        )
        lease.out.put_nowait(w.SessionDown(admitted=admitted))
        if lease.admit.local:
            await self._write(lease)

    def _rearm(self, rearm: w.Rearm, out) -> None:
        self.rearms.append(rearm)
        if self.dies_at_rearm:
            self._dying = asyncio.create_task(self.die())
            return
        lease = self.leases.get(rearm.request_id)
        error = self.rearm_refusals.pop(0) if self.rearm_refusals else None
        if lease is None or lease.id != rearm.lease:
            error = LeaseUnknown("no such lease")
        elif lease.committed:
            error = AlreadyCommitted("it decodes")
        if error is not None:
            refused = w.Refused(request_id=rearm.request_id, error=error_to_pb(to_info(error)))
            out.put_nowait(w.SessionDown(refused=refused))
            return
        assert rearm.epoch == lease.epoch + 1
        lease.epoch = rearm.epoch
        rearmed = w.Rearmed(request_id=rearm.request_id, epoch=rearm.epoch, received_blocks=lease.received)
        out.put_nowait(w.SessionDown(rearmed=rearmed))

    def commit(self, request: w.PrefillRequest) -> None:
        """Commits a handoff as a decode worker does."""
        lease = self.leases.get(request.request_id)
        if lease is None or lease.id != request.lease:
            raise LeaseUnknown("no such lease")
        if lease.epoch != request.epoch:
            raise StaleEpoch(f"epoch {request.epoch}, in force is {lease.epoch}")
        assert tuple(lease.admit.token_ids) == tuple(request.token_ids)
        lease.committed = True
        lease.task = asyncio.create_task(self._write(lease))

    async def _write(self, lease) -> None:
        """Every token from the first index on, a few per frame."""
        admit, tokens, sent = lease.admit, list(lease.admit.token_ids), 0
        while True:
            if sent >= self.free_tokens:
                await self.hold_tokens.wait()
            await asyncio.sleep(self.pace_s)
            if self.end_with:
                ended = w.Ended(request_id=admit.request_id, error=error_to_pb(to_info(self.end_with.pop(0))))
                self.leases.pop(admit.request_id, None)
                lease.out.put_nowait(w.SessionDown(ended=ended))
                return
            run = self._run(admit, tokens)
            output = w.RequestTokens(request_id=admit.request_id, run=run, cached_tokens=0 if sent else 7)
            if run.finish_reason:
                self.leases.pop(admit.request_id, None)
            lease.out.put_nowait(w.SessionDown(tokens=w.TokenFrame(step=sent, outputs=[output])))
            sent += len(run.token_ids)
            if run.finish_reason:
                return

    def _run(self, admit: w.Admit, tokens: list[int]) -> c.TokenRun:
        index = len(tokens) - admit.prompt_tokens
        count = min(self.per_frame, admit.sampling.max_tokens - index)
        ids = answer_of(tokens, count, admit.choice, admit.adapter_id)
        tokens += ids
        last = index + count >= admit.sampling.max_tokens
        return c.TokenRun(output_index=index, token_ids=ids, finish_reason="length" if last else "")

    def _end(self, request_id: str) -> None:
        lease = self.leases.pop(request_id, None)
        if lease is not None and lease.task is not None:
            lease.task.cancel()


class FakePrefill(FakeWorker, stubs.PrefillWorkerServicer):
    """``failures`` are raised by the next calls; ``hold`` stalls; ``lose_reply`` commits and then fails."""

    role = "prefill"

    def __init__(self, worker_id: str, **fields) -> None:
        super().__init__(worker_id, **fields)
        self.decodes: dict[str, FakeDecode] = {}
        self.requests: list[w.PrefillRequest] = []
        self.failures: list[BatonError] = []
        self.hold = asyncio.Event()
        self.hold.set()
        self.lose_reply = False
        self.reply_after_s = 0.0
        self.die_at_call = False
        self.cancelled = 0
        self.running = 0
        self.most = 0

    def register(self, server: grpc.aio.Server) -> None:
        stubs.add_PrefillWorkerServicer_to_server(self, server)

    async def Prefill(self, request, context):
        self.requests.append(request)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            return await self._prefill(request)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        except BatonError as error:
            if error is self.engine_died and (code := SERVER_SAYS.get(type(error))):
                await context.abort(code, error.message)
            await abort(context, error)
        finally:
            self.running -= 1

    async def _prefill(self, request: w.PrefillRequest) -> w.PrefillResponse:
        if self.die_at_call:
            self._dying = asyncio.create_task(self.die())
        await self.hold.wait()
        if self.failures:
            raise self.failures.pop(0)
        if self.engine_died is not None:
            raise self.engine_died
        self.require_adapter(request.adapter_id)
        if (decode := self.decodes.get(request.decode_address)) is None:
            raise WorkerLost("nobody answers there", "decode_address")
        decode.commit(request)
        if self.lose_reply:
            raise WorkerLost("the reply was lost")
        await asyncio.sleep(self.reply_after_s)
        index = len(request.token_ids) - request.prompt_tokens
        token = next_token(request.token_ids, request.choice, request.adapter_id)
        reason = "length" if index + 1 >= request.sampling.max_tokens else ""
        stations = [c.Station(name="queue", seconds=0.1), c.Station(name="prefill", seconds=0.2)]
        stations.append(c.Station(name="transfer", seconds=0.3))
        first = c.TokenRun(output_index=index, token_ids=[token], finish_reason=reason)
        return w.PrefillResponse(first=first, cached_tokens=7, stations=stations)


class FakeRoster:
    """Holds the workers that joined, as the roster would give them."""

    def __init__(self) -> None:
        self.entries: dict[str, SimpleNamespace] = {}

    def join(self, worker: FakeWorker | WorkerInfo, load: WorkerLoad = WorkerLoad()) -> None:
        who = worker if isinstance(worker, WorkerInfo) else worker.info
        self.entries[who.worker_id] = SimpleNamespace(info=who, load=load)

    def leave(self, worker_id: str) -> None:
        del self.entries[worker_id]

    def snapshot(self) -> dict[str, SimpleNamespace]:
        return dict(self.entries)


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
