"""The operators of a simulated run who change workers' roles, hold workers, and drain them.

Each asks a router, in whose process what was asked for runs or by REST, or a worker. Knows nothing of when.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

import grpc
import grpc.aio

from baton.cluster.holds import How, SlotHold
from baton.drill.checks.roles import RoleWitness
from baton.drill.loop import seeded_loop
from baton.drill.machines.network import Network
from baton.drill.parts.calls import RouterCalls
from baton.drill.parts.life import Life
from baton.drill.parts.operators.rest import RestOperators
from baton.drill.parts.router import RouterParts, SimulatedRouter
from baton.drill.parts.worker import SimulatedWorker
from baton.drill.rpc.client import SimulatedDialer
from baton.drill.scenario import HANGS_UP, TWICE, Fault
from baton.protos.errors import BatonError, NoWorker
from baton.protos.v1 import worker_pb2 as w
from baton.protos.v1 import worker_pb2_grpc as stubs
from baton.router.dispatch.role_control import LONGEST_S

T = TypeVar("T")
TRIES = 3  # of a call that breaks
AGAIN_S = 0.2  # seconds between two of them
IMPATIENT_S = 0.2  # seconds after which a second operator asks, or one hangs up
ANSWERED_S = 30.0  # seconds beyond its grace after which an operator gives a drain up


class WorkerOperators:
    """Does what faults say that operators do to ``workers``, through ``routers`` or by a worker's own calls.

    ``witness`` judges changes of roles and drains.
    """

    def __init__(
        self,
        workers: Mapping[str, SimulatedWorker],
        routers: Sequence[SimulatedRouter],
        network: Network,
        rng: random.Random,
        tell: Callable[[str, str], None],
        witness: RoleWitness | None = None,
    ) -> None:
        self._workers, self._routers, self._rng, self._tell = workers, routers, rng, tell
        self._network, self._witness = network, witness or RoleWitness()
        self._rest = RestOperators(RouterCalls(routers, self._witness.violated, LONGEST_S))
        self._held: set[str] = set()

    # ---- roles ----

    async def role(self, fault: Fault) -> None:
        """Asks for the other role of the fault's target."""
        life = self._workers[fault.target].life
        if life is None:
            return
        role = "decode" if life.role == "prefill" else "prefill"
        grace_s = min(fault.seconds, 3.0)
        try:
            if fault.over_rest:
                await self._rest.role(fault.asks % len(self._routers), fault.target, role, grace_s)
            else:
                await self._at_router(fault, lambda parts: parts.core.roles.move([fault.target], role, grace_s))
        except BatonError as error:
            self._tell(fault.target, f"doesn't become {role}: {error.label}")
            self._witness.answered(None, error)
        else:
            self._tell(fault.target, f"is a {role} worker")
            self._witness.answered(None)
        if self._workers[fault.target].life is life:
            self._witness.waited(fault.target)

    async def ratio(self, fault: Fault) -> None:
        """Asks for a ratio that is drawn."""
        grace_s = min(fault.seconds, 3.0)
        ratio = prefill, decode = drawn_ratio(self._rng, len(self._workers))
        try:
            if fault.over_rest:
                await self._rest.ratio(fault.asks % len(self._routers), *ratio, grace_s)
            else:
                await self._at_router(fault, lambda parts: parts.core.roles.set_ratio(*ratio, grace_s))
        except BatonError as error:
            self._tell("operator", f"gets no ratio {prefill}:{decode}: {error.label}")
            self._witness.answered(None, error)
        else:
            self._tell("operator", f"has the ratio {prefill}:{decode}")
            self._witness.answered(ratio)

    async def _at_router(self, fault: Fault, asks: Callable[[RouterParts], Awaitable[T]]) -> T:
        """Has the router that the fault names do what is asked. Raises NoWorker if it isn't up, or dies at it."""
        router = self._routers[fault.asks % len(self._routers)]
        parts = router.parts
        if parts is None:
            raise NoWorker(f"{router.name} is down")

        async def asked() -> T:
            return await asks(parts)

        doing = router.process.spawn(asked(), f"operator {fault.kind}")
        await asyncio.wait({doing})
        if doing.cancelled():
            raise NoWorker(f"{router.name} died")
        return doing.result()

    # ---- holds ----

    async def hold(self, fault: Fault) -> None:
        """Takes the fault's target out of rotation for the fault's time."""
        self._held.add(fault.target)
        how: How = "drain" if self._rng.random() < 0.5 else "eject"
        try:
            await self._hold(fault, how)
            self._tell(fault.target, f"is held: {how}")
        except BatonError as error:
            self._tell(fault.target, f"isn't held: {error.label}")
        await asyncio.sleep(fault.seconds)
        await self._put_back(fault)

    async def put_all_back(self) -> None:
        """Ends the hold of every worker that a fault has held, also of those that a restored Redis holds again."""
        for slot in sorted(self._held):
            await self._put_back(Fault("hold", 0.0, slot))

    async def _put_back(self, fault: Fault) -> None:
        while True:
            try:
                await self._hold(fault, None)
                return
            except BatonError:
                await asyncio.sleep(0.5)

    async def _hold(self, fault: Fault, how: How | None) -> None:
        """Has a router hold the fault's target, or put it back. Raises BatonError."""
        if fault.over_rest:
            await self._rest.hold(fault.asks % len(self._routers), fault.target, how or "none")
            return
        hold = None if how is None else SlotHold(how)
        await self._at_router(fault, lambda parts: parts.holds.put(fault.target, hold))

    # ---- drains ----

    async def drain(self, fault: Fault) -> None:
        """Drains the fault's target with a grace of the fault's time, then tells it to stop, as whoever changes
        workers one by one does. With the factor TWICE somebody drains it again meanwhile, without any grace; with
        HANGS_UP whoever drains it doesn't wait for the answer. It is told to stop after ``stays`` seconds.
        """
        life = self._workers[fault.target].life
        if life is None or life.runtime is None:
            return
        waits_s = IMPATIENT_S if fault.factor == HANGS_UP else fault.seconds + ANSWERED_S
        draining = [self._drained(life, fault.seconds, waits_s)]
        if fault.factor == TWICE:
            draining.append(self._again(life))
        await asyncio.gather(*draining)
        await asyncio.sleep(fault.stays)
        life.stop.set()

    async def _again(self, life: Life) -> None:
        await asyncio.sleep(IMPATIENT_S)
        await self._drained(life, 0.0, ANSWERED_S)

    async def _drained(self, life: Life, grace_s: float, waits_s: float) -> None:
        """Calls Drain until it is answered, TRIES times at most, and tells the witness; waits for ``waits_s``."""
        now, slot = seeded_loop().true_time, life.worker.slot
        began = now()
        for _ in range(TRIES):
            channel = SimulatedDialer(self._network, "operator").channel(life.address)
            try:
                answer = await stubs.WorkerStub(channel).Drain(
                    w.DrainRequest(grace_seconds=grace_s), timeout=waits_s
                )
            except grpc.aio.AioRpcError as error:
                self._tell(slot, f"isn't drained: {error.code().name}")
                if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                    return
                await asyncio.sleep(AGAIN_S)
            else:
                if life.process.alive and answer is not None:
                    self._tell(slot, f"is drained: {answer.finished} finished, {answer.cancelled} sent away")
                    active = 0 if life.runtime is None else life.runtime.service.active
                    self._witness.drained(life.process.name, grace_s, now() - began, active)
                    life.engine.witness.drained()
                return
            finally:
                await channel.close()
            if self._workers[slot].life is not life:
                return


def drawn_ratio(rng: random.Random, count: int) -> tuple[int, int]:
    """Draws a ratio of ``count`` workers, which may be none that can be formed."""
    prefill = rng.randint(0, count)
    return prefill, count - prefill
