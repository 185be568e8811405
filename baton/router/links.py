"""Connections to workers: one Session per decode worker, one channel per prefill worker, kept up by themselves.

Knows nothing of policies, queues or Redis: ``sync`` is told who should be there. A link that is ``up`` is the
truth about a worker being alive; a link tells the incarnation it expects from another one on the same port.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Mapping
from typing import Any

import grpc
import grpc.aio

from baton.protos.errors import BatonError, Cancelled, WorkerLost
from baton.protos.nouns import PROTOCOL, WorkerInfo
from baton.protos.v1 import worker_pb2 as w
from baton.protos.v1 import worker_pb2_grpc as stubs
from baton.router.calls import from_rpc, heed_cancel, said
from baton.router.session import Lease, Session, Sink

log = logging.getLogger("baton.router")

HELLO_TIMEOUT_S = 5.0
BACKOFF_S = (0.05, 1.0)
CHANNEL_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
]
Connect = Callable[[str], grpc.aio.Channel]


def connect(address: str) -> grpc.aio.Channel:
    """A plain channel with keepalive on."""
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)


class Link:
    """A connection to one incarnation of a worker. ``run`` keeps it until it is cancelled."""

    def __init__(
        self,
        info: WorkerInfo,
        router_id: str,
        channel: grpc.aio.Channel,
        changed: Callable[[], None],
        rng: random.Random,
    ) -> None:
        self.info = info
        self.up = self._was_up = False
        self._router_id, self._channel, self._changed, self._rng = router_id, channel, changed, rng
        self._doubts = asyncio.Event()
        self._complaint = ""

    async def run(self) -> None:
        """Connect, hold, reconnect with growing pauses."""
        pause, longest = BACKOFF_S
        try:
            while True:
                if await self._tried():
                    pause = BACKOFF_S[0]
                heed_cancel()
                await asyncio.sleep(pause * self._rng.uniform(0.5, 1.0))
                pause = min(longest, pause * 2)
        finally:
            self._set(False)
            await self._channel.close()

    async def _tried(self) -> bool:
        """One connection's life; whether it ever was up."""
        self._was_up = False
        try:
            await self._hold()
        except BatonError as error:
            self._complain(error)
        except (grpc.aio.AioRpcError, TimeoutError) as error:
            log.debug("%s: %s", self.info.worker_id, error)
        finally:
            self._set(False)
        return self._was_up

    def _complain(self, error: BatonError) -> None:
        """Once for each reason, however often it is tried again."""
        if error.message != self._complaint:
            log.warning("%s %s: %s", self.info.role, self.info.worker_id, error)
        self._complaint = error.message

    async def _hold(self) -> None:
        raise NotImplementedError

    def _set(self, up: bool) -> None:
        if up != self.up:
            log.info("%s %s is %s", self.info.role, self.info.worker_id, "up" if up else "down")
            self.up = up
            self._was_up |= up
            self._changed()

    def _check(self, seen: w.WorkerInfo) -> None:
        if seen.protocol.split(".")[0] != PROTOCOL.split(".")[0]:
            raise WorkerLost(f"{seen.worker_id} speaks protocol {seen.protocol}, this router {PROTOCOL}")
        if seen.incarnation != self.info.incarnation:
            raise WorkerLost(f"{self.info.address} is now another incarnation of {seen.worker_id}")


class DecodeLink(Link):
    """Holds the one Session with a decode worker."""

    _session: Session | None = None

    def admit(self, admit: w.Admit, sink: Sink, why: Callable[[], str]) -> Lease:
        """Enter the result to place the request. Raises WorkerLost when the link is down."""
        if self._session is None or not self.up:
            raise WorkerLost(f"no connection to {self.info.worker_id}")
        return Lease(self._session, admit, sink, why)

    async def _hold(self) -> None:
        session = Session(self.info.worker_id)
        call = stubs.DecodeWorkerStub(self._channel).Session()
        writing = asyncio.create_task(_write(call, session), name=f"session to {self.info.worker_id}")
        try:
            session.send(w.SessionUp(hello=w.Hello(router_id=self._router_id, protocol=PROTOCOL)))
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                self._check((await _read(call)).welcome.worker)
            self._session = session
            self._set(True)
            while True:
                session.receive(await _read(call))
        finally:
            self._session = None
            self._set(False)  # first: whoever lost a lease looks for another worker at once
            session.lose(WorkerLost(f"lost the connection to {self.info.worker_id}"))
            writing.cancel()
            call.cancel()
            await asyncio.gather(writing, return_exceptions=True)


