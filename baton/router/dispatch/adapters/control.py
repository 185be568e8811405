"""Loading, replacing and unloading a cluster's LoRA adapters on an operator's request.

Knows nothing of REST or of who may ask. A name is served only after a worker has read and checked the files; a
refused adapter leaves nothing behind. Requests in flight keep the content that they began on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import PurePosixPath

import msgspec

from baton.cluster.adapters import AdapterEntry
from baton.protos.adapter_id import digest_of, require_name
from baton.protos.errors import (
    AdapterChanged,
    AdapterRefused,
    AdaptersFull,
    AdapterTaken,
    BatonError,
    NoWorker,
    QuotaExceeded,
)
from baton.protos.nouns import AdapterInfo
from baton.router.adapters.registry import AdapterRegistry
from baton.router.dispatch.adapters.loads import AdapterLoads, unknown
from baton.router.workers.link import WorkerLink
from baton.router.workers.link_table import LinkTable

MAX_PATH = 512  # characters


class AdapterBounds(msgspec.Struct, frozen=True):
    """Limits the adapters that a cluster serves by name, in all and per tenant (0: no limit per tenant)."""

    served: int = 1024
    per_tenant: int = 0


class AdapterControl:
    """Changes which adapters the cluster serves, one change at a time. ``wall_clock`` gives Unix seconds."""

    def __init__(
        self,
        registry: AdapterRegistry,
        loads: AdapterLoads,
        links: LinkTable,
        wall_clock: Callable[[], float],
        bounds: AdapterBounds = AdapterBounds(),
    ) -> None:
        self.registry, self._loads, self._links = registry, loads, links
        self._wall_clock, self._bounds = wall_clock, bounds
        self._turn = asyncio.Lock()

    async def add(self, asked: AdapterEntry, in_place: bool) -> AdapterEntry:
        """Loads ``asked`` on the workers of its model, serves it, and returns its entry with digest and time.

        ``in_place`` lets it replace another content of the name. Raises AdapterRefused, AdapterTaken, AdaptersFull,
        QuotaExceeded, NoWorker, Unavailable, and errors of workers about the files.
        """
        require_name(asked.name)
        require_path(asked.path)
        async with self._turn:
            await self.registry.look()
            self._require_free(asked, in_place)
            links = self._workers(asked.model_id)
            before = {link: set(link.info.adapters) for link in links}
            found = await self._load_everywhere(before, asked)
            [digest] = {digest_of(info.id) for info in found.values()}
            entry = msgspec.structs.replace(asked, digest=digest, at=self._wall_clock())
            try:
                await self._write(entry)
            except BaseException:
                await self._undo([k for k in found if entry.adapter_id not in before[k]], entry.adapter_id)
                raise
        return entry

    async def remove(self, name: str, by: str = "") -> AdapterEntry:
        """Stops serving adapter ``name`` and returns its entry; requests in flight end on it.

        Raises AdapterUnknown, Unavailable.
        """
        async with self._turn:
            await self.registry.look()
            found = self.registry.served().get(name)
            if found is None:
                raise unknown(name, self.registry.served())
            gone = msgspec.structs.replace(found, removed=True, by=by, at=self._wall_clock())
            await self._write(gone)
        return found

    def holders(self, entry: AdapterEntry) -> list[str]:
        """Returns the ids of the workers that hold the adapter's content now."""
        adapter_id = entry.adapter_id
        return sorted(k.info.worker_id for k in self._links if k.up and adapter_id and k.holds(adapter_id))

    # ---- may it be -----------------------------------------------------------------------------------

    def _require_free(self, asked: AdapterEntry, in_place: bool) -> None:
        served = self.registry.served()
        if any(asked.name == link.info.model_id for link in self._links):
            raise AdapterTaken(f"{asked.name!r} is a model's name: choose another", "lora_name")
        present = served.get(asked.name)
        if present is not None and not in_place:
            raise AdapterTaken(
                f"adapter {asked.name!r} is served already (from {present.path}): unload it first, or replace it "
                "(load_inplace)",
                "lora_name",
            )
        if present is None and len(served) >= self._bounds.served:
            raise AdaptersFull(f"{len(served)} adapters are served, which is adapters.max_served: unload some")
        self._require_quota(asked, present)

    def _require_quota(self, asked: AdapterEntry, present: AdapterEntry | None) -> None:
        most, tenant = self._bounds.per_tenant, asked.tenant
        if not tenant or not most or (present is not None and present.tenant == tenant):
            return
        if sum(entry.tenant == tenant for entry in self.registry.served().values()) >= most:
            raise QuotaExceeded(
                f"tenant {tenant!r} has {most} adapters, which is adapters.max_per_tenant", "tenant"
            )

    def _workers(self, model_id: str) -> list[WorkerLink]:
        up = [k for k in self._links if k.up and k.info.model_id == model_id and k.info.state == "ready"]
        if not up:
            raise NoWorker(f"no worker of {model_id!r} can be reached now", retry_after_s=1.0)
        return up

    # ---- do it ---------------------------------------------------------------------------------------

    async def _load_everywhere(
        self, before: Mapping[WorkerLink, Collection[str]], entry: AdapterEntry
    ) -> dict[WorkerLink, AdapterInfo]:
        """Loads it on every worker of the model; what a worker says against the files counts for all.

        A worker that is away or full gets it with the first request there. ``before`` says what each had held:
        those that loaded it may have announced it while others were still at it.
        """
        answers = await asyncio.gather(*(self._loads.load(k, entry) for k in before), return_exceptions=True)
        found = {k: a for k, a in zip(before, answers, strict=True) if isinstance(a, AdapterInfo)}
        failed = [a for a in answers if isinstance(a, BaseException)]
        error = next((e for e in failed if not _may_pass(e)), None) or (failed[0] if not found else None)
        if error is None and len({info.id for info in found.values()}) > 1:
            error = AdapterChanged(
                f"workers read different files at {entry.path!r}: {_differing(found)}; give all of them the same",
                "lora_path",
            )
        if error is not None:
            for link, info in found.items():
                if info.id not in before[link]:
                    await self._undo([link], info.id)
            raise error
        return found

    async def _write(self, entry: AdapterEntry) -> None:
        if not await self.registry.put(entry):
            raise AdapterTaken(f"adapter {entry.name!r} was changed by somebody else meanwhile: look again")

    async def _undo(self, links: Sequence[WorkerLink], adapter_id: str) -> None:
        """Takes a content that is not to be served off the workers that loaded it for that."""
        if self.registry.of_id(adapter_id) is None:
            await self._loads.unload(links, adapter_id)


def require_path(path: str) -> None:
    """Raises AdapterRefused unless ``path`` is a plain relative path of at most MAX_PATH characters, without "."
    and "..".
    """
    parts = path.split("/")
    plain = all(part not in ("", ".", "..") for part in parts) and not PurePosixPath(path).is_absolute()
    if not plain or len(path) > MAX_PATH or "\\" in path or not path.isprintable():
        raise AdapterRefused(
            f"path {path[:MAX_PATH]!r}: give the adapter's folder relative to adapters.root, without '..'",
            "lora_path",
        )


def _may_pass(error: BaseException) -> bool:
    """Returns whether a load failed for a reason that says nothing of the files."""
    return isinstance(error, BatonError) and error.retryable


def _differing(found: dict[WorkerLink, AdapterInfo]) -> str:
    return ", ".join(sorted(f"{link.info.worker_id} {digest_of(info.id)}" for link, info in found.items()))
