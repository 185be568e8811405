"""Loading of adapters on workers: for a request that was placed there, for an operator, and for pinned adapters.

Knows nothing of names, queues or policies. However many requests wait for an adapter on a worker, it is loaded
once, and a cancelled request leaves the load to the others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from baton.cluster.adapters import AdapterEntry
from baton.cluster.metering.telemetry import RouterMetrics
from baton.protos.errors import AdapterChanged, AdaptersFull, AdapterUnknown, BatonError, Unavailable, WeightsGone
from baton.protos.nouns import AdapterInfo
from baton.router.adapters.registry import AdapterRegistry
from baton.router.workers.link import WorkerLink

log = logging.getLogger("baton.router")

LOAD_S = 60.0  # seconds in which a worker must have loaded an adapter
FIRST_GUESS_S = 0.5  # seconds that a load is predicted to take, before any was seen
NEWEST_SHARE = 0.3  # of the last load in the prediction of the next one
UNABLE_S = 10.0  # seconds in which a worker that couldn't load an adapter isn't asked again
ROOM_S, ROOM_AGAIN_S = 0.5, 0.05  # seconds to wait for room among a worker's adapters, and between two tries


class AdapterLoads:
    """Loads adapters on workers, each once at a time; ``changed`` is called when a load ends.

    ``clock`` is in seconds; ``predicted_s`` is the predicted duration of the next load.
    """

    def __init__(
        self,
        registry: AdapterRegistry,
        clock: Callable[[], float],
        metrics: RouterMetrics,
        changed: Callable[[], object] = lambda: None,
    ) -> None:
        self._registry, self._clock, self._metrics, self._changed = registry, clock, metrics, changed
        self._running: dict[tuple[WorkerLink, str], asyncio.Task[AdapterInfo]] = {}
        self._unable: dict[tuple[WorkerLink, str], float] = {}
        self.predicted_s = FIRST_GUESS_S

    def wait_s(self, link: WorkerLink, adapter_id: str) -> float | None:
        """Returns the predicted seconds until the worker has the adapter: 0.0 if it holds it, None if it can't load
        it now.
        """
        if not adapter_id or link.holds(adapter_id):
            return 0.0
        if self._unable.get((link, adapter_id), float("-inf")) > self._clock():
            return None
        return self.predicted_s if self._registry.is_readable(adapter_id) else None

    def begin(self, link: WorkerLink, adapter_id: str) -> None:
        """Starts to load an adapter that the worker lacks, without waiting for it."""
        entry = self._registry.of_id(adapter_id)
        if adapter_id and entry is not None and self.wait_s(link, adapter_id):
            self._task(link, entry)

    async def bring(self, link: WorkerLink, adapter_id: str) -> None:
        """Returns once the worker holds the adapter; at once if ``adapter_id`` is "".

        Raises WeightsGone if the content can't be read any more, AdaptersFull, and Unavailable if this worker can't
        load it.
        """
        if not adapter_id or link.holds(adapter_id):
            return
        entry = self._registry.of_id(adapter_id)
        if entry is None or not self._registry.is_readable(adapter_id):
            raise _gone(link, adapter_id, "was unloaded or replaced since")
        try:
            await self._with_room(link, entry)
        except BatonError as error:
            if error.retryable:
                raise
            self._unable[link, adapter_id] = self._clock() + UNABLE_S
            if isinstance(error, AdapterChanged):
                raise _gone(link, adapter_id, f"was written over at {entry.path!r}") from error
            text = f"{link.info.worker_id} can't load adapter {adapter_id}: {error.message}"
            raise Unavailable(text, retry_after_s=1.0) from error

    async def load(self, link: WorkerLink, entry: AdapterEntry) -> AdapterInfo:
        """Returns what the worker holds once it has loaded ``entry``; if the caller is cancelled, the load goes on
        for others.

        Raises what the worker raised.
        """
        return await asyncio.shield(self._task(link, entry))

    async def unload(self, links: Iterable[WorkerLink], adapter_id: str) -> None:
        """Tells each worker of ``links`` to unload the adapter; errors are only logged."""
        await asyncio.gather(*(_unload(link, adapter_id) for link in links))

    async def close(self) -> None:
        """Cancels the loads that are under way."""
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def _with_room(self, link: WorkerLink, entry: AdapterEntry) -> None:
        """Loads it; where all that the worker holds is in use, as soon as some of it no longer is."""
        until = self._clock() + ROOM_S
        while True:
            try:
                await self.load(link, entry)
                return
            except AdaptersFull:
                if self._clock() >= until:
                    raise
            await asyncio.sleep(ROOM_AGAIN_S)

    def _task(self, link: WorkerLink, entry: AdapterEntry) -> asyncio.Task[AdapterInfo]:
        key = (link, entry.adapter_id or entry.path)
        found = self._running.get(key)
        if found is None:
            found = asyncio.create_task(self._load(link, entry), name=f"load of {entry.name}")
            self._running[key] = found
            found.add_done_callback(lambda task: self._over(key, task))
        return found

    async def _load(self, link: WorkerLink, entry: AdapterEntry) -> AdapterInfo:
        since = self._clock()
        try:
            found = await link.load_adapter(entry.name, entry.path, entry.digest, entry.pinned, LOAD_S)
        except BatonError as error:
            self._metrics.adapter_loads.labels(error.label).inc()
            raise
        took = self._clock() - since
        self._metrics.adapter_loads.labels("ok").inc()
        self._metrics.adapter_load_seconds.observe(took)
        self.predicted_s += NEWEST_SHARE * (took - self.predicted_s)
        log.info("%s loaded adapter %s in %.3f s", link.info.worker_id, found.id, took)
        return found

    def _over(self, key: tuple[WorkerLink, str], task: asyncio.Task[AdapterInfo]) -> None:
        self._running.pop(key, None)
        now = self._clock()
        self._unable = {k: until for k, until in self._unable.items() if until > now}
        if not task.cancelled():
            task.exception()  # whoever waits for it raises it; of one that was begun ahead there may be nobody
        self._changed()


async def _unload(link: WorkerLink, adapter_id: str) -> None:
    try:
        await link.unload_adapter(adapter_id)
    except BatonError as error:
        log.info("%s did not unload %s: %s", link.info.worker_id, adapter_id, error)


def _gone(link: WorkerLink, adapter_id: str, why: str) -> WeightsGone:
    return WeightsGone(
        f"adapter {adapter_id} {why}, and {link.info.worker_id} doesn't hold it: send the request again",
        retry_after_s=1.0,
    )


def unknown(name: str, served: Iterable[str]) -> AdapterUnknown:
    """Returns an AdapterUnknown error for ``name`` that lists the names ``served``."""
    names = ", ".join(repr(one) for one in served) or "none"
    return AdapterUnknown(f"there is no adapter {name!r}; served: {names}", "lora_name")