async def _read(call: Any) -> w.SessionDown:
    down = await call.read()
    heed_cancel()
    if down is grpc.aio.EOF:
        raise WorkerLost("the worker closed the session")
    return down


async def _write(call: Any, session: Session) -> None:
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        while True:
            await call.write(await session.outbox.get())
            heed_cancel()


class PrefillLink(Link):
    """Watches the channel to a prefill worker, and calls it."""

    async def prefill(self, request: w.PrefillRequest, timeout_s: float | None) -> w.PrefillResponse:
        """Returns when every block was acknowledged. Cancelling the caller cancels the call.

        Raises what the worker raised, WorkerLost, or DeadlineExceeded.
        """
        try:
            response = await stubs.PrefillWorkerStub(self._channel).Prefill(request, timeout=timeout_s)
            heed_cancel()
            return response
        except grpc.aio.AioRpcError as error:
            heed_cancel()
            reason = said(error)
            if reason is None and error.code() is grpc.StatusCode.UNAVAILABLE:
                self._doubt()
            if isinstance(reason, Cancelled):
                reason = WorkerLost(f"{self.info.worker_id} cancelled the prefill by itself: {reason}")
            raise reason or from_rpc(error, self.info.worker_id) from None

    def _doubt(self) -> None:
        """A call broke: the worker is down until it describes itself again; sooner than the channel tells."""
        self._set(False)
        self._doubts.set()

    async def _hold(self) -> None:
        described = stubs.WorkerStub(self._channel).Describe(
            w.DescribeRequest(), timeout=HELLO_TIMEOUT_S, wait_for_ready=False
        )
        seen = await described
        heed_cancel()
        self._check(seen)
        if self._channel.get_state() is not grpc.ChannelConnectivity.READY:
            return
        self._doubts.clear()
        self._set(True)
        waits = [
            asyncio.create_task(self._channel.wait_for_state_change(grpc.ChannelConnectivity.READY)),
            asyncio.create_task(self._doubts.wait()),
        ]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)


class Links:
    """Every link, by worker id. ``changed`` is called when one goes up or down."""

    def __init__(
        self, router_id: str, changed: Callable[[], None], rng: random.Random, connect: Connect = connect
    ) -> None:
        self.router_id = router_id
        self.changed = changed
        self._rng, self._connect = rng, connect
        self._links: dict[str, Link] = {}
        self._tasks: dict[Link, asyncio.Task[None]] = {}

    def __iter__(self) -> Any:
        return iter(self._links.values())

    def decode(self, worker_id: str) -> DecodeLink:
        """Raises WorkerLost when there is none."""
        link = self._links.get(worker_id)
        if not isinstance(link, DecodeLink):
            raise WorkerLost(f"no decode worker {worker_id}")
        return link

    def prefill(self, worker_id: str) -> PrefillLink:
        """Raises WorkerLost when there is none."""
        link = self._links.get(worker_id)
        if not isinstance(link, PrefillLink):
            raise WorkerLost(f"no prefill worker {worker_id}")
        return link

    def sync(self, infos: Mapping[str, WorkerInfo]) -> None:
        """Link to who is new, drop who was replaced. One that ``infos`` lacks stays while its link is up."""
        for worker_id, info in infos.items():
            link = self._links.get(worker_id)
            if link is not None and _same(link.info, info):
                link.info = info
                continue
            if link is not None:
                self._drop(link)
            self._open(info)
        for link in [k for k in self if k.info.worker_id not in infos and not k.up]:
            self._drop(link)

    async def close(self) -> None:
        """Drop all and wait until every connection is closed."""
        for link in list(self):
            self._drop(link)
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _open(self, info: WorkerInfo) -> None:
        kind = DecodeLink if info.role == "decode" else PrefillLink
        link = kind(info, self.router_id, self._connect(info.address), lambda: self.changed(), self._rng)
        self._links[info.worker_id] = link
        task = asyncio.create_task(link.run(), name=f"link to {info.worker_id}")
        self._tasks[link] = task
        task.add_done_callback(lambda _: self._tasks.pop(link, None))

    def _drop(self, link: Link) -> None:
        del self._links[link.info.worker_id]
        self._tasks[link].cancel()


def _same(a: WorkerInfo, b: WorkerInfo) -> bool:
    return (a.incarnation, a.role, a.address) == (b.incarnation, b.role, b.address)
