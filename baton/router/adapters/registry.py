"""The LoRA adapters that this router serves by name: the configuration's, and those added or removed while it runs.

Knows nothing of workers, links or files. The registry shared by routers lies in Redis; while that is away, what was
last read counts, and the configuration's adapters are served without it. A content that its name no longer stands
for is kept as *retired*: requests that began on it end on it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial

import msgspec
from redis.exceptions import RedisError

from baton.cluster.adapters import AdapterEntry, AdapterStore
from baton.cluster.store.patience import CircuitBreaker
from baton.protos.adapter_id import name_of
from baton.protos.rpc import heed_cancel

log = logging.getLogger("baton.router")

POLL_S = 0.5  # seconds between two looks at the registry in Redis
LOOK_AGAIN_S = 0.1  # seconds between two looks that unknown names ask for
RETIRED_S = 2.0  # seconds at least that a retired content stays, for calls that are being prepared


class RetiredAdapter(msgspec.Struct, frozen=True):
    """Describes an adapter's content whose name is gone or stands for another content.

    ``since`` is on the router's clock, in seconds. ``readable``: the files at its path are still that content.
    """

    entry: AdapterEntry
    since: float
    readable: bool


class AdapterRegistry:
    """Knows adapters by name and by content id. With ``store`` None there are only the configured ones."""

    def __init__(
        self,
        configured: Iterable[AdapterEntry] = (),
        store: AdapterStore | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._configured = {entry.name: entry for entry in configured}
        self._store, self._clock = store, clock
        self._kept: dict[str, AdapterEntry] = {}
        self._digests: dict[str, str] = {}
        self._served = served_of(self._configured, self._digests, self._kept)
        self._retired: dict[str, RetiredAdapter] = {}
        self._looked, self._looking = float("-inf"), asyncio.Lock()
        self._written = 0  # entries that this router wrote, by which a look knows that it read what was before
        self.is_complete = store is None  # what other routers wrote has been read at least once
        self._patience = CircuitBreaker(clock=clock)

    # ---- reading -------------------------------------------------------------------------------------

    def served(self) -> Mapping[str, AdapterEntry]:
        """Returns the adapters that clients may name now, by name."""
        return self._served

    def of_id(self, adapter_id: str) -> AdapterEntry | None:
        """Returns the entry of the adapter content ``adapter_id``, also if retired; None for an unknown id."""
        retired = self._retired.get(adapter_id)
        if retired is not None:
            return retired.entry
        found = self._served.get(name_of(adapter_id))
        return found if found is not None and found.adapter_id == adapter_id else None

    def is_readable(self, adapter_id: str) -> bool:
        """Returns whether a worker that lacks the content ``adapter_id`` could still read it from its path."""
        retired = self._retired.get(adapter_id)
        return retired.readable if retired is not None else self.of_id(adapter_id) is not None

    def retired(self) -> Mapping[str, RetiredAdapter]:
        """Returns the contents that no name stands for any more, by adapter id."""
        return self._retired

    # ---- changing ------------------------------------------------------------------------------------

    async def put(self, entry: AdapterEntry) -> bool:
        """Writes ``entry`` to the shared registry and serves it; returns False if another router changed its name
        first.

        Raises Unavailable if the shared registry can't be reached.
        """
        if self._store is not None and not await self._store.swap(entry, self._kept.get(entry.name)):
            await self.look()
            return False
        self._written += 1
        self._take(self._kept | {entry.name: entry})
        return True

    def learn(self, name: str, digest: str) -> None:
        """Takes the content ``digest`` that a worker computed for the configured adapter ``name``."""
        if name in self._configured and self._digests.get(name) != digest:
            self._digests[name] = digest
            self._take(self._kept)

    def forget(self, adapter_id: str) -> None:
        """Drops a retired content, which no worker holds any more."""
        self._retired.pop(adapter_id, None)

    def overdue(self, in_use: Collection[str]) -> list[str]:
        """Returns the ids of contents retired at least RETIRED_S ago that are not ``in_use`` by any request."""
        now = self._clock()
        return [k for k, r in self._retired.items() if k not in in_use and now - r.since >= RETIRED_S]

    # ---- following -----------------------------------------------------------------------------------

    async def begin(self) -> None:
        """Reads the shared registry before the first request; if it can't be read, only logs a warning."""
        if self._store is None:
            return
        try:
            await self._read(self._store)
        except (RedisError, OSError) as error:
            log.warning("the adapters that were added can't be read yet: %s", error)

    async def run(self) -> None:
        """Reads the shared registry every POLL_S until cancelled; returns at once where there is none."""
        while self._store is not None:
            await self.look()
            heed_cancel()
            await asyncio.sleep(POLL_S)

    async def look(self) -> None:
        """Reads the shared registry now, unless it was read under LOOK_AGAIN_S ago; if Redis is away, changes
        nothing.
        """
        if self._store is None:
            return  # the configuration's are all there is
        async with self._looking:
            if self._clock() - self._looked < LOOK_AGAIN_S:
                return
            try:
                await self._patience.ask(partial(self._read, self._store))
            except (RedisError, OSError, TimeoutError) as error:
                log.debug("the registry of adapters can't be read: %s", error)
            self._looked = self._clock()

    async def _read(self, store: AdapterStore) -> None:
        written = -1
        while written != self._written:
            written = self._written
            found = await self._all(store)
            await store.forget_notes(found.values())
        self._take(found)
        self.is_complete = True

    async def _all(self, store: AdapterStore) -> dict[str, AdapterEntry]:
        found = await store.all()
        if not found and self._kept:
            log.warning("Redis has lost the registry of adapters: it is written again")
            await store.restore(self._kept.values())  # what was taken out as well: the configuration may name it
            found = await store.all()
        return found

    def _take(self, kept: Mapping[str, AdapterEntry]) -> None:
        before, self._kept = self._served, dict(kept)
        self._served = served_of(self._configured, self._digests, self._kept)
        now = self._clock()
        for entry in before.values():
            after = self._served.get(entry.name)
            if entry.adapter_id and (after is None or after.adapter_id != entry.adapter_id):
                readable = after is None or after.path != entry.path
                self._retired[entry.adapter_id] = RetiredAdapter(entry, now, readable)
        for entry in self._served.values():
            self._retired.pop(entry.adapter_id, None)


def served_of(
    configured: Mapping[str, AdapterEntry], digests: Mapping[str, str], kept: Mapping[str, AdapterEntry]
) -> dict[str, AdapterEntry]:
    """Returns the served adapters, sorted by name; ``kept`` (the shared registry) overrides ``configured``.

    ``digests`` are the contents of configured adapters that workers have read, by name. Removed ones are left out.
    """
    found = {
        name: msgspec.structs.replace(entry, digest=digests.get(name, entry.digest))
        for name, entry in configured.items()
    } | dict(kept)
    return {name: found[name] for name in sorted(found) if not found[name].removed}
