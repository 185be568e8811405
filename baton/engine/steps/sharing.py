"""Shares pages with the I/O process: cached blocks that it reads for other workers, pages that it fills from
elsewhere.

Torch-free. Knows nothing of sequences, of who asks, or where bytes come from. Single-threaded, in the engine
process: it only leases pages and takes them back. A share always ends by a message of the I/O process (Unpin,
Unkeep, Filled), which comes after its last read or write; if that process dies, the engine process ends too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from baton.engine.abilities import Mirror, copies_left
from baton.kv.pages.pool import PageLease, PagePool
from baton.protos import channel as ch
from baton.protos.errors import BatonError, PoolExhausted, RankLost, Unavailable

log = logging.getLogger("baton.engine")

KEPT_FOR_REQUESTS = 8  # fills leave an eighth of the pages, so that what is fetched doesn't starve what is computed


def nothing() -> int:
    """Returns 0: no page is reserved."""
    return 0


def prefixes_in_the_way() -> Unavailable:
    """Returns the error of a request that lacks pages while nothing but pinned prefixes holds any.

    Waiting would keep all others waiting, too, for as long as the pins last.
    """
    text = "pinned prefixes hold pages that this request needs: unpin some, or lower worker.pinned_share"
    return Unavailable(text, "worker.pinned_share")


class PageSharing:
    """Holds the pages shared with the I/O process, by its keys: pins (cached blocks being read), keeps (protected
    from eviction) and fills (pages being written).

    ``mirror`` brings what cards or other hosts have of pages before the I/O process reads them; None: the host has
    every page whole.
    """

    def __init__(self, pool: PagePool, mirror: Mirror | None = None) -> None:
        self._pool, self._mirror = pool, mirror
        self._pins: dict[int, PageLease] = {}
        self._lasting: set[int] = set()  # pins of prefixes, which last until somebody lets them go
        self._kept: dict[int, tuple[int, ...]] = {}
        self._fills: dict[int, tuple[PageLease, tuple[bytes, ...]]] = {}

    def __len__(self) -> int:
        """Returns the number of open shares."""
        return len(self._pins) + len(self._fills) + len(self._kept)

    @property
    def only_keeps_prefixes(self) -> bool:
        """Returns whether all shares are of pinned prefixes, so that none comes free by itself soon."""
        return 0 < len(self._lasting) == len(self)

    def pin(self, message: ch.Pin, reserved: Callable[[], int] = nothing) -> ch.Pinned:
        """Leases the leading cached blocks of a fetch and returns their pages; returns none if fewer than
        ``reserved()`` pages would stay available.
        """
        found = self._pool.match(message.hashes)
        lease = self._leased(message.hashes[:found], 0, reserved)
        if lease is None:
            return ch.Pinned(message.key, ())
        if message.lasts:
            self._lasting.add(message.key)
        elif not self._made_whole(lease.pages):
            lease.close()
            return ch.Pinned(message.key, ())
        self._pins[message.key] = lease
        return ch.Pinned(message.key, tuple(lease.pages))

    def _leased(self, hashes: Sequence[bytes], kept: int, reserved: Callable[[], int]) -> PageLease | None:
        """Leases pages for the blocks ``hashes``; returns None, with nothing evicted, if fewer than ``kept`` or
        ``reserved()`` pages would stay available.

        What runs needs more once its own pages are shared, because they don't become available as its window
        passes them. So it is asked again after that, and before pages for the other blocks are taken.
        """
        held = self._pool.match(hashes)
        lacking = len(hashes) - held
        try:
            lease = self._pool.open(hashes[:held], held, max(kept, reserved()) + lacking)
        except PoolExhausted:
            return None
        try:
            lease.extend(lacking, max(kept, reserved()))
        except PoolExhausted:
            lease.close()
            return None
        return lease

    def _made_whole(self, pages: Sequence[int]) -> bool:
        """Has the host's ``pages`` made whole, and returns whether they could be; what fails costs a hit alone."""
        if self._mirror is None:
            return True
        left = copies_left(self._mirror)
        if left is not None and len(pages) > max(0, left):
            log.info("%d KV pages aren't shared: the host has room for copies of %d", len(pages), max(0, left))
            return False
        try:
            self._mirror.make_whole(pages)
        except RankLost:
            raise
        except BatonError as error:
            log.warning("KV pages aren't shared: %s", error.message)
            return False
        return True

    def unpin(self, message: ch.Unpin) -> None:
        """Ends a pin, whose pages were read."""
        read = message.key not in self._lasting
        self._lasting.discard(message.key)
        lease = self._pins.pop(message.key, None)
        if lease is not None:
            if read and self._mirror is not None:
                self._mirror.let_go(lease.pages)
            lease.close()

    def keep(self, message: ch.Keep) -> ch.KeepAnswer:
        """Protects the cached ones among the blocks from eviction, so that they may be copied, and returns their
        hashes and pages; their order of use stays.
        """
        found = {block: page for block in message.hashes if (page := self._pool.keep(block)) is not None}
        if not self._made_whole(tuple(found.values())):
            for page in found.values():
                self._pool.unkeep(page)
            found = {}
        self._kept[message.key] = tuple(found.values())
        return ch.KeepAnswer(message.key, tuple(found), tuple(found.values()))

    def unkeep(self, message: ch.Unkeep) -> None:
        """Ends a keep, whose pages were copied."""
        kept = self._kept.pop(message.key, ())
        if self._mirror is not None:
            self._mirror.let_go(kept)
        for page in kept:
            self._pool.unkeep(page)

    def fill(self, message: ch.Fill, reserved: Callable[[], int] = nothing) -> ch.Filling:
        """Leases pages for blocks that come from another worker or store, and returns them; returns none if fewer
        than ``reserved()`` pages, or those kept for requests, would stay available.
        """
        lease = self._leased(message.hashes, self._pool.pages // KEPT_FOR_REQUESTS, reserved)
        if lease is None:
            return ch.Filling(message.key, 0, ())
        self._fills[message.key] = lease, message.hashes
        if self._mirror is not None:
            self._mirror.opened(lease.pages[lease.held :])
        return ch.Filling(message.key, lease.held, tuple(lease.pages))

    def filled(self, message: ch.Filled) -> None:
        """Ends a fill: its first ``message.blocks`` blocks were verified and join the cache as the most recently
        used.
        """
        share = self._fills.pop(message.key, None)
        if share is None:
            return
        lease, hashes = share
        with lease:
            for index in range(lease.held, message.blocks):
                lease.seal(index, hashes[index])
