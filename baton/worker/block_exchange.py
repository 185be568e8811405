"""A worker's exchange of cached blocks: what it gives others, what it takes from them and from its lower tiers.

Composed here for either role; knows nothing of prompts, answers or servers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import assert_never

from baton.kv.exchange.fetch import BlockFetcher
from baton.kv.exchange.filling import Filler, FillReport
from baton.kv.exchange.source import BlockSource
from baton.kv.exchange.warming import Warmer
from baton.kv.tiers.shared import SharedTier
from baton.kv.tiers.slab import Slab
from baton.protos import channel as ch
from baton.protos.errors import WorkerLost
from baton.protos.nouns import WorkerInfo
from baton.worker.environment import Engine, WorkerEnvironment
from baton.worker.lower_tiers import WorkerTiers
from baton.worker.pins import PrefixPins
from baton.worker.spec import WorkerSpec

Publish = Callable[[Sequence[bytes], Sequence[bytes]], None]


class WorkerBlocks:
    """Exchanges cached blocks: ``source`` answers Fetch, ``warmer`` brings blocks here."""

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
        self.warmer = Warmer(
            self._filler,
            self._fetcher,
            info.fingerprint,
            info.layout.fidelity,
            observe,
            self._tiers.tiers if self._tiers else None,
            self._tiers.holdings if self._tiers else None,
            info.layout.block_tokens,
            stateful=bool(info.layout.states),
            shared=self._tiers.shared if self._tiers else None,
        )
        self.source = BlockSource(send, memory, info.layout, info.model_id, self.warmer.lift)
        most = int(spec.cache.pinned_share * info.pages)
        self.pins = PrefixPins(self.source, self.warmer, most, info.layout.block_tokens)

    def plays(self, role: str) -> None:
        """Sets the role that the worker plays from now on."""
        if self._tiers is not None:
            self._tiers.plays(role)

    def announce_to(self, publish: Publish) -> None:
        """Tell the index of every change from now on, and of what a disk tier still holds."""
        self._publish = publish
        if self._tiers is not None:
            self._tiers.holdings.announce_to(publish)

    def tiers(self) -> dict[str, Slab | SharedTier]:
        """Returns what the lower tiers count, by their names; nothing where there are none."""
        if self._tiers is None:
            return {}
        found: dict[str, Slab | SharedTier] = {tier.name: tier.slab for tier in self._tiers.tiers.tiers}
        return found if self._tiers.shared is None else found | {"shared": self._tiers.shared}

    def take(self, message: ch.FromCache) -> None:
        """Acts on one message of the engine about cached blocks."""
        match message:
            case ch.CacheChanged():
                changed = self._tiers.holdings.changed if self._tiers else self._publish
                changed(message.added, message.removed)
            case ch.Pinned():
                self.source.take(message)
            case ch.Filling():
                self._filler.take(message)
            case ch.Kept() | ch.CacheIdle():
                assert self._tiers is not None, "an engine tells of idle blocks only where there are lower tiers"
                self._tiers.take(message)
            case _:
                assert_never(message)

    def running(self, sequences: int) -> None:
        """Sets how many sequences the engine works on: lifting blocks gives way to them."""
        if self._tiers is not None:
            self._tiers.running(sequences)

    def lost(self, error: WorkerLost) -> None:
        """Ends every fetch and fill that waits for the engine, which is gone, with ``error``."""
        self.source.lost(error)
        self._filler.lost(error)

    async def close(self) -> None:
        """Close every connection and tier."""
        await self._fetcher.close()
        if self._tiers is not None:
            await self._tiers.close()
