"""Workers that really speak gRPC, and answer by an oracle instead of a model.

Each token is a hash of all tokens before it, so a wrong replay, a lost or a doubled token changes the answer.
They keep what they were told, and can be scripted to refuse, stall, fail and die.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace

import grpc
import grpc.aio
import msgspec

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
    to_info,
)
from baton.protos.measurements import WorkerLoad
from baton.protos.nouns import KvLayout, WorkerInfo
from baton.protos.rpc import abort
from baton.protos.v1 import common_pb2 as c
from baton.protos.v1 import worker_pb2 as w
from baton.protos.v1 import worker_pb2_grpc as stubs

LAYOUT = KvLayout("bytes", (), 256, "bytes")


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

    While ``hold_tokens`` is cleared, answers stall after ``free_tokens`` tokens. ``ends_late``: none is the last.
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
        self.free_tokens, self.ends_late = 0, False
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
        last = index + count >= admit.sampling.max_tokens and not self.ends_late
        return c.TokenRun(output_index=index, token_ids=ids, finish_reason="length" if last else "")

    def _end(self, request_id: str) -> None:
        lease = self.leases.pop(request_id, None)
        if lease is not None and lease.task is not None:
            lease.task.cancel()
