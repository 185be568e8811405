"""Keeps workers' adapters as the registry says: loads pinned ones everywhere, unloads retired ones.

Knows nothing of clients or operators. Adapters that are not pinned are loaded by the first request on them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping

from baton.cluster.adapters import AdapterEntry
from baton.protos.adapter_id import digest_of, name_of
from baton.protos.errors import BatonError
from baton.protos.nouns import WorkerInfo
from baton.protos.rpc import heed_cancel
from baton.router.adapters.registry import AdapterRegistry
from baton.router.dispatch.adapters.loads import AdapterLoads
from baton.router.workers.link import WorkerLink
from baton.tasks.lasting import count_failure

log = logging.getLogger("baton.router")

LOOK_S = 0.2  # seconds between two looks at workers and registry


class AdapterKeeper:
    """Applies the adapter registry to workers; ``in_use`` returns the ids of adapters that requests in flight
    use.
    """

    def __init__(
        self,
        registry: AdapterRegistry,
        loads: AdapterLoads,
        links: Iterable[WorkerLink],
        in_use: Callable[[], Collection[str]],
    ) -> None:
        self._registry, self._loads, self._links, self._in_use = registry, loads, links, in_use
        self._bringing: dict[WorkerLink, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Calls ``look`` every LOOK_S until cancelled."""
        try:
            while True:
                try:
                    await self.look()
                except Exception:  # one that looks no more would never unload, nor pin on a new worker
                    log.exception("the adapters of workers could not be kept")
                    count_failure("adapters of workers")
                heed_cancel()
                await asyncio.sleep(LOOK_S)
        finally:
            for task in self._bringing.values():
                task.cancel()

    async def look(self) -> None:
        """Records the digests that workers report, begins to load pinned adapters where they are missing, unloads
        retired ones that are unused.

        It waits for no load: one that is slow holds up neither another worker's nor the next look.
        """
        up = [link for link in self._links if link.up]
        for name, digest in contents_of(link.info for link in up).items():
            self._registry.learn(name, digest)
        self._pin([link for link in up if link.info.state == "ready"], self._registry.served())
        for adapter_id in self._registry.overdue(self._in_use()):
            await self._loads.unload([link for link in up if link.holds(adapter_id)], adapter_id)
            self._registry.forget(adapter_id)

    def _pin(self, ready: list[WorkerLink], served: Mapping[str, AdapterEntry]) -> None:
        """Loads one adapter at a time on each worker, so that what runs there is held up least."""
        for entry in served.values():
            if entry.pinned and entry.adapter_id:
                free = [k for k in ready if k.info.model_id == entry.model_id and k not in self._bringing]
                for link in free:
                    if self._loads.wait_s(link, entry.adapter_id):
                        self._begin(link, entry)

    def _begin(self, link: WorkerLink, entry: AdapterEntry) -> None:
        task = asyncio.create_task(self._bring(link, entry), name=f"load of {entry.name} to pin it")
        self._bringing[link] = task
        task.add_done_callback(lambda _: self._bringing.pop(link, None))

    async def _bring(self, link: WorkerLink, entry: AdapterEntry) -> None:
        try:
            await self._loads.bring(link, entry.adapter_id)
        except BatonError as error:
            log.warning("adapter %s is pinned, and %s", entry.name, error)
        except Exception:  # the next look tries again
            log.exception("adapter %s could not be pinned", entry.name)
            count_failure("adapters of workers")


def contents_of(infos: Iterable[WorkerInfo]) -> dict[str, str]:
    """Returns, by adapter name, the content digest that most of the workers hold."""
    held: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for info in infos:
        for adapter in info.adapters:
            held[name_of(adapter)][digest_of(adapter)] += 1
    return {name: min(counts, key=lambda digest: (-counts[digest], digest)) for name, counts in held.items()}
