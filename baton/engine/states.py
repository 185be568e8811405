"""Manages the pages of a sequence's recurrent state, and which of its states stay cached. Torch-free.

Knows nothing of what a state holds. A step reads the state after a sequence's computed tokens from one set of pages
and writes the next state to another, so that it can be repeated. Three sets of pages take turns:

    current    the state after the computed tokens         (none yet: zeros)
    spare      what the next step writes
    rolling    the state at the end of the last full block that was decoded: it becomes a checkpoint when the
               sequence ends or is preempted, so that the next turn goes on from there

A state that is written at a checkpoint boundary (``StateRules``) is sealed at once: its pages join the cache, and
another set is leased in their place. If the pool has none to spare, the checkpoint is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from baton.kv.layout.page import sliding_window, sunk_blocks
from baton.kv.layout.room import WORKING_STATES
from baton.kv.layout.state import state_hashes, state_pages
from baton.kv.pages.pool import MOST_BLOCKS, PageLease, PagePool
from baton.kv.pages.tables import open_tables, open_tables_behind
from baton.kv.pages.window import first_seen
from baton.protos.errors import PoolExhausted
from baton.protos.nouns import KvLayout

KEPT = 8  # checkpoints leave an eighth of the pages to what running sequences will need


class StateRules:
    """Says how sequences keep recurrent state: ``pages`` pages per state, and a cached checkpoint every ``every``
    blocks.

    ``every`` 0 is as many blocks as a state has pages: checkpoints then take no more of the pool than the K and V
    that they belong to.
    """

    def __init__(self, pages: int, every: int = 0) -> None:
        self.pages = pages
        self.every = every or max(1, pages)

    @classmethod
    def of(cls, layout: KvLayout, every: int = 0) -> StateRules | None:
        """Returns the rules of a model with ``layout``; None if it has no recurrent state."""
        return cls(state_pages(layout), every) if layout.states else None

    def deepest(self, pool: PagePool, hashes: Sequence[bytes], limit: int) -> int:
        """Returns the length of the longest prefix of ``hashes``, ``limit`` blocks at most, that is cached with the
        state after it.
        """
        found = pool.match(hashes[:limit])
        while found and not self._has(pool, hashes[found - 1]):
            found -= 1
        return found

    def _has(self, pool: PagePool, block: bytes) -> bool:
        known = pool.blocks.page_of
        return all(part in known for part in state_hashes(block, self.pages))

    def cut(self, start: int, end: int, prompt: int, size: int) -> int:
        """Returns at which token a step from ``start`` that could go to ``end`` must stop: at the first checkpoint
        boundary between them, else at ``end``.

        ``prompt`` is the prompt's length and ``size`` a block's, in tokens.
        """
        stride = self.every * size
        for boundary in sorted(((start // stride + 1) * stride, self.last(prompt, size))):
            if start < boundary < end:
                return boundary
        return end

    def is_boundary(self, tokens: int, prompt: int, size: int) -> bool:
        """Returns whether the state after ``tokens`` tokens is to be a checkpoint; ``prompt`` and ``size`` are as
        in ``cut``.
        """
        return tokens > 0 and (tokens % (self.every * size) == 0 or tokens == self.last(prompt, size))

    @staticmethod
    def last(prompt: int, size: int) -> int:
        """Returns the tokens in the full blocks of a prompt of ``prompt`` tokens, less the last token; another
        request with the same prompt could skip as many. ``size`` is a block's length.
        """
        return max(0, prompt - 1) // size * size


class SequenceStates:
    """Leases the pages of one sequence's states. ``block`` is the hash of the block whose cached checkpoint it
    continues from, None if it begins without tokens. Steps need ``lease`` first.
    """

    def __init__(self, pool: PagePool, rules: StateRules, block: bytes | None = None) -> None:
        self._pool, self._rules = pool, rules
        self._rolling: tuple[PageLease, bytes] | None = None
        self.current: PageLease | None = None if block is None else self._find(block)
        self._spares: list[PageLease] = []

    def lease(self, reserve: int = 0) -> None:
        """Leases the pages that steps write, leaving ``reserve`` pages free. Raises PoolExhausted; call ``close``
        then.
        """
        while len(self._spares) < WORKING_STATES:
            self._spares.append(self._pool.open((), self._rules.pages, reserve))

    @property
    def source(self) -> list[int] | None:
        """Returns the pages with the state after the computed tokens; None before the first token."""
        return None if self.current is None else self.current.pages

    @property
    def target(self) -> list[int]:
        """Returns the pages that the next step writes its state to."""
        return self._spares[-1].pages

    def landing(self) -> PageLease:
        """Returns the lease of the pages that a handoff writes the received state to."""
        return self._spares[0]

    def landed(self, tokens: int, prompt: int, size: int, hash_of: Callable[[int], bytes]) -> None:
        """Makes the state in the pages of ``landing``, which a handoff or a restored copy has written, the state
        after ``tokens`` tokens.

        The other parameters are as in ``advance``.
        """
        assert self.current is None, "it brings the first state"
        self.current = self._spares.pop(0)
        if tokens % size == 0:
            self._mark(tokens, prompt, size, hash_of(tokens // size - 1), rolling=True)

    def advance(self, tokens: int, prompt: int, size: int, hash_of: Callable[[int], bytes], rolling: bool) -> None:
        """Makes the state that a step wrote to ``target`` the state after ``tokens`` tokens, and saves a checkpoint
        at a boundary.

        ``prompt`` is the prompt's length and ``size`` a block's, in tokens; ``hash_of(i)`` is the hash of block i.
        ``rolling`` keeps the state after the last full block until the next one is full, so that it can become a
        checkpoint.
        """
        before, self.current = self.current, self._spares.pop()
        kept = None if self._rolling is None else self._rolling[0]
        if tokens % size == 0:
            self._mark(tokens, prompt, size, hash_of(tokens // size - 1), rolling)
        if before is not None and before is not kept:  # what was kept, marking has recycled or keeps on
            self._recycle(before)
        if not self._spares:
            self._spares.append(self._extra() or self._give_up_rolling())

    def _mark(self, tokens: int, prompt: int, size: int, block: bytes, rolling: bool) -> None:
        """Handles the state after a full block: seals it at a boundary, else keeps it until the next one if
        ``rolling``.
        """
        assert self.current is not None
        boundary = self._rules.is_boundary(tokens, prompt, size)
        if not (boundary or rolling) or not self._make_room():
            return
        if boundary:
            self._seal(self.current, block)
        else:
            self._rolling = self.current, block

    def _make_room(self) -> bool:
        """Adds a set of spare pages, because the current one is to be kept: that of the older rolling state, or a
        new lease. Returns False if there is none.
        """
        if self._rolling is not None:
            lease, self._rolling = self._rolling[0], None
            self._recycle(lease)
            return True
        if (extra := self._extra()) is not None:
            self._spares.append(extra)
        return extra is not None

    def close(self) -> None:
        """Returns every page to the pool; the state of the last full block stays cached."""
        if self._rolling is not None:
            self._seal(*self._rolling)
        held = {id(lease): lease for lease in (self.current, *self._spares) if lease is not None}
        if self._rolling is not None:
            held[id(self._rolling[0])] = self._rolling[0]
        for lease in held.values():
            lease.close()
        self.current, self._spares, self._rolling = None, [], None

    def _find(self, block: bytes) -> PageLease:
        found = self._pool.open(list(state_hashes(block, self._rules.pages)), self._rules.pages)
        assert found.held == self._rules.pages, "the checkpoint is cached"
        return found

    def _extra(self) -> PageLease | None:
        """Returns one more leased set of pages; None if that would take pages that running sequences will soon
        need.
        """
        try:
            return self._pool.open((), self._rules.pages, self._pool.pages // KEPT)
        except PoolExhausted:
            return None

    def _give_up_rolling(self) -> PageLease:
        assert self._rolling is not None, "a sequence has two sets of pages"
        lease, self._rolling = self._rolling[0], None
        return lease

    def _recycle(self, lease: PageLease) -> None:
        """Makes a set of pages that is no longer needed a spare, or closes its lease if it is cached or there are
        enough spares.
        """
        if self._is_sealed(lease) or len(self._spares) >= WORKING_STATES:
            lease.close()
        else:
            self._spares.insert(0, lease)

    def _is_sealed(self, lease: PageLease) -> bool:
        return any(self._pool.blocks.block_of[page] is not None for page in lease.pages)

    def _seal(self, lease: PageLease, block: bytes) -> None:
        for index, part in enumerate(state_hashes(block, self._rules.pages)):
            lease.seal(index, part)


class AttentionReach(NamedTuple):
    """Says which blocks the tokens to come attend to: ``window`` tokens back, 0 for all, and the first ``sunk``
    blocks.

    ``first`` is the first block that they attend to if all tokens before them are computed elsewhere, None if not.
    Blocks from ``wanted_from`` on get pages in any case, because other requests may use them. ``windows`` are those
    of the page tables, where a block has several pages; ``tokens`` are then the tokens that are computed elsewhere.
    With ``grows`` the worker leases further tables' pages chunk by chunk. If it can't preempt for them, ``most``
    are the pages that each may have at once, which stay available; or, if all layers see a window, those of the one
    table.
    """

    window: int = 0
    sunk: int = 0
    first: int | None = None
    wanted_from: int = MOST_BLOCKS
    windows: tuple[int, ...] = ()
    tokens: int | None = None
    grows: bool = False
    most: tuple[int, ...] = ()

    @classmethod
    def of(cls, layout: KvLayout, grows: bool = False, most: tuple[int, ...] = ()) -> AttentionReach:
        """Returns the reach of a worker whose layers have ``layout``."""
        return cls(sliding_window(layout), sunk_blocks(layout), windows=layout.windows, grows=grows, most=most)

    def behind(self, tokens: int, block_tokens: int) -> AttentionReach:
        """Returns the reach of tokens from position ``tokens`` on if all before are computed elsewhere."""
        return self._replace(first=first_seen(tokens, self.window, block_tokens), tokens=tokens)

    @property
    def tables(self) -> int:
        """Returns the number of pages that a block has."""
        return max(1, len(self.windows))

    def opened(self, pool: PagePool, hashes: Sequence[bytes], blocks: int, limit: int, reserve: int) -> PageLease:
        """Leases pages for those of ``blocks`` blocks that are attended to, at most ``limit`` from the cache,
        leaving ``reserve`` pages free. Raises PoolExhausted.
        """
        if self.windows and self.tokens is not None:
            return open_tables_behind(pool, hashes, self.windows, self.tokens, reserve, limit)
        if self.windows:
            return open_tables(pool, hashes, self.windows, blocks, reserve, limit, self.grows, self.most)
        if self.first is None:
            most = self.most[0] if self.most else 0
            return pool.open(hashes, blocks, reserve, limit, self.window, self.wanted_from, self.sunk, most)
        return pool.open_behind(hashes, self.first, blocks, reserve, limit, self.window, self.sunk)


def opened(
    pool: PagePool,
    rules: StateRules | None,
    hashes: Sequence[bytes],
    blocks: int,
    limit: int,
    reserve: int = 0,
    brought: bool = False,
    reach: AttentionReach = AttentionReach(),
) -> tuple[PageLease, SequenceStates | None]:
    """Leases pages for ``blocks`` blocks, the first of them from the cache, and the recurrent states that continue
    after these (None for a model without).

    At most ``limit`` blocks are taken from the cache; for a model with state only as many as have a checkpoint
    after them, unless the state is ``brought`` by a handoff or a restored copy. ``reserve`` pages stay free, and
    blocks out of ``reach`` get no page. Raises PoolExhausted, with nothing leased.
    """
    if rules is None:
        return reach.opened(pool, hashes, blocks, limit, reserve), None
    held = limit if brought else rules.deepest(pool, hashes, limit)
    block = None if brought or not held else hashes[held - 1]
    states = SequenceStates(pool, rules, block)  # a checkpoint is pinned before anything is evicted
    try:
        pages = pool.open(hashes, blocks, reserve, limit_held=held)
    except PoolExhausted:
        states.close()
        raise
    try:
        states.lease(reserve)
    except PoolExhausted:
        states.close()
        pages.close()
        raise
    return pages, states
