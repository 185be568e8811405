"""Pages of which another host has a part: its ranks read the newest, and whoever reads the lead's gets all."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from baton.decode_worker.engine.swap import SwapArea
from baton.engine.backends.ranks.host_pages import HostPages, parts_missed
from baton.engine.plan import SequenceStep
from baton.engine.steps.sharing import PageSharing
from baton.kv.layout.extents import Part
from baton.kv.pages.pool import PagePool
from baton.protos import channel as ch
from baton.protos.nouns import Extent
from tests.kv.sharers import chain

PAGES, SIZE = 12, 64
LEFT, RIGHT, WHOLE = ((Extent(at, size, 0, 1),) for at, size in ((0, 32), (32, 32), (0, 64)))


class World:
    """Two hosts' copies of the far half of each page, as numbers of contents, and what it should be."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.held = HostPages((LEFT, RIGHT), PAGES, SIZE, 1, self._show, self._bring)
        self.pool = PagePool(PAGES)
        self.pool.taken = self.held.taken
        self.lead, self.far, self.truth = ([0] * PAGES for _ in range(3))
        self.sequences: dict[int, tuple[list[int], int]] = {}  # pages and tokens by number
        self.cached: list[int] = []
        self.number = self.content = 0

    def _show(self, host: int, pages: Sequence[int], part: Part) -> None:
        assert (host, part) == (1, RIGHT)
        for page in pages:
            self.far[page] = self.lead[page]

    def _bring(self, pages: Sequence[int], parts: tuple[Part, ...]) -> None:
        assert parts == ((), RIGHT)
        for page in pages:
            self.lead[page] = self.far[page]

    def _fresh(self, count: int) -> list[int]:
        """Pages that are nobody's, leased anew."""
        used = {page for pages, _ in self.sequences.values() for page in pages}
        pages = self.rng.sample([page for page in range(PAGES) if page not in used], count)
        self.cached = [page for page in self.cached if page not in pages]
        self.held.taken(pages)
        return pages

    def room(self) -> int:
        return PAGES - len({page for pages, _ in self.sequences.values() for page in pages})

    def handoff(self, divided: bool) -> None:
        """A prompt of two blocks comes, each host's part to it or all to the lead; or its lease is given up."""
        self.number += 1
        pages = self._fresh(2)
        self.held.opened(pages)
        for page in pages:
            self.content += 1
            self.truth[page] = self.content
            (self.far if divided else self.lead)[page] = self.content
        if self.rng.random() < 0.2:
            return
        if divided:
            self.held.landed(self.number, pages, (0, 1))
        self.sequences[self.number] = pages, 31

    def fill(self) -> None:
        """A block comes from a lower tier."""
        (page,) = self._fresh(1)
        self.content += 1
        self.lead[page] = self.truth[page] = self.content
        self.cached.append(page)

    def hit(self) -> None:
        """A prompt that begins with a cached block."""
        self.number += 1
        block = self.rng.choice(self.cached)
        self.sequences[self.number] = [block], 16
        self.sequences[self.number] = [block, *self._fresh(1)], 16

    def step(self) -> None:
        """Some sequences advance by a token: every page that they read is right on the other host."""
        chosen = self.rng.sample(sorted(self.sequences), self.rng.randint(1, len(self.sequences)))
        items = [SequenceStep(seq, [0], self.sequences[seq][1], self.sequences[seq][0]) for seq in chosen]
        shown = self.held.show(items)
        for seq in chosen:
            pages, tokens = self.sequences[seq]
            for page in pages[: -(-tokens // 16)]:
                assert self.far[page] == self.truth[page], (seq, page)
            last = pages[tokens // 16]
            self.content += 1
            if tokens % 16 == 0 or self.lead[last] == self.truth[last]:
                self.lead[last] = self.content  # a rank's rows come to the lead's page as well
            self.far[last] = self.truth[last] = self.content
            if tokens + 1 >= 32:
                del self.sequences[seq]
                self.cached += pages
            else:
                self.sequences[seq] = pages, tokens + 1
        self.held.ran(items, shown)

    def read(self) -> None:
        """Somebody else wants cached blocks."""
        self.held.make_whole(self.cached)
        for page in self.cached:
            assert self.lead[page] == self.truth[page], page


@pytest.mark.parametrize("seed", range(8))
def test_what_another_host_reads_is_the_newest_and_what_others_read_is_whole(seed: int) -> None:
    world = World(seed)
    for _ in range(400):
        acts = [world.read]
        if world.room() >= 2:
            acts += [lambda: world.handoff(True), lambda: world.handoff(True), lambda: world.handoff(False)]
            acts += [world.fill]
            if len(set(world.cached)) > 2:
                acts += [world.hit]
        if world.sequences:
            acts += [world.step] * 3
        world.rng.choice(acts)()


def test_what_was_brought_is_not_brought_again_until_a_step_writes_it() -> None:
    brought = list[list[int]]()
    held = HostPages(
        (LEFT, RIGHT), PAGES, SIZE, 1, lambda *shown: None, lambda pages, parts: brought.append([*pages])
    )
    pages = [4, 5, 6]
    held.taken(pages)
    held.landed(1, pages, (0, 1, 2))
    for _ in range(2):
        held.make_whole(pages)
    assert brought == [[4, 5, 6]]
    held.ran([SequenceStep(1, [0], 40, pages)], ())
    held.make_whole(pages)
    assert brought == [[4, 5, 6], [6]], "the token went to the third block"
    held.taken([5])
    held.landed(2, [5], (0,))
    held.make_whole(pages)
    assert brought == [[4, 5, 6], [6], [5]], "another handoff brought something else"


def test_what_is_lent_is_shown_to_each_other_host_and_met_behind() -> None:
    said = list[object]()
    held = HostPages((LEFT, RIGHT), PAGES, SIZE, 1, lambda *shown: said.append(shown), lambda *of: said.append(of))
    held.lend([3, 4])
    assert said == [(1, [3, 4], RIGHT), ([3, 4], ((), ()))]


def test_of_pages_that_several_hosts_have_one_brings_each_byte() -> None:
    assert parts_missed((LEFT, RIGHT), SIZE) == ((), RIGHT)
    assert parts_missed((LEFT, RIGHT, RIGHT), SIZE) == ((), RIGHT, ())
    assert parts_missed((WHOLE, WHOLE), SIZE) == ((), ())


class Told:
    """Records which pages were to be whole."""

    def __init__(self) -> None:
        self.pages: list[int] = []

    def __call__(self, pages: Sequence[int]) -> None:
        self.pages += pages

    make_whole = __call__

    def let_go(self, pages: Sequence[int]) -> None:
        """Forgets that these are being read."""
        for page in pages:
            self.pages.remove(page)


def test_pages_are_made_whole_before_they_are_fetched_written_back_or_swapped_and_not_for_a_pin() -> None:
    pool, told = PagePool(8), Told()
    blocks, sharing = tuple(chain(3)), PageSharing(pool, told)  # type: ignore[arg-type]
    with pool.open(blocks, 3) as lease:
        lease.seal_run(0, blocks)
        pages = list(lease.pages)
    sharing.pin(ch.Pin(1, blocks, lasts=True))
    assert told.pages == []
    sharing.pin(ch.Pin(2, blocks[:2]))
    assert told.pages == pages[:2]
    sharing.keep(ch.Keep(3, blocks[2:]))
    assert told.pages == pages
    sharing.unpin(ch.Unpin(1))
    assert told.pages == pages
    sharing.unpin(ch.Unpin(2))
    assert told.pages == pages[2:]
    sharing.unkeep(ch.Unkeep(3))
    assert told.pages == []
    swapped: list[int] = []
    mirror = SimpleNamespace(make_whole=swapped.extend, let_go=lambda pages: swapped.append(-len(pages)))
    area = SwapArea(memoryview(bytearray(8 * SIZE)), SIZE, 16, 8 * SIZE, mirror=mirror)  # type: ignore[arg-type]
    area._cheaper = lambda size, tokens: True  # type: ignore[method-assign]
    assert area.save([5, 6, 7], 20, [4]) is not None
    assert swapped == [5, 6, 4, -3], "those of a recurrent state as well"


def test_a_page_is_told_of_whenever_a_lease_gets_it_to_write() -> None:
    pool, told = PagePool(4), Told()
    pool.taken = told
    blocks = tuple(chain(2))
    with pool.open(blocks, 3) as lease:
        assert told.pages == lease.pages
        lease.seal_run(0, blocks)
        lease.extend(1)
        assert sorted(told.pages) == [0, 1, 2, 3]
    told.pages.clear()
    with pool.open(blocks, 2):
        assert told.pages == [], "cached blocks keep what is in them"
