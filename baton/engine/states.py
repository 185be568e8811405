"""Where the recurrent state of a sequence lies, step by step, and which of its states stay findable. Torch-free.

Knows nothing of what a state holds. A step reads the state after a sequence's computed tokens from some pages and
writes the next one to others, so that it can be repeated. Three sets of pages go round:

    current    the state after the computed tokens         (none yet: zeros)
    spare      what the next step writes
    rolling    the state at the end of the last full block that was decoded: it becomes a checkpoint when the
               sequence ends or is preempted, so that the next turn goes on from there

A state that is written at a boundary (``Boundaries``) is sealed at once: its pages join the cache, and another set
is leased in their place. Where the pool has none to spare, the checkpoint is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from baton.kv.layout.page import sliding_window, sunk_blocks
from baton.kv.layout.room import WORKING_STATES
from baton.kv.layout.state import state_hashes, state_pages
from baton.kv.pages.lease import first_seen
from baton.kv.pages.pool import MOST_BLOCKS, PageLease, PagePool
from baton.protos.errors import PoolExhausted
from baton.protos.nouns import KvLayout

KEPT = 8  # checkpoints leave an eighth of the pages to what running sequences will need


class StateRules:
    """Says how a pool's sequences keep state: ``pages`` of it each, a checkpoint every ``every`` blocks.

    ``every`` 0 takes as many blocks as a state takes pages: checkpoints then take no more of the pool than the K
    and V that they belong to.
    """

    def __init__(self, pages: int, every: int = 0) -> None:
        self.pages = pages
        self.every = every or max(1, pages)

    @classmethod
    def of(cls, layout: KvLayout, every: int = 0) -> StateRules | None:
        """Returns the rules of a model with ``layout``; None where it has no state."""
        return cls(state_pages(layout), every) if layout.states else None

    def deepest(self, pool: PagePool, hashes: Sequence[bytes], limit: int) -> int:
        """Returns how many leading blocks of ``hashes``, ``limit`` at most, are cached with their state."""
        found = pool.match(hashes[:limit])
        while found and not self._has(pool, hashes[found - 1]):
            found -= 1
        return found

    def _has(self, pool: PagePool, block: bytes) -> bool:
        known = pool.blocks.page_of
        return all(part in known for part in state_hashes(block, self.pages))

    def cut(self, start: int, end: int, prompt: int, size: int) -> int:
        """Returns where a step from ``start`` that might go to ``end`` stops: at the first boundary on its way."""
        stride = self.every * size
        for boundary in sorted(((start // stride + 1) * stride, self.last(prompt, size))):
            if start < boundary < end:
                return boundary
        return end

    def is_boundary(self, tokens: int, prompt: int, size: int) -> bool:
        """Tells whether the state after ``tokens`` tokens is to be a checkpoint."""
        return tokens > 0 and (tokens % (self.every * size) == 0 or tokens == self.last(prompt, size))

    @staticmethod
    def last(prompt: int, size: int) -> int:
        """Returns the tokens of a prompt's full blocks that another request with the same prompt could skip."""
        return max(0, prompt - 1) // size * size


