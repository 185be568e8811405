"""The operators of a simulated run who load, replace and unload adapters. Knows nothing of requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from baton.cluster.adapters import AdapterEntry
from baton.drill.checks.adapters import AdapterLedger
from baton.drill.parts.adapters import SimulatedFiles, id_of
from baton.drill.parts.engine import MODEL_ID
from baton.drill.parts.router import SimulatedRouter
from baton.drill.scenario import AdapterChange
from baton.protos.errors import BatonError, NoWorker

ANSWER_S = 60.0  # seconds for which an operator waits


class AdapterOperators:
    """Plays a scenario's changes of adapters at its ``routers``, those of one name one after another."""

    def __init__(
        self,
        files: SimulatedFiles,
        ledger: AdapterLedger,
        routers: Sequence[SimulatedRouter],
        tell: Callable[[str, str], None],
    ) -> None:
        self._files, self._ledger, self._routers, self._tell = files, ledger, routers, tell

    async def play(self, changes: Sequence[AdapterChange], began: float) -> None:
        """Makes ``changes`` at their times after ``began`` (loop time); returns once the last is answered."""
        names = sorted({change.name for change in changes})
        await asyncio.gather(*(self._one_name([c for c in changes if c.name == name], began) for name in names))

    async def _one_name(self, changes: Iterable[AdapterChange], began: float) -> None:
        now = asyncio.get_running_loop().time
        for change in changes:
            await asyncio.sleep(began + change.at - now())
            to = None if change.content is None else id_of(change.name, change.content)
            self._ledger.begins(change.name, to, now())
            try:
                await self._change(change)
            except (BatonError, TimeoutError) as error:
                self._tell("operator", f"adapter {change.name} isn't {to}: {getattr(error, 'label', 'no answer')}")
            else:
                self._ledger.is_done(change.name, to, now())
                self._tell("operator", f"adapter {change.name} is {to}")

    async def _change(self, change: AdapterChange) -> None:
        """Asks the router for the change, as its API handlers do. Raises BatonError, TimeoutError."""
        router = self._routers[change.router]
        if router.parts is None:
            raise NoWorker(f"{router.name} is down")
        async with asyncio.timeout(ANSWER_S):
            if change.content is None:
                await router.parts.core.adapters.remove(change.name, "operator")
                return
            self._files.contents[change.path] = change.content
            entry = AdapterEntry(change.name, MODEL_ID, change.path, pinned=change.pinned, by="operator")
            await router.parts.core.adapters.add(entry, in_place=True)
