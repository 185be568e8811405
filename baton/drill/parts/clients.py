"""The simulated clients of a run: each sends one request, reads at its own pace, and may cancel at any moment.

Knows nothing of workers. A client may cancel more than once. The judge compares what a client received with the
oracle's answer.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import suppress

from baton.drill.checks.adapters import AdapterLedger
from baton.drill.checks.judge import UNTYPED, Judge
from baton.drill.checks.queues import QueueWitness
from baton.drill.checks.watch import Departed
from baton.drill.loop import seeded_loop
from baton.drill.machines.clock import CLOCK
from baton.drill.machines.network import Network
from baton.drill.parts.engine import model_id_of
from baton.drill.parts.grpc_calls import GrpcCall
from baton.drill.parts.http import NUMBER, HttpCall, asked_over_http
from baton.drill.parts.router import RouterParts, SimulatedRouter
from baton.drill.scenario import FLOODING, Request, Tenant
from baton.protos.errors import BatonError, ModelNotFound, QuotaExceeded
from baton.router.access.keys import ApiKey
from baton.router.answer.stream import QUEUED_PIECES
from baton.router.request.context import RequestContext
from baton.router.request.request import ChoiceStream, RouterRequest

LATE_S = 1.0  # seconds that a request may end after its deadline, beside its reader's own pause
STANDS_S = 0.05  # seconds between two looks whether a router that stands still goes on
PATIENCE_S = 30.0  # seconds that a client waits for its router to be up


class Clients:
    """Plays the clients of a run against its routers; ``tell`` (who, what) adds a line to the story.

    ``requests_per_min`` is each tenant's rate limit, 0 for none. ``departed`` collects when clients stopped
    waiting, ``queues`` what waits at routers. ``tenants`` have weights. Some of ``requests`` follow others. Routers
    stand still for ``stands_s`` seconds at most.
    """

    def __init__(
        self,
        routers: Sequence[SimulatedRouter],
        judge: Judge,
        tell: Callable[[str, str], None],
        requests_per_min: int = 0,
        *,
        queues: QueueWitness,
        tenants: Sequence[Tenant] = (),
        departed: Departed | None = None,
        ledger: AdapterLedger | None = None,
        network: Network | None = None,
        requests: Sequence[Request] = (),
        stands_s: float = 0.0,
    ) -> None:
        self._network, self._late_s = network, LATE_S + stands_s
        numbers = {request.number for request in requests}
        self._ended = {r.follows: asyncio.Event() for r in requests if r.follows in numbers}
        self._ledger = ledger
        self._queues = queues
        self._weights = {tenant.name: tenant.weight for tenant in tenants}
        self._routers, self._judge, self._tell, self._per_min = routers, judge, tell, requests_per_min
        self._departed: Departed = {} if departed is None else departed

    async def ask(self, request: Request, began: float) -> None:
        """Sends ``request`` at ``request.at`` seconds after ``began`` (loop time); returns when its last choice has
        ended.

        Refusals, results and the loss of the router are passed to the judge; nothing is raised for them.
        """
        router = self._routers[request.router]
        await asyncio.sleep(began + request.at - seeded_loop().true_time())
        if request.follows in self._ended:
            await self._ended[request.follows].wait()
        # What it runs of the router keeps the router's time.
        here = CLOCK.set(None if request.over_grpc else router.clock)
        try:
            await self._ask(router, request, f"client {request.number}")
        finally:
            CLOCK.reset(here)
            if (ended := self._ended.get(request.number)) is not None:
                ended.set()

    async def _ask(self, router: SimulatedRouter, request: Request, name: str) -> None:
        if request.over_grpc:
            await self._ask_over_grpc(router, request, name)
            return
        if request.over_http:
            await self._ask_for_text(router, request, name)
            return
        loop = seeded_loop()
        try:
            parts = await self._up(router)
            self._queues.asked(request, loop.true_time())
            await self._charge(parts, request)
            adapter = await self._adapter(parts, request)
            self._queues.asked(request, loop.true_time())
            weight = self._weights.get(request.tenant, 1.0)
            streams = parts.core.dispatcher.open(asked(request, loop.time(), adapter, weight))
        except (BatonError, TimeoutError) as error:
            self._tell(name, f"is refused: {getattr(error, 'label', 'no router')}")
            self._is_refused(request, error, at_once=not isinstance(error, QuotaExceeded))
            self._judge.refused(request, error)
            return
        turn = f" in session {request.session}" if request.session else ""
        self._tell(name, f"asks {len(request.prompt)} tokens, n {request.n}{turn}")
        for after in request.cancels:
            for stream in streams:
                loop.call_later(after, self._leave, request, stream)
        reading = [asyncio.ensure_future(self._read(request, stream)) for stream in streams]
        died = asyncio.ensure_future(router.died.wait())
        whole = asyncio.gather(*reading)
        try:
            await asyncio.wait((whole, died), return_when=asyncio.FIRST_COMPLETED)
        finally:
            died.cancel()
            if not whole.done():
                whole.cancel()
                await asyncio.gather(whole, return_exceptions=True)
                self._tell(name, "lost its router")
                self._judge.lost()
                for choice in range(request.n):
                    self._departs(request, choice)

    async def _ask_for_text(self, router: SimulatedRouter, request: Request, name: str) -> None:
        """Asks over HTTP, and has the judge read the reply, unless the client left or the router died before its
        end.
        """
        loop, call = asyncio.get_running_loop(), HttpCall(asked_over_http(request))
        try:
            parts = await self._up(router)
            with suppress(BatonError):  # the application finds it itself: the judge is to know which it will be
                await self._adapter(parts, request)
        except TimeoutError:
            self._judge.refused(request, TimeoutError())
            return
        NUMBER.set(request.number)
        what = "an embedding" if request.sampling.pooling else "text"
        self._tell(name, f"asks for {what} of {len(request.prompt)} tokens, n {request.n}, {request.over_http}")
        self._judge.keys.asked(request.number, seeded_loop().true_time())
        self._queues.asked(request, seeded_loop().true_time())
        began, process = loop.time(), router.process
        replying = process.spawn(call.play(parts.app), f"http {name}")
        for after in request.cancels:
            loop.call_later(after, self._hangs_up, request, call)
        await asyncio.wait({replying})
        for choice in range(request.n):
            self._departs(request, choice)
        if replying.cancelled() or not process.alive or call.left.is_set():
            self._judge.lost()
            self._tell(name, f"{'left' if call.left.is_set() else 'lost its router'} after {len(call.body)} bytes")
        else:
            self._over(request, call, replying.exception(), loop.time() - began)

    async def _ask_over_grpc(self, router: SimulatedRouter, request: Request, name: str) -> None:
        """Asks over gRPC from a process of its own, and has the judge read the reply, unless the client left."""
        try:
            parts = await self._up(router)
            with suppress(BatonError):
                await self._adapter(parts, request)
        except TimeoutError:
            self._judge.refused(request, TimeoutError())
            return
        assert self._network is not None
        self._tell(name, f"asks over gRPC for {len(request.prompt)} tokens, n {request.n}, {request.over_http}")
        self._judge.keys.asked(request.number, seeded_loop().true_time())
        self._queues.asked(request, seeded_loop().true_time())
        call, process = GrpcCall(self._network, router.name, request), router.process
        for after in request.cancels[:1]:
            seeded_loop().call_later(after, self._hangs_up, request, call)
        reply = await call.play()
        for choice in range(request.n):
            self._departs(request, choice)
        if call.left.is_set() or (reply.error in UNTYPED and not process.alive):
            self._judge.lost()
            self._tell(
                name, f"{'left' if call.left.is_set() else 'lost its router'} after {len(call.chunks)} messages"
            )
        else:
            code = self._judge.replied_over_grpc(request, reply)
            self._queues.refused(request, code, seeded_loop().true_time(), call.advised)
            self._tell(name, code)

    def _over(self, request: Request, call: HttpCall, error: BaseException | None, took: float) -> None:
        """Has the judge read a reply whose client stayed and whose router lives; ``took`` is in seconds."""
        name = f"request {request.number}"
        if error is not None or not call.over:
            self._judge.violated(f"{name}: the application ended without the end of its reply: {error!r}")
            return
        late = took - (request.deadline_after or math.inf)
        unread_s = (QUEUED_PIECES + request.n + 2) * request.read_pause  # what is written may be read late
        if late > self._late_s + unread_s:
            self._judge.violated(f"{name} ends {late:.1f} s after its deadline")
        said = self._judge.replied(request, call.status, bytes(call.body))
        self._queues.refused(request, said, seeded_loop().true_time(), call.advised or call.status == 200)
        if request.key is not None and self._per_min and call.status == 200:
            self._judge.charged(request, seeded_loop().true_time() - took)
        self._tell(f"client {request.number}", f"status {call.status}, {said}")

    def _hangs_up(self, request: Request, call: HttpCall | GrpcCall) -> None:
        for choice in range(request.n):
            self._departs(request, choice)
        call.left.set()

    def _leave(self, request: Request, stream: ChoiceStream) -> None:
        if self._routers[request.router].process.stands:
            seeded_loop().call_later(STANDS_S, self._leave, request, stream)  # its connection's end is read later
            return
        self._departs(request, stream.choice)
        stream.cancel("client_gone")

    def _is_refused(self, request: Request, error: BaseException, at_once: bool = False) -> None:
        """Tells the witness of queues that the request ended with ``error``."""
        if isinstance(error, BatonError):
            now, advised = seeded_loop().true_time(), error.retry_after_s > 0
            self._queues.refused(request, error.label, now, advised, at_once)

    def _departs(self, request: Request, choice: int) -> None:
        """Stores that the client stopped waiting for choice ``choice`` at this time."""
        now = seeded_loop().true_time()
        self._departed.setdefault((request.number, choice), now)
        self._queues.ends(request.number, now, placed=False)

    async def _charge(self, parts: RouterParts, request: Request) -> None:
        """Charges the request to its tenant's rate limit, as the router's API handlers do. Raises QuotaExceeded."""
        if request.tenant and self._per_min and request.tenant not in FLOODING:
            key = ApiKey(request.tenant, request.tenant, "", requests_per_min=self._per_min)
            await parts.gate.charge(key, model_id_of(request.model), request.n, len(request.prompt))
            self._judge.charged(request, seeded_loop().true_time())

    async def _adapter(self, parts: RouterParts, request: Request) -> str:
        """Returns the id that the request's adapter stands for now, as the router's API handlers take it.

        Raises BatonError.
        """
        if not request.adapter or self._ledger is None:
            return ""
        now = seeded_loop().true_time
        try:
            found = (await parts.catalog.resolve(request.adapter)).adapter_id
        except ModelNotFound:
            self._ledger.resolved(request.number, request.adapter, None, now())
            raise
        self._ledger.resolved(request.number, request.adapter, found, now())
        return found

    async def _up(self, router: SimulatedRouter) -> RouterParts:
        async with asyncio.timeout(PATIENCE_S):
            while router.parts is None or router.process.stands:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        return router.parts

    async def _read(self, request: Request, stream: ChoiceStream) -> None:
        asked_at = asyncio.get_running_loop().time()
        tokens: list[int] = []
        logprobs = 0
        error: BaseException | None = None
        try:
            async for run in stream:
                if run.output_index != len(tokens):
                    self._judge.violated(
                        f"request {request.number}: output index {run.output_index} after {len(tokens)} tokens"
                    )
                tokens += run.token_ids
                logprobs += len(run.logprobs)
                if request.read_pause:
                    await asyncio.sleep(request.read_pause)
        except asyncio.CancelledError:
            raise
        except Exception as raised:
            error = raised
        if error is not None:
            self._is_refused(request, error)
        self._departs(request, stream.choice)
        self._judge.ended(request, stream, tokens, logprobs, error)
        late = asyncio.get_running_loop().time() - asked_at - (request.deadline_after or math.inf)
        if late > self._late_s + request.read_pause:
            self._judge.violated(f"request {request.number} ends {late:.1f} s after its deadline")
        label = "complete" if error is None else getattr(error, "label", type(error).__name__)
        self._tell(f"client {request.number}", f"choice {stream.choice}: {len(tokens)} tokens, {label}")


def asked(request: Request, now: float, adapter: str = "", weight: float = 1.0) -> RouterRequest:
    """Returns ``request`` as the router's dispatcher takes it, on ``adapter`` (an id); ``now`` is the loop time
    that its deadline counts from, ``weight`` its tenant's.
    """
    key = ApiKey(request.tenant, request.tenant, "", weight=weight) if request.tenant else None
    return RouterRequest(
        request_id=f"r{request.number}",
        model_id=model_id_of(request.model),
        token_ids=request.prompt,
        sampling=request.sampling,
        n=request.n,
        context=RequestContext(
            tenant_salt=request.tenant.encode(),
            adapter_id=adapter,
            deadline=None if request.deadline_after is None else now + request.deadline_after,
            key=key,
            slo_ttft_s=request.slo_ttft_s,
            priority=request.priority,
            session=request.session,
        ),
    )
