"""A worker's exchange of cached KV blocks with other workers and with its lower tiers.

Put together here for either role; knows nothing of prompts, answers or servers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import assert_never

from baton.kv.exchange.fetch import BlockFetcher
from baton.kv.exchange.filling import Filler, FillReport
from baton.kv.exchange.source import BlockSource
from baton.kv.exchange.warming import BlockKind, LowerTiers, Warmer
from baton.kv.tiers.disk import DiskTier
from baton.kv.tiers.shared import SharedTier
from baton.kv.tiers.slab import Slab
from baton.protos import channel as ch
from baton.protos.errors import WorkerLost
from baton.protos.nouns import WorkerInfo
from baton.worker.cache.lower_tiers import WorkerTiers
from baton.worker.cache.pins import PrefixPins
from baton.worker.environment import Engine, WorkerEnvironment
from baton.worker.spec import WorkerSpec

Publish = Callable[[Sequence[bytes], Sequence[bytes]], None]


class WorkerBlocks:
    """Exchanges cached KV blocks: ``source`` serves Fetch calls, ``warmer`` brings blocks into this worker's cache,
    ``pins`` keeps prefixes.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        engine: Engine,
        info: WorkerInfo,
        observe: Callable[[FillReport], None],
        environment: WorkerEnvironment,
    ) -> None:
        send, memory = engine.channel.send, engine.memory
        self._tiers = WorkerTiers(spec, engine, info, environment) if spec.cache.has_tiers else None
        self._publish: Publish = lambda added, removed: None
        self._filler = Filler(send, memory, environment.clock)
        self._fetcher = BlockFetcher(info.model_id, info.layout, environment.dialer)
        layout, own = info.layout, self._tiers
        kind = BlockKind(
            info.fingerprint, layout.fidelity, layout.block_tokens, bool(layout.states), layout.windows
        )
        lower = LowerTiers() if own is None else LowerTiers(own.tiers, own.holdings, own.shared)
        self.warmer = Warmer(self._filler, self._fetcher, kind, observe, lower)
        self.source = BlockSource(send, memory, info.layout, info.model_id, self.warmer.lift)
        most = int(spec.cache.pinned_share * info.pages)
        self.pins = PrefixPins(self.source, self.warmer, most, info.layout.block_tokens, info.layout.windows)

    def set_role(self, role: str) -> None:
        """Sets the worker's role from now on."""
        if self._tiers is not None:
            self._tiers.set_role(role)

    def announce_to(self, publish: Publish) -> None:
        """Passes every change of the cache to ``publish(added, removed)`` from now on, and the blocks that a disk
        tier still holds.
        """
        self._publish = publish
        if self._tiers is not None:
            self._tiers.holdings.announce_to(publish)

    def tiers(self) -> dict[str, Slab | SharedTier]:
        """Returns the lower tiers by name, which hold their counts; {} if there are none."""
        if self._tiers is None:
            return {}
        found: dict[str, Slab | SharedTier] = {tier.name: tier.slab for tier in self._tiers.tiers.tiers}
        return found if self._tiers.shared is None else found | {"shared": self._tiers.shared}

    @property
    def disk(self) -> DiskTier | None:
        """Returns the disk tier, None without one."""
        return None if self._tiers is None else self._tiers.disk

    def take(self, message: ch.FromCache) -> None:
        """Handles one message of the engine about cached blocks."""
        match message:
            case ch.CacheChanged():
                changed = self._tiers.holdings.changed if self._tiers else self._publish
                changed(message.added, message.removed)
            case ch.Pinned():
                self.source.take(message)
            case ch.Filling():
                self._filler.take(message)
            case ch.KeepAnswer() | ch.CacheIdle():
                assert self._tiers is not None, "an engine tells of idle blocks only where there are lower tiers"
                self._tiers.take(message)
            case _:
                assert_never(message)

    def running(self, sequences: int) -> None:
        """Sets the number of sequences that the engine works on; copies from lower tiers slow down beside them."""
        if self._tiers is not None:
            self._tiers.running(sequences)

    def lost(self, error: WorkerLost) -> None:
        """Ends every fetch and fill that waits for the engine, which has died, with ``error``."""
        self.source.lost(error)
        self._filler.lost(error)

    async def close(self) -> None:
        """Closes the connections to other workers and the lower tiers."""
        await self._fetcher.close()
        if self._tiers is not None:
            await self._tiers.close()
