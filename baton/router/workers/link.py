"""The connection to one worker: a session with a decode worker, or a channel to a prefill worker; it reconnects by
itself.

Knows nothing of policies, queues or Redis. A link that is ``up`` proves that the worker is alive and makes
progress; a link tells the expected incarnation of a worker from another one on the same port.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc
import grpc.aio
import msgspec

from baton.protos import version
from baton.protos.convert import adapter_from_pb
from baton.protos.errors import AdapterUnknown, BatonError, Cancelled, Draining, WorkerLost, WorkerStalled
from baton.protos.nouns import PROTOCOL, AdapterInfo, WorkerInfo
from baton.protos.rpc import heed_cancel
from baton.protos.v1 import worker_pb2 as w
from baton.protos.v1 import worker_pb2_grpc as stubs
from baton.router.workers.call_errors import attached_error, from_rpc, is_of_worker, readable
from baton.router.workers.decode_session import DecodeLease, DecodeSession, TokenSink
from baton.router.workers.session_call import read, read_all, write_all
from baton.tasks.lasting import count_failure
from baton.tls.rpc import handshake_failure

log = logging.getLogger("baton.router")
R = TypeVar("R")

HELLO_TIMEOUT_S = 5.0  # seconds for a worker to answer the first message
PROBE_EVERY_S = 1.0  # seconds between two probes of a worker's progress
STALL_S = 5.0  # seconds without an answer to a probe, after which a worker is lost
BACKOFF_S = (0.05, 1.0)  # seconds before a lost link is tried again: at first, at most
BROKEN = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)  # it is there, and can't serve us


class LinkSettings(msgspec.Struct, frozen=True):
    """Holds the settings that a router's links share; ``changed`` is called when a link goes up or down.

    ``stall_s``: a worker whose engine makes no progress for that many seconds is lost.
    """

    router_id: str
    changed: Callable[[], None]
    rng: random.Random
    stall_s: float = STALL_S


class WorkerLink(ABC):
    """Keeps a connection to one incarnation of a worker while ``run`` runs; ``up`` says whether it stands."""

    def __init__(self, info: WorkerInfo, channel: grpc.aio.Channel, settings: LinkSettings) -> None:
        self.info = info
        self.up = self._was_up = False
        self._channel, self._settings = channel, settings
        self._doubts = asyncio.Event()  # it is down until it has answered a probe
        self._complaint = ""
        self.loads = 0  # adapters that it has loaded for this router
        self._loaded_at: dict[str, int] = {}  # by adapter, what ``loads`` was after its last load
        self._loaded: set[str] = set()  # adapters that it was given, and has yet to announce
        self._missed: set[str] = set()  # adapters that it announced, and lacked when it was asked for them

    async def run(self) -> None:
        """Connects, and reconnects with growing pauses, until cancelled."""
        pause, longest = BACKOFF_S
        try:
            while True:
                if await self._tried():
                    pause = BACKOFF_S[0]
                heed_cancel()
                await asyncio.sleep(pause * self._settings.rng.uniform(0.5, 1.0))
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
            if isinstance(error, grpc.aio.AioRpcError) and (why := handshake_failure(error)):
                self._complain(WorkerLost(f"no TLS with {self.info.address}: {why}"))
            elif isinstance(error, grpc.aio.AioRpcError) and error.code() in BROKEN:
                self._complain(WorkerLost(f"{error.code().name}: {error.details()}"))
            elif isinstance(error, grpc.aio.AioRpcError) and (reason := attached_error(error)):
                self._complain(reason)
        except asyncio.CancelledError:
            heed_cancel()  # ours; else a call was cancelled from elsewhere: a lost connection like any other
            log.debug("%s: a call ended as cancelled", self.info.worker_id)
        except Exception:  # a link that ended would never come back: its worker would be out of reach for good
            log.exception("the link to %s failed; it is made anew", self.info.worker_id)
            count_failure("links")
        finally:
            self._set(False)
        return self._was_up

    def _complain(self, error: BatonError) -> None:
        """Once for each reason, however often it is tried again."""
        if error.message != self._complaint:
            log.warning("%s %s: %s", self.info.role, self.info.worker_id, error)
        self._complaint = error.message

    @abstractmethod
    async def _hold(self) -> None:
        """Connect, be up as long as the worker answers; returns or raises when it doesn't any more."""

    async def _probe(self) -> None:
        """Checks that the worker makes progress: its engine answers between two steps. Raises WorkerLost.

        A stopped or hung process keeps its connections; only an answer tells. One that computes a step for longer
        than anybody would wait for an answer says so (``worker.engine_progress``).
        """
        request = w.SnapshotRequest(unless_computing=True)
        asked = stubs.WorkerStub(self._channel).Snapshot(request, timeout=self._settings.stall_s)
        try:
            answer = await asked
            heed_cancel()
        except grpc.aio.AioRpcError as error:
            heed_cancel()
            if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                silent = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                kind = WorkerStalled if silent else WorkerLost
                raise kind(f"{self.info.worker_id} makes no progress: {error.code().name}") from None
            return
        said_by = readable(answer, self.info.worker_id).incarnation
        if said_by and said_by != self.info.incarnation:
            raise WorkerLost(f"{self.info.address} is now another incarnation of {self.info.worker_id}")

    async def set_role(self, role: str, grace_s: float, turn: str = "") -> str:
        """Asks the worker to change its role, finishing running prefills in ``grace_s`` seconds; returns its next
        incarnation. It begins nothing once the router's ``turn`` is over ("": it has none).

        Raises what the worker raised.
        """
        request = w.SetRoleRequest(role=role, grace_seconds=grace_s, turn=turn)
        reply = await self._asked(stubs.WorkerStub(self._channel).SetRole, request, HELLO_TIMEOUT_S)
        return str(reply.incarnation)

    def renew(self, info: WorkerInfo) -> None:
        """Replaces the worker's description by a newer one of the same incarnation."""
        if info.adapters != self.info.adapters:
            self._loaded.difference_update(info.adapters)
            self._missed.intersection_update(info.adapters)
        self.info = info

    def holds(self, adapter_id: str) -> bool:
        """Returns whether the worker has the adapter, as far as this router knows."""
        return adapter_id in self._loaded or (adapter_id in self.info.adapters and adapter_id not in self._missed)

    def lacks(self, adapter_id: str, loads: int) -> None:
        """Notes that the worker lacked the adapter when ``loads`` was as given, whatever it announced last.

        Changes nothing if it has loaded the adapter since: the refusal of a request that was sent before says
        nothing of what the worker holds now.
        """
        if self._loaded_at.get(adapter_id, 0) > loads:
            return
        self._loaded_at.pop(adapter_id, None)
        self._loaded.discard(adapter_id)
        self._missed.add(adapter_id)

    async def load_adapter(self, name: str, path: str, digest: str, pinned: bool, timeout_s: float) -> AdapterInfo:
        """Asks the worker to load an adapter; returns what it holds then.

        ``path`` is beneath the worker's adapters.root; ``digest`` "" accepts any content. Raises what the worker
        raised.
        """
        request = w.LoadAdapterRequest(name=name, path=path, digest=digest, pinned=pinned)
        found = adapter_from_pb(await self._asked(stubs.WorkerStub(self._channel).LoadAdapter, request, timeout_s))
        self.loads += 1
        self._loaded_at[found.id] = self.loads
        self._missed.discard(found.id)
        self._loaded.add(found.id)
        return found

    async def unload_adapter(self, adapter_id: str, timeout_s: float = HELLO_TIMEOUT_S) -> None:
        """Asks the worker to unload an adapter: it takes no new request on it.

        An adapter that it doesn't hold is no error.
        """
        request = w.UnloadAdapterRequest(id=adapter_id)
        with contextlib.suppress(AdapterUnknown):
            await self._asked(stubs.WorkerStub(self._channel).UnloadAdapter, request, timeout_s)
        self.lacks(adapter_id, self.loads)

    async def pin_prefix(self, request: w.PinPrefixRequest, timeout_s: float) -> int:
        """Asks the worker to pin a prefix's KV blocks; returns the number of pinned tokens.

        Raises what the worker raised.
        """
        reply = await self._asked(stubs.WorkerStub(self._channel).PinPrefix, request, timeout_s)
        return int(reply.tokens)

    async def unpin_prefix(self, pin: str, timeout_s: float = HELLO_TIMEOUT_S) -> None:
        """Asks the worker to unpin a prefix; one that it doesn't have is no error."""
        request = w.UnpinPrefixRequest(pin=pin)
        await self._asked(stubs.WorkerStub(self._channel).UnpinPrefix, request, timeout_s)

    async def _asked(self, method: Callable[..., Awaitable[R]], request: object, timeout_s: float) -> R:
        """Returns a worker's reply to one call. Raises what the worker raised."""
        try:
            reply = await method(request, timeout=timeout_s)
            heed_cancel()
        except grpc.aio.AioRpcError as error:
            heed_cancel()
            raise attached_error(error) or from_rpc(error, self.info.worker_id) from None
        return readable(reply, self.info.worker_id)

    async def _watch(self) -> None:
        """Probe again and again; ends when one isn't answered."""
        while True:
            await asyncio.sleep(PROBE_EVERY_S)
            await self._probe()

    def _doubt(self) -> None:
        """Takes the worker for down until it answers a probe, because a call broke or it said that its engine died.

        That is sooner than the connection tells, so that whoever lost it there doesn't ask it again meanwhile.
        """
        self._set(False)
        self._doubts.set()

    def _set(self, up: bool) -> None:
        if up != self.up:
            log.info("%s %s is %s", self.info.role, self.info.worker_id, "up" if up else "down")
            self.up = up
            self._was_up |= up
            self._settings.changed()

    def _check(self, seen: w.WorkerInfo) -> None:
        if not version.runs_with(seen.protocol):
            raise WorkerLost(version.refusal(seen.worker_id, seen.protocol, seen.version))
        if seen.incarnation != self.info.incarnation:
            raise WorkerLost(f"{self.info.address} is now another incarnation of {seen.worker_id}")


