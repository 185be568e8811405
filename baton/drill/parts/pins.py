"""The clients of a simulated run who pin prefixes over HTTP, let them go, and list what is pinned.

Knows nothing of pages. What they are told is held against workers' pages by ``checks.pins``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

import orjson

from baton.drill.checks.pins import Kept, PinLedger
from baton.drill.loop import seeded_loop
from baton.drill.parts.calls import Leaving, RouterCalls, leaves_after
from baton.drill.parts.engine import MODEL_ID
from baton.drill.parts.http import HttpAsk, HttpCall
from baton.drill.parts.life import Life
from baton.drill.parts.router import SimulatedRouter
from baton.drill.parts.worker import SimulatedWorker
from baton.drill.scenario import PrefixPin

PATH = "/v1/cache/prefixes"
LOOK_S = 0.25  # seconds between two looks at what is kept
AGAIN_S = 1.0  # seconds after which a router that is away is asked again
AS_PINNED_S = 0.05  # seconds after a pin within which who leaves then hangs up
AGED_S = 1.0  # seconds after which a change in Redis is seen by every router


class PinClients:
    """Plays the pins of a scenario against its routers; ``ledger`` checks what they are told.

    ``busy_s`` is how long the run's own load may keep workers from reading a prefix, in seconds.
    """

    def __init__(
        self,
        routers: Sequence[SimulatedRouter],
        workers: Mapping[str, SimulatedWorker],
        violated: Callable[[str], None],
        tell: Callable[[str, str], None],
        busy_s: float = 0.0,
    ) -> None:
        self._routers, self._workers, self._tell = routers, workers, tell
        self._calls = RouterCalls(routers, violated, busy_s)
        self.ledger = PinLedger(violated, self._present)
        self.last_until = 0.0  # true time at which nothing is pinned any more, whoever may have forgotten it
        self._looking: asyncio.Task[None] | None = None
        self._waiting: list[tuple[float, HttpCall]] = []

    def _present(self) -> dict[str, Life]:
        return {slot: worker.life for slot, worker in self._workers.items() if worker.life is not None}

    async def play(self, pins: Sequence[PrefixPin], began: float) -> None:
        """Asks for ``pins`` at their times after ``began`` (loop time); returns once the last is answered."""
        self._looking = asyncio.ensure_future(self._look())
        await asyncio.gather(*(self._one(number, pin, began) for number, pin in enumerate(pins)))

    def pinned(self) -> None:
        """Is called when an engine is asked for a pin: the clients that wait for one to leave hang up soon."""
        for after, call in self._waiting:
            seeded_loop().call_later(after, call.left.set)
        self._waiting.clear()

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self.ledger.look(seeded_loop().true_time())

    async def _one(self, number: int, pin: PrefixPin, began: float) -> None:
        loop, name = seeded_loop(), f"pinner {number}"
        await asyncio.sleep(began + pin.at - loop.true_time())
        before, asked_at = self._present(), loop.true_time()
        self._tell(name, f"asks that {pin.workers} keep {len(pin.prompt)} tokens for {pin.ttl_s:g} s")
        asks = {"model": MODEL_ID, "prompt": list(pin.prompt), "workers": pin.workers, "ttl_s": pin.ttl_s}
        body = orjson.dumps({**asks, "cache_salt": pin.tenant or None})
        call = await self._calls.asked(pin.router, HttpAsk(PATH, body), self._leaving(pin))
        self.last_until = max(self.last_until, loop.true_time() + pin.ttl_s)
        if call is None or call.left.is_set() or not call.over:
            self._tell(name, "left, or lost its router")
            return
        shown = orjson.loads(call.body)
        if call.status != 200:
            self._tell(name, f"is refused: {shown['error']['code']}")
            return
        held = {one["worker"]: one["tokens"] for one in shown["workers"]}
        self._tell(name, f"has {held}")
        after = self._present()
        lives = {slot: before[slot] for slot in held if slot in before and before[slot] is after.get(slot)}
        kept = Kept(shown["id"], pin, asked_at + pin.ttl_s, held, lives)
        self.ledger.told(kept)
        if pin.unpin_after is not None:
            await asyncio.sleep(pin.unpin_after)
            await self._let_go(kept.id, pin.unpin_router, name)

    def _leaving(self, pin: PrefixPin) -> Leaving:
        """Returns what has the client of ``pin`` hang up."""
        after = pin.leaves_after
        if after is None:
            return lambda call: None
        if not pin.leaves_as_pinned:
            return leaves_after(after)
        return lambda call: self._waiting.append((min(after, AS_PINNED_S), call))

    async def _let_go(self, pin: str, router: int, name: str) -> int:
        """Asks a router to let a pin go; returns the status of its answer, 0 for none."""
        if (known := self.ledger.pins.get(pin)) is not None:
            known.gone = True
        call = await self._calls.asked(router, HttpAsk(f"{PATH}/{pin}", method="DELETE"))
        status = call.status if call is not None and call.over else 0
        if known is not None and status == 200:
            known.let_go = True
        self._tell(name, f"lets {pin} go: status {status}")
        return status

    async def at_rest(self, is_sure: bool) -> None:
        """Has every router list what is pinned and the first let all of it go, now that all faults are over.

        ``is_sure``: Redis has lost nothing.
        """
        await asyncio.sleep(AGED_S)
        found: list[str] = []
        for number, router in enumerate(self._routers):
            shown = await self._listed(number)
            if is_sure:
                self.ledger.listed(shown, router.name, seeded_loop().true_time())
            found = [str(one["id"]) for one in shown]
        for pin in found:
            while await self._let_go(pin, 0, "pinner") not in (200, 404):  # noqa: ASYNC110
                await asyncio.sleep(AGAIN_S)
        if self._looking is not None:
            self._looking.cancel()

    async def _listed(self, router: int) -> list[Mapping[str, object]]:
        while True:
            call = await self._calls.asked(router, HttpAsk(PATH, method="GET"))
            if call is not None and call.over and call.status == 200:
                data = orjson.loads(call.body)["data"]
                assert isinstance(data, list)
                return data
            await asyncio.sleep(AGAIN_S)
