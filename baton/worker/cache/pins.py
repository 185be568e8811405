"""Pinned prefixes of a worker: cached blocks kept under a name for a time, within a limit.

Knows nothing of who asks, nor of how a prompt is computed: blocks that aren't cached here are fetched, or aren't
pinned. A pin outlives a change of role, and ends with the process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from baton.kv.exchange.source import BlockSource
from baton.kv.exchange.warming import Warmer
from baton.kv.pages.window import first_seen
from baton.protos.errors import Cancelled, InvalidRequest, PinsFull
from baton.protos.nouns import BLOCK_TOKENS, EngineRequest, Sampling

MOST_TTL_S = 7 * 86_400.0  # seconds: a week, so that a forgotten pin ends


class ActivePin(NamedTuple):
    """Holds one pin: the engine's key of it, the number of its pages, and the timer that ends it."""

    key: int
    pages: int
    timer: asyncio.TimerHandle


class PrefixPins:
    """Pins prefixes of at most ``most_pages`` pages in all; blocks that two pins share count twice.

    ``windows`` are those of the page tables where a block has several pages.
    """

    def __init__(
        self,
        source: BlockSource,
        warmer: Warmer,
        most_pages: int,
        block_tokens: int,
        windows: Sequence[int] = (),
    ) -> None:
        self._source, self._warmer, self._windows = source, warmer, windows
        self._most, self._size = most_pages, block_tokens
        self._pins: dict[str, ActivePin] = {}
        self._coming: dict[str, int] = {}
        self._unwanted: set[str] = set()  # of those that are coming, because they were unpinned meanwhile

    async def pin(self, name: str, request: EngineRequest, ttl_s: float, address: str = "") -> int:
        """Pins the prompt's leading full blocks that are cached here, or at worker ``address``, for ``ttl_s``
        seconds; returns the number of pinned tokens.

        Raises PinsFull before anything is fetched, InvalidRequest, and Cancelled if ``unpin`` comes first.
        """
        blocks = len(request.token_ids) // self._size
        pages = blocks + self._further(blocks)
        self._check(name, pages, ttl_s)
        self._coming[name] = pages
        try:
            longer = EngineRequest("", (*request.token_ids, 0), len(request.token_ids) + 1, Sampling(), 0,
                                   request.adapter_id, request.tenant_salt)  # fmt: skip
            await self._warmer.warm(longer, address, blocks * self._size // BLOCK_TOKENS)
            key, held = await self._hold(await self._warmer.hashes(longer, blocks))
        finally:
            del self._coming[name]
            unwanted = name in self._unwanted
            self._unwanted.discard(name)
        if unwanted:
            self._source.let_go(key)
            raise Cancelled(f"prefix {name} was unpinned before it was pinned")
        self.unpin(name)
        timer = asyncio.get_running_loop().call_later(ttl_s, self.unpin, name)
        self._pins[name] = ActivePin(key, held + self._further(held), timer)
        return held * self._size

    async def _hold(self, hashes: list[bytes]) -> tuple[int, int]:
        """Holds the cached leading blocks of ``hashes``; returns the key and their number, which is 0 where further
        pages are lacking, without which they couldn't be continued.
        """
        seen = self._warmer.seen_behind(hashes)
        key, pages = await self._source.hold((*seen, *hashes))
        if not seen or pages == len(seen) + len(hashes):
            return key, pages - len(seen)
        self._source.let_go(key)
        return key, 0

    def _further(self, blocks: int) -> int:
        """Returns the number of pages that a prefix of ``blocks`` blocks needs beside one for each block."""
        return sum(blocks - first_seen(blocks * self._size, window, self._size) for window in self._windows[1:])

    def unpin(self, name: str) -> bool:
        """Ends the pin ``name``, also one that is being pinned; returns whether there was one."""
        if name in self._coming:
            self._unwanted.add(name)
        found = self._pins.pop(name, None)
        if found is None:
            return name in self._coming
        found.timer.cancel()
        self._source.let_go(found.key)
        return True

    def _check(self, name: str, pages: int, ttl_s: float) -> None:
        if not 0 < ttl_s <= MOST_TTL_S:
            raise InvalidRequest(f"ttl_s is {ttl_s}: give seconds over 0, {MOST_TTL_S:.0f} at most", "ttl_s")
        if not pages:
            raise InvalidRequest(
                f"a prefix is pinned by blocks of {self._size} tokens: give a longer one", "prompt"
            )
        if name in self._coming:
            raise InvalidRequest(f"prefix {name} is being pinned already: wait for the answer", "id")
        others = [pin.pages for other, pin in self._pins.items() if other != name]
        taken = sum(others) + sum(self._coming.values())
        if taken + pages > self._most:
            raise PinsFull(
                f"{pages} pages are to be pinned; of {self._most} that may be (worker.pinned_share) {taken} are. "
                "Delete pinned prefixes, or pin a shorter one.",
                "worker.pinned_share",
            )