class DecodeLink(WorkerLink):
    """Keeps the one session with a decode worker."""

    _session: DecodeSession | None = None

    def admit(self, admit: w.Admit, sink: TokenSink, why: Callable[[], str]) -> DecodeLease:
        """Returns a lease that, when entered, admits the request on the worker.

        Raises WorkerLost if the link is down.
        """
        if self._session is None or not self.up:
            raise WorkerLost(f"no connection to {self.info.worker_id}")
        return DecodeLease(self._session, admit, sink, why)

    def move_away(self, error: BatonError) -> int:
        """Ends all this router's leases on the worker with ``error``, so that they go elsewhere; returns their
        number.
        """
        return 0 if self._session is None else self._session.move_away(error)

    async def _hold(self) -> None:
        session = DecodeSession(self.info.worker_id, self._doubt)
        lost: BatonError = WorkerLost(f"lost the connection to {self.info.worker_id}")
        call = stubs.DecodeWorkerStub(self._channel).Session()
        tasks = [asyncio.create_task(write_all(call, session), name=f"session to {self.info.worker_id}")]
        try:
            session.send(w.SessionUp(hello=w.Hello(router_id=self._settings.router_id, protocol=PROTOCOL)))
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                self._check((await read(call, session)).welcome.worker)
            await self._probe()
            self._doubts.clear()
            self._session = session
            self._set(True)
            tasks += [
                asyncio.create_task(read_all(call, session), name=f"session of {self.info.worker_id}"),
                asyncio.create_task(self._watch(), name=f"link watch of {self.info.worker_id}"),
            ]
            done, _ = await asyncio.wait(tasks[1:], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except (WorkerStalled, Draining) as why:
            lost = why
            raise
        finally:
            self._session = None
            self._set(False)  # first: whoever lost a lease looks for another worker at once
            session.lose(lost)
            for task in tasks:
                task.cancel()
            call.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self) -> None:
        """Probes again and again, at once where the worker is in doubt; ends when one isn't answered."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PROBE_EVERY_S):
                    await self._doubts.wait()
            self._doubts.clear()
            await self._probe()
            if not self._doubts.is_set():
                self._set(True)


class PrefillLink(WorkerLink):
    """Watches the channel to a prefill worker, and calls it."""

    def __init__(self, info: WorkerInfo, channel: grpc.aio.Channel, settings: LinkSettings) -> None:
        super().__init__(info, channel, settings)
        self._calls: dict[grpc.aio.UnaryUnaryCall, None] = {}  # in the order in which they began
        self._stalled = False  # why its calls were cancelled

    async def prefill(self, request: w.PrefillRequest, timeout_s: float | None) -> w.PrefillResponse:
        """Calls Prefill; returns once the decode worker acknowledged every KV block. Cancelling the caller cancels
        the call.

        Raises what the worker raised, WorkerLost, or DeadlineExceeded after ``timeout_s``.
        """
        call = stubs.PrefillWorkerStub(self._channel).Prefill(request, timeout=timeout_s)
        self._calls[call] = None
        try:
            response = await call
            heed_cancel()
            return readable(response, self.info.worker_id)
        except asyncio.CancelledError:
            heed_cancel()
            kind = WorkerStalled if self._stalled else WorkerLost
            raise kind(f"{self.info.worker_id} makes no progress") from None  # _give_up cancelled the call
        except grpc.aio.AioRpcError as error:
            heed_cancel()
            reason = attached_error(error) or from_rpc(error, self.info.worker_id)
            if isinstance(reason, Cancelled):
                reason = WorkerLost(f"{self.info.worker_id} cancelled the prefill by itself: {reason}")
            elif error.code() is grpc.StatusCode.UNIMPLEMENTED:
                reason = WorkerLost(f"{self.info.worker_id} serves no prefills any more: it has another role now")
            if is_of_worker(reason):
                self._doubt()
            raise reason from None
        finally:
            self._calls.pop(call, None)

    async def _hold(self) -> None:
        described = stubs.WorkerStub(self._channel).Describe(
            w.DescribeRequest(), timeout=HELLO_TIMEOUT_S, wait_for_ready=False
        )
        seen = await described
        heed_cancel()
        self._check(readable(seen, self.info.worker_id))
        if self._channel.get_state() is not grpc.ChannelConnectivity.READY:
            return
        await self._probe()
        self._doubts.clear()
        self._set(True)
        watch = asyncio.create_task(self._watch(), name=f"link watch of {self.info.worker_id}")
        waits: list[asyncio.Task[object]] = [
            asyncio.create_task(self._channel.wait_for_state_change(grpc.ChannelConnectivity.READY)),
            asyncio.create_task(self._doubts.wait()),
            watch,
        ]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if watch.done():
                self._stalled = isinstance(watch.exception(), WorkerStalled)
                self._give_up()
                watch.result()
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    def _give_up(self) -> None:
        """Gives up a worker that makes no progress: it is down first, so that its calls are placed elsewhere."""
        self._set(False)
        for call in list(self._calls):
            call.cancel()