class SequenceStates:
    """Leases the pages of one sequence's states. ``block`` is the hash of the block whose checkpoint, which is
    cached, it goes on from; None begins without any token. It can step once ``lease`` was called.
    """

    def __init__(self, pool: PagePool, rules: StateRules, block: bytes | None = None) -> None:
        self._pool, self._rules = pool, rules
        self._rolling: tuple[PageLease, bytes] | None = None
        self.current: PageLease | None = None if block is None else self._find(block)
        self._spares: list[PageLease] = []

    def lease(self, reserve: int = 0) -> None:
        """Takes the pages that steps write, leaving ``reserve``. Raises PoolExhausted; close it then."""
        while len(self._spares) < WORKING_STATES:
            self._spares.append(self._pool.open((), self._rules.pages, reserve))

    @property
    def source(self) -> list[int] | None:
        """Returns the pages with the state after the computed tokens; None where there is no token yet."""
        return None if self.current is None else self.current.pages

    @property
    def target(self) -> list[int]:
        """Returns the pages that the next step writes."""
        return self._spares[-1].pages

    def landing(self) -> PageLease:
        """Returns the lease whose pages a handoff writes: it holds the state that comes with it."""
        return self._spares[0]

    def landed(self, tokens: int, prompt: int, size: int, hash_of: Callable[[int], bytes]) -> None:
        """Takes what a handoff, or a copy that was set aside, wrote as the state after ``tokens`` tokens."""
        assert self.current is None, "it brings the first state"
        self.current = self._spares.pop(0)
        if tokens % size == 0:
            self._mark(tokens, prompt, size, hash_of(tokens // size - 1), rolling=True)

    def advance(self, tokens: int, prompt: int, size: int, hash_of: Callable[[int], bytes], rolling: bool) -> None:
        """Takes what a step wrote as the state after ``tokens`` tokens.

        ``hash_of(i)`` is the hash of the i-th block; ``rolling`` keeps the state of each full block until the next.
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
        """The state of a full block: sealed, kept until the next one, or neither."""
        assert self.current is not None
        boundary = self._rules.is_boundary(tokens, prompt, size)
        if not (boundary or rolling) or not self._make_room():
            return
        if boundary:
            self._seal(self.current, block)
        else:
            self._rolling = self.current, block

    def _make_room(self) -> bool:
        """Adds a set of pages, because the current one is to be kept: an older one that was, or a new one."""
        if self._rolling is not None:
            lease, self._rolling = self._rolling[0], None
            self._recycle(lease)
            return True
        if (extra := self._extra()) is not None:
            self._spares.append(extra)
        return extra is not None

    def close(self) -> None:
        """Gives every page back; the state of the last full block stays findable."""
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
        """Another set of pages, where the pool has one beside what running sequences will soon need."""
        try:
            return self._pool.open((), self._rules.pages, self._pool.pages // KEPT)
        except PoolExhausted:
            return None

    def _give_up_rolling(self) -> PageLease:
        assert self._rolling is not None, "a sequence has two sets of pages"
        lease, self._rolling = self._rolling[0], None
        return lease

    def _recycle(self, lease: PageLease) -> None:
        """A set of pages that is needed no more: written again, unless it is in the cache or there are enough."""
        if self._is_sealed(lease) or len(self._spares) >= WORKING_STATES:
            lease.close()
        else:
            self._spares.insert(0, lease)

    def _is_sealed(self, lease: PageLease) -> bool:
        return any(self._pool.blocks.block_of[page] is not None for page in lease.pages)

    def _seal(self, lease: PageLease, block: bytes) -> None:
        for index, part in enumerate(state_hashes(block, self._rules.pages)):
            lease.seal(index, part)


class Sight(NamedTuple):
    """Says which blocks the tokens to come see: ``window`` tokens back, 0 for all, and the first ``sunk`` blocks.

    ``first`` is the first block that they see where all before are computed elsewhere, None where they are not;
    from ``wanted_from`` on others want the blocks.
    """

    window: int = 0
    sunk: int = 0
    first: int | None = None
    wanted_from: int = MOST_BLOCKS

    @classmethod
    def of(cls, layout: KvLayout) -> Sight:
        """Returns the sight of a worker's layers."""
        return cls(sliding_window(layout), sunk_blocks(layout))

    def behind(self, tokens: int, block_tokens: int) -> Sight:
        """Returns the sight from place ``tokens`` on, where all before is computed elsewhere."""
        return self._replace(first=first_seen(tokens, self.window, block_tokens))

    def opened(self, pool: PagePool, hashes: Sequence[bytes], blocks: int, limit: int, reserve: int) -> PageLease:
        """Leases the pages of ``blocks`` blocks that are seen. Raises PoolExhausted."""
        if self.first is None:
            return pool.open(hashes, blocks, reserve, limit, self.window, self.wanted_from, self.sunk)
        return pool.open_behind(hashes, self.first, blocks, reserve, limit, self.window, self.sunk)


def opened(
    pool: PagePool,
    rules: StateRules | None,
    hashes: Sequence[bytes],
    blocks: int,
    limit: int,
    reserve: int = 0,
    brought: bool = False,
    sight: Sight = Sight(),
) -> tuple[PageLease, SequenceStates | None]:
    """Leases ``blocks`` pages, the first held from the cache, and states that go on where these end.

    At most ``limit`` blocks are held; of a model with state only those with a checkpoint behind them, unless the
    state is ``brought`` (by a handoff, or from where it was set aside). Blocks out of ``sight`` get no page. Raises
    PoolExhausted, with nothing leased.
    """
    if rules is None:
        return sight.opened(pool, hashes, blocks, limit, reserve), None
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
