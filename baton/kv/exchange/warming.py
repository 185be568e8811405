"""Caches KV blocks of a request here before it is computed, from lower tiers or other workers. Torch-free.

Knows nothing of how a source was chosen (the router's cost does that) or of the engine's queue. Answers are
correct without it: after a failure more has to be computed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from baton.kv.exchange.fetch import BlockFetcher
from baton.kv.exchange.filling import NOTHING, Bring, Filler, FillReport
from baton.kv.layout import prefix
from baton.kv.pages.tables import deepest, seen_behind
from baton.kv.tiers.holdings import Holdings
from baton.kv.tiers.shared import SharedTier
from baton.kv.tiers.stack import Tiers
from baton.protos.nouns import BLOCK_TOKENS, EngineRequest

HASH_OFF_LOOP_TOKENS = 4096  # tokens from which on hashing runs in a thread, so that the event loop isn't blocked


class BlockKind(NamedTuple):
    """Says whose blocks a worker can use: those of the same weights and fidelity, of ``block_tokens`` tokens each.

    Blocks of a ``stateful`` worker are of no use without recurrent state. Where blocks have several pages,
    ``windows`` are those of their tables, in tokens.
    """

    fingerprint: str
    fidelity: str
    block_tokens: int = BLOCK_TOKENS
    stateful: bool = False
    windows: Sequence[int] = ()


class LowerTiers(NamedTuple):
    """Holds where blocks may lie besides the device: this worker's tiers, and the cluster's shared one."""

    tiers: Tiers | None = None
    holdings: Holdings | None = None
    shared: SharedTier | None = None


class Warmer:
    """Warms one worker's KV cache for requests.

    ``observe`` is called with the report of every fetch that brought blocks or failed; the cost curve is fitted to
    these. A worker whose blocks are of no use without recurrent state isn't warmed. Where blocks have several
    pages, those of layers with a window that the next token sees come first, because the others are of no use
    without them.
    """

    def __init__(
        self,
        filler: Filler,
        fetcher: BlockFetcher,
        kind: BlockKind,
        observe: Callable[[FillReport], None] = lambda report: None,
        lower: LowerTiers = LowerTiers(),
    ) -> None:
        self._filler, self._fetcher, self._observe = filler, fetcher, observe
        self._fingerprint, self._fidelity, self._block_tokens, self._stateful, self._windows = kind
        self._tiers, self._holdings, self._shared = lower

    @property
    def has_tiers(self) -> bool:
        """Returns whether this worker has lower tiers."""
        return self._tiers is not None

    async def warm(
        self, request: EngineRequest, address: str = "", blocks: int = 0, limit_s: float | None = None
    ) -> FillReport:
        """Lifts the prompt's leading blocks from lower tiers, then fetches up to ``blocks`` (of 16 tokens) from the
        worker at ``address``.

        The blocks are cached afterwards. Returns the fetch's report, NOTHING if there was no fetch. ``limit_s``
        limits the fetch, in seconds.
        """
        if self._stateful:
            return NOTHING
        most = (len(request.token_ids) - 1) // self._block_tokens
        wanted = min(blocks * BLOCK_TOKENS // self._block_tokens, most) if address else 0
        hashes = await self.hashes(request, most if self.has_tiers else wanted)
        lifted = await self._take_shared(hashes, await self._lift_prompt(hashes))
        if wanted <= lifted:
            return NOTHING
        bring = self._filler.verified(partial(self._fetcher.blocks, address))
        report = await self._load(hashes[:wanted], bring, limit_s)
        if report.blocks or report.failed:
            self._observe(report)  # what failed took its time as well: the router should know
        return report

    async def _load(self, hashes: Sequence[bytes], bring: Bring, limit_s: float | None = None) -> FillReport:
        """Caches blocks ``hashes`` of a prompt by ``bring``, and before them the further pages without which they
        couldn't be continued; returns a report.
        """
        whole, seen = partial(self._filler.load, hashes, bring), self.seen_behind(hashes)
        if self._holdings is not None:  # a source may lack what is on the device: a fill passes over it only first
            seen = sorted(seen, key=self._holdings.on_device, reverse=True)
        return await (self._filler.load(seen, bring, limit_s, whole) if seen else whole(limit_s))

    def _cached(self, report: FillReport, hashes: Sequence[bytes]) -> int:
        """Returns how many blocks of ``hashes`` are cached here after the fill of ``report``."""
        return max(0, report.held + report.blocks - len(self.seen_behind(hashes)))

    async def _lift_prompt(self, hashes: Sequence[bytes]) -> int:
        """Brings the leading blocks of a prompt that can be continued up from the lower tiers; returns how many are
        in the device's cache then, as far as is known.
        """
        if not self._windows or self._tiers is None or self._holdings is None:
            return await self.lift(hashes)
        found = hashes[: deepest(self._holdings, hashes, self._windows, self._block_tokens)]
        if not self._holdings.leading([*self.seen_behind(found), *found])[1]:
            return len(found)
        return self._cached(await self._load(found, self._tiers.load), found)

    def seen_behind(self, hashes: Sequence[bytes]) -> list[bytes]:
        """Returns the hashes of the further pages without which the prefix ``hashes`` can't be continued."""
        return seen_behind(hashes, self._windows, self._block_tokens)

    async def lift(self, hashes: Sequence[bytes]) -> int:
        """Brings leading blocks of ``hashes`` up from the lower tiers; returns how many are in the device's cache
        then, as far as is known.
        """
        if self._tiers is None or self._holdings is None or self._stateful:
            return 0
        count, lower = self._holdings.leading(hashes)
        if not lower:
            return count
        report = await self._filler.load(hashes[:count], self._tiers.load)
        return report.held + report.blocks

    async def _take_shared(self, hashes: Sequence[bytes], here: int) -> int:
        """Brings the blocks after the first ``here`` from the store that workers share; returns how many are cached
        here then.
        """
        more = await self._shared.leading(hashes[here:]) if self._shared is not None else 0
        if self._shared is None or not more:
            return here
        wanted = hashes[: here + more]
        return max(here, self._cached(await self._load(wanted, self._shared.load), wanted))

    async def hashes(self, request: EngineRequest, blocks: int) -> list[bytes]:
        """Returns the hashes of the first ``blocks`` full blocks of the request's tokens."""
        root = prefix.root(self._fingerprint, self._fidelity, request.adapter_id, request.tenant_salt)
        size = self._block_tokens
        tokens = request.token_ids[: blocks * size]
        if len(tokens) < HASH_OFF_LOOP_TOKENS:
            return prefix.block_hashes(root, tokens, size)
        return await asyncio.to_thread(prefix.block_hashes, root, tokens, size)
