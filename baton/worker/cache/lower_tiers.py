"""A worker's lower cache tiers (host memory, disk, shared store), as its spec asks for them, and the task that
copies blocks to them.

Knows nothing of requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import assert_never

from baton.kv.layout.bridge import Bridge, codec_of, land
from baton.kv.tiers.blobs import BlobStore, meaning_of
from baton.kv.tiers.disk import DiskTier
from baton.kv.tiers.folder import FolderStore
from baton.kv.tiers.holdings import Holdings
from baton.kv.tiers.memory import host_slab
from baton.kv.tiers.s3 import BucketStore
from baton.kv.tiers.shared import PageCoder, SharedTier
from baton.kv.tiers.stack import BESIDE_DECODE, Tier, Tiers
from baton.kv.tiers.writeback import WriteBack
from baton.protos import channel as ch
from baton.protos.errors import ConfigError
from baton.protos.nouns import KvLayout, WorkerInfo
from baton.tasks.lasting import lasting
from baton.worker.environment import Engine, WorkerEnvironment
from baton.worker.spec import CacheSpec, WorkerSpec


class WorkerTiers:
    """Owns the tiers below the device's pages, the list of blocks held in any of them, and the write-back task.
    ``disk`` is the disk tier, None without one.
    """

    def __init__(self, spec: WorkerSpec, engine: Engine, info: WorkerInfo, environment: WorkerEnvironment) -> None:
        self.disk: DiskTier | None = None
        self._shares_cores = spec.engine.device != "cuda"
        self._beside_decode = False
        self.set_role(spec.role)
        self.tiers = Tiers(self._open(spec, info), environment.copy_clock)
        self.holdings = Holdings(self.tiers)
        self.shared = _shared(spec.cache, info, environment.clock)
        send, memory = engine.channel.send, engine.memory
        self._writeback = WriteBack(send, memory, self.tiers, self.holdings, environment.clock, self.shared)
        self._task = lasting(self._writeback.run, "write-back")

    def set_role(self, role: str) -> None:
        """Sets the worker's role from now on."""
        self._beside_decode = role == "decode" and self._shares_cores

    def running(self, sequences: int) -> None:
        """Slows copies from the tiers while a CPU decodes ``sequences``; a GPU's steps don't share its memory
        bandwidth.
        """
        self.tiers.duty = BESIDE_DECODE if self._beside_decode and sequences else 1.0

    def take(self, message: ch.KeepAnswer | ch.CacheIdle) -> None:
        """Handles one message of the engine about blocks that may be written back."""
        match message:
            case ch.CacheIdle():
                self._writeback.idle(message.hashes)
            case ch.KeepAnswer():
                self._writeback.take(message)
            case _:
                assert_never(message)

    async def close(self) -> None:
        """Stops copying and closes the tiers; a disk tier's blocks stay for the slot's next process."""
        self._task.cancel()
        try:
            await asyncio.wait({self._task})
            if self.shared is not None:
                await self.shared.close()
        finally:
            hung = any(tier.hung for tier in self.tiers.tiers)
            self.tiers.close()
            if self.disk is not None and not hung:  # else its thread may still use the files' descriptors
                self.disk.close()

    def _open(self, spec: WorkerSpec, info: WorkerInfo) -> list[Tier]:
        made = []
        if spec.cache.host_tier_bytes:
            host = host_slab(spec.cache.host_tier_bytes, info.layout.page_bytes, spec.cache.eviction)
            if host is None:
                text = f"{spec.cache.host_tier_bytes} bytes don't hold one page of {info.layout.page_bytes}"
                raise ConfigError(f"{text}; raise worker.host_tier_bytes", "worker.host_tier_bytes")
            made.append(Tier("host", host))
        if spec.cache.disk_tier_bytes:
            folder = Path(spec.cache.disk_tier_dir).expanduser() / spec.slot
            of = spec.cache.disk_tier_bytes, info.layout, info.fingerprint, spec.cache.eviction
            self.disk = DiskTier(folder, *of)
            made.append(Tier("disk", self.disk.slab))
        return made


def _shared(cache: CacheSpec, info: WorkerInfo, clock: Callable[[], float]) -> SharedTier | None:
    """The tier that workers share; None without one, and where blocks are of no use without recurrent state."""
    if not cache.shared_tier or info.layout.states:
        return None
    store: BlobStore
    if cache.shared_tier.startswith("s3://"):
        store = BucketStore(cache.shared_tier, cache.shared_tier_endpoint)
    else:
        store = FolderStore(Path(cache.shared_tier).expanduser())
    meaning = meaning_of(info.layout, info.fingerprint)
    return SharedTier(
        store, meaning, info.layout.page_bytes, cache.shared_tier_bytes, clock, page_coder(info.layout)
    )


def page_coder(layout: KvLayout) -> PageCoder | None:
    """Returns the coder of pages for the shared tier, which stores them as the layout's codec has them on the wire;
    None without a codec.
    """
    if not codec_of(layout):
        return None
    made = Bridge(layout, layout)

    def restore(wire: memoryview) -> bytes:
        page = bytearray(layout.page_bytes)
        land(wire, memoryview(page), layout)
        return bytes(page)

    return PageCoder(made.unit, lambda page: bytes(made.convert(memoryview(page))), restore)
