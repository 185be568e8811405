"""A simulated placer: it runs as many workers as are asked for in Redis, as `baton place` does.

It follows Redis by the product's own code. Knows nothing of nodes: in place of Ray there is room for everybody, or
for so many workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Iterator, Mapping

from redis.exceptions import RedisError

from baton.cluster.advice import AdviceStore
from baton.cluster.membership import connect
from baton.cluster.scale import NumbersInForce, ScaleRequest, ask, slots_of
from baton.drill.checks.watch import Violated
from baton.drill.machines.network import Network
from baton.drill.machines.process import Process
from baton.drill.parts.life import NAMESPACE
from baton.drill.parts.slot import Tell
from baton.drill.parts.worker import SimulatedWorker
from baton.drill.redis.server import URL, connections
from baton.drill.scenario import ScaleChange, Scenario
from baton.protos.errors import ConfigError

LOOK_S = 0.5  # seconds between two looks at how many workers are asked for
RESTART_S = 2.0  # seconds after which a placer that died follows Redis again
ASK_S = 10.0  # seconds for which an operator tries to ask


class SimulatedPlacer:
    """Keeps those of ``workers`` in place that are asked for; ``numbers`` are those last read, None before."""

    def __init__(
        self,
        scenario: Scenario,
        workers: Mapping[str, SimulatedWorker],
        network: Network,
        violated: Violated,
        tell: Tell,
    ) -> None:
        self.numbers: ScaleRequest | None = None
        self.asked: ScaleRequest | None = None  # by operators, last
        self._scenario, self._workers, self._network, self._tell = scenario, workers, network, tell
        self._asks = 0  # that operators have begun or ended
        self._violated = violated
        self._keeps = not any(fault.kind in ("redis_forgets", "torn") for fault in scenario.faults)
        self._lives = itertools.count(1)
        self._process = Process("placer#0")
        self._living: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts the placer; from now on a dead one is followed by the next."""
        self._living = asyncio.ensure_future(self._live())

    def stop(self) -> None:
        """Ends the placer; its workers go on."""
        if self._living is not None:
            self._living.cancel()
        self.kill()

    def kill(self) -> None:
        """Ends the placer's process abruptly; its workers go on."""
        self._network.process_died(self._process.name)
        self._process.kill()

    async def _live(self) -> None:
        while True:
            self._process = Process(f"placer#{next(self._lives)}")
            await asyncio.wait({self._process.spawn(self._follow(), "follow")})
            self._tell("placer", "died")
            await asyncio.sleep(RESTART_S)

    async def _follow(self) -> None:
        redis = connect(URL, connections(self._network, self._process.name))
        follow = NumbersInForce(redis, NAMESPACE)
        planned = ScaleRequest(self._scenario.prefill, self._scenario.decode)
        asks = -1  # that had begun or ended when the last look that was answered began
        while True:
            before = self._asks
            with contextlib.suppress(RedisError, OSError):  # without an answer numbers stay as they are
                found = await follow.look(planned)
                if found != self.numbers:
                    if asks == self._asks and self._keeps and not self._scenario.most_workers:
                        self._hold(found)
                    self.numbers = found
                    self._tell("placer", f"keeps prefill {found.prefill}, decode {found.decode}")
                asks = before
            self._place()
            await asyncio.sleep(LOOK_S)

    def _hold(self, found: ScaleRequest) -> None:
        """Checks that numbers that are read anew, while nobody asked, are those that were in force."""
        before = self.numbers
        if before is not None and (before.prefill, before.decode) != (found.prefill, found.decode):
            self._violated(f"the placer keeps {found} instead of {before}, and nobody asked for it")

    def _place(self) -> None:
        """Ends the workers that aren't asked for, then starts as many of the others as there is room for."""
        wanted = {} if self.numbers is None else slots_of(self.numbers)
        if not wanted:
            return
        for slot, worker in self._workers.items():
            if slot not in wanted and worker.placed:
                self._tell(slot, "isn't wanted any more")
                worker.displace()
        room = self._scenario.room or len(self._workers)
        for slot, role in wanted.items():
            taken = sum(worker.placed or worker.life is not None for worker in self._workers.values())
            worker = self._workers[slot]
            if not worker.placed and (worker.life is not None or taken < room):
                worker.place(role)

    # ---- who asks ----

    async def scale(self, change: ScaleChange, began: float) -> None:
        """Asks for other numbers of workers at the change's time, as `baton scale` does."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(began + change.at - loop.time())
        redis = connect(URL, connections(self._network, "operator"))
        until = loop.time() + ASK_S
        own, numbers = self._scenario, ScaleRequest(change.prefill, change.decode)
        while loop.time() < until:
            self._asks += 1
            try:
                asked = await ask(redis, NAMESPACE, numbers, ScaleRequest(own.prefill, own.decode))
            except (RedisError, OSError, ConfigError) as error:
                self._tell("operator", f"can't ask for {numbers.prefill}:{numbers.decode}: {error!r}")
                await asyncio.sleep(LOOK_S)
            else:
                self.asked = max(asked, self.asked or asked, key=lambda one: one.serial)
                self._tell("operator", f"asks for prefill {numbers.prefill}, decode {numbers.decode}")
                break
            finally:
                self._asks += 1
        await redis.aclose()

    async def advise_only(self) -> None:
        """Has controllers advise from now on, so that the numbers of workers stay."""
        redis = connect(URL, connections(self._network, "operator"))
        while not await AdviceStore(redis, NAMESPACE).set_mode("advise"):  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)
        await redis.aclose()

    def unrest(self, told_all: bool) -> Iterator[str]:
        """Yields who is there although nobody asked for it, and who isn't though somebody did.

        ``told_all``: Redis has kept whatever was asked for.
        """
        own = self._scenario
        wanted = set() if self.numbers is None else set(slots_of(self.numbers))
        there = {slot for slot, worker in self._workers.items() if worker.life is not None}
        if strange := sorted(there - wanted):
            yield f"nobody asked for {strange}"
        most = min(len(wanted), own.room or len(wanted))
        if len(there) < most:
            yield f"{sorted(wanted - there)} aren't there, and there is room for {most}"
        if told_all and not own.most_workers and self.asked is not None and self.numbers != self.asked:
            yield f"the placer keeps {self.numbers}, and {self.asked} was asked for last"
