"""Tests of pages whose copies on the host are made on demand, in a world that plays card, host and readers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from baton.engine.backends.cuda.demand_pages import DemandPages
from baton.engine.plan import DraftBranch, SequenceStep

PAGES, GONE, GARBAGE = 24, -1, -2


@dataclass
class Running:
    """A sequence: its page table, and the value that each of its tokens has in the KV."""

    table: list[int]
    values: list[int] = field(default_factory=list)


@dataclass
class Reading:
    pages: list[int]
    values: list[list[int]]


class World:
    """Keeps one number per token on the card and on the host; ``host`` is what a reader finds there."""

    def __init__(self, seed: int, most: int) -> None:
        self.random = random.Random(seed)
        self.card, self.host = (np.full((PAGES, 16), GARBAGE) for _ in range(2))
        self.pages = DemandPages(PAGES, most, self.fetch, self.drop)
        self.running: dict[int, Running] = {}
        self.reading: list[Reading] = []
        self.references = [0] * PAGES
        self.count = 0

    def fetch(self, pages: Sequence[int]) -> None:
        assert list(pages) == sorted(set(pages))
        self.host[list(pages)] = self.card[list(pages)]

    def drop(self, page: int) -> None:
        self.host[page] = GONE

    def value(self) -> int:
        self.count += 1
        return self.count

    def take(self, count: int) -> list[int]:
        free = [page for page, references in enumerate(self.references) if not references]
        if len(free) < count:
            return []
        found = self.random.sample(free, count)
        self.pages.taken(found)
        for page in found:
            self.references[page] += 1
        return found

    def begin(self) -> None:
        """Starts a sequence whose first blocks may be another's, and whose others come from somewhere."""
        before = self.random.choice([None, *self.running.values()])
        held = 0 if before is None else self.random.randint(0, len(before.values) // 16)
        blocks = self.random.randint(0, 3)
        own = self.take(blocks)
        if len(own) < blocks:
            return
        shared, values = ([], []) if before is None else (before.table[:held], before.values[: held * 16])
        for page in shared:
            self.references[page] += 1
        seq = self.value()
        self.running[seq] = new = Running([*shared, *own], list(values))
        if own and self.random.random() < 0.7:
            self.receive(seq, new, held, self.random.randint(1, blocks * 16))

    def receive(self, seq: int, new: Running, held: int, tokens: int) -> None:
        """Plays a handoff, of which each block comes to the card or to the host."""
        self.pages.opened(new.table[held:])
        new.values += [self.value() for _ in range(tokens)]
        for block in range(held, -(-len(new.values) // 16)):
            values = new.values[block * 16 : block * 16 + 16]
            on_card = self.random.random() < 0.5
            (self.card if on_card else self.host)[new.table[block], : len(values)] = values
            if on_card:
                self.pages.landed(seq, new.table, [block])

    def step(self, works: bool) -> None:
        chosen = self.random.sample(sorted(self.running), min(len(self.running), 3))
        items = [item for seq in chosen if (item := self.item(seq)) is not None]
        brought = self.pages.missing(items)
        self.card[brought] = self.host[brought]
        for item in items:
            now = self.running[item.seq]
            for at, value in enumerate(now.values):
                assert self.card[now.table[at // 16], at % 16] == value
            new = [self.value() if works else GARBAGE for _ in item.tokens]
            for at, value in enumerate(new, item.start):
                self.card[now.table[at // 16], at % 16] = value
            now.values += new if works else []
        if works:
            self.pages.ran(items, brought)
            self.pages.ended()
        else:
            self.pages.failed()

    def item(self, seq: int) -> SequenceStep | None:
        now, count = self.running[seq], self.random.choice([1, 1, 20])
        start = len(now.values)
        lacking = -(-(start + count) // 16) - len(now.table)
        if lacking > 0:
            more = self.take(lacking)
            if len(more) < lacking:
                return None
            now.table += more
        return SequenceStep(seq, [0] * count, start, now.table)

    def read(self) -> None:
        if not self.running:
            return
        now = self.random.choice(list(self.running.values()))
        blocks = range(len(now.values) // 16)
        pages, values = [now.table[i] for i in blocks], [now.values[i * 16 : i * 16 + 16] for i in blocks]
        self.pages.make_whole(pages)
        for page in pages:
            self.references[page] += 1
        self.reading.append(Reading(pages, values))

    def check(self) -> None:
        for reading in self.reading:
            assert self.host[reading.pages].tolist() == reading.values

    def let_go(self) -> None:
        if self.reading:
            reading = self.reading.pop(self.random.randrange(len(self.reading)))
            self.pages.let_go(reading.pages)
            self.free(reading.pages)

    def end(self) -> None:
        if self.running:
            self.free(self.running.pop(self.random.choice(sorted(self.running))).table)

    def free(self, pages: Sequence[int]) -> None:
        """Takes a reference from each page; of those without any some are cached, and others are free."""
        for page in pages:
            self.references[page] -= 1
            if not self.references[page] and self.random.random() < 0.5:
                self.pages.freed([page])


@pytest.mark.parametrize("most", [0, 5, PAGES])
@pytest.mark.parametrize("seed", range(10))
def test_steps_and_readers_find_the_newest_of_every_token(seed: int, most: int) -> None:
    world = World(seed, most)
    for _ in range(300):
        what = world.random.random()
        if what < 0.2:
            world.begin()
        elif what < 0.6:
            world.step(works=world.random.random() < 0.9)
        elif what < 0.75:
            world.read()
        elif what < 0.9:
            world.let_go()
        else:
            world.end()
        world.check()
    while world.reading:
        world.let_go()
    world.pages.let_go([])
    assert world.pages.copies <= most or not world.pages._spare, "what the card has as well goes beyond the limit"


def pages_of(most: int = 8) -> tuple[DemandPages, list[Sequence[int]], list[int]]:
    fetched, dropped = list[Sequence[int]](), list[int]()
    return DemandPages(8, most, fetched.append, dropped.append), fetched, dropped


def item(seq: int, start: int, pages: list[int], count: int = 1) -> SequenceStep:
    return SequenceStep(seq, [0] * count, start, pages)


def test_what_only_steps_write_takes_no_memory_of_the_host() -> None:
    pages, fetched, _ = pages_of(0)
    pages.taken([3, 5])
    pages.ran([item(1, 0, [3, 5], 20)], pages.missing([item(1, 0, [3, 5], 20)]))
    assert pages.missing([item(1, 20, [3, 5])]) == []
    assert (pages.copies, fetched) == (0, [])


def test_a_cached_prefix_that_the_card_has_is_not_brought_again() -> None:
    pages, _, _ = pages_of()
    pages.taken([3, 5])
    pages.ran([item(1, 0, [3, 5], 32)], [])
    assert pages.missing([item(2, 32, [3, 5, 6])]) == []


def test_a_page_is_copied_once_until_a_step_writes_it_again() -> None:
    pages, fetched, _ = pages_of()
    table = [3, 5]
    pages.ran([item(1, 0, table, 20)], [])
    pages.make_whole([5, 3])
    pages.make_whole([3])
    assert fetched == [[3, 5]]
    pages.ran([item(1, 20, table)], [])
    pages.make_whole([3, 5])
    assert fetched == [[3, 5], [5]]


def test_the_oldest_copies_that_nobody_reads_are_given_back_first() -> None:
    pages, _, dropped = pages_of(2)
    pages.ran([item(1, 0, [0, 1, 2, 3], 64)], [])
    pages.make_whole([0])
    for page in (1, 2, 3):
        pages.make_whole([page])
        pages.let_go([page])
    assert dropped == [1, 2], "page 0 is being read"
    pages.let_go([0])
    assert (dropped, pages.copies) == ([1, 2], 2)
    pages.make_whole([1])
    pages.let_go([1])
    assert dropped == [1, 2, 3]


def test_a_page_that_two_read_stays_until_both_are_done() -> None:
    pages, _, dropped = pages_of(0)
    pages.ran([item(1, 0, [4], 16)], [])
    pages.make_whole([4])
    pages.make_whole([4])
    pages.let_go([4])
    assert dropped == []
    pages.let_go([4])
    assert dropped == [4]


def test_what_came_to_the_host_goes_once_the_card_has_it() -> None:
    pages, _, dropped = pages_of(0)
    pages.taken([4, 6])
    pages.opened([4, 6])
    step = item(1, 20, [4, 6])
    assert pages.missing([step]) == [4, 6]
    assert pages.copies == 2
    pages.ran([step], [4, 6])
    pages.ended()
    assert (sorted(dropped), pages.copies) == ([4, 6], 0)


def test_what_a_step_brings_stays_on_the_host_until_that_step_has_ended() -> None:
    pages, _, dropped = pages_of(0)
    pages.taken([4, 6])
    pages.opened([4])
    for start in (16, 17):  # the second is planned while the first one runs
        step = item(1, start, [4, 6])
        pages.ran([step], pages.missing([step]))
    other = item(2, 16, [5, 7])
    pages.opened([5])
    assert (dropped, pages.copies) == ([], 2), "its copy to the card may go on behind the call that began it"
    pages.ended()
    assert dropped == [4]
    pages.ran([other], pages.missing([other]))
    pages.ended()
    assert dropped == [4]
    pages.failed()  # of the step that brought page 5: it is brought again
    pages.ended()
    assert (dropped, pages.copies_left) == ([4], -1)
    assert pages.missing([other]) == [5]


def test_what_came_to_the_host_goes_once_nobody_has_it_any_more() -> None:
    pages, _, dropped = pages_of(2)
    for first in (0, 4):
        handed = [first, first + 1, first + 2, first + 3]
        pages.taken(handed)
        pages.opened(handed)
        assert pages.copies_left <= -2
        pages.freed(handed)  # its handoff was cancelled before a step
        assert (pages.copies, pages.copies_left) == (2, 2)
    assert sorted(dropped) == [0, 1, 2, 3, 4, 5]
    pages.taken([6])
    assert pages.missing([item(1, 16, [6, 7])]) == [6], "what others write is on the host"


def test_a_page_that_is_read_stays_although_its_lease_has_ended() -> None:
    pages, _, dropped = pages_of(0)
    pages.ran([item(1, 0, [3], 16)], [])
    pages.make_whole([3])
    pages.freed([3])
    assert (dropped, pages.copies_left) == ([], -1)
    pages.let_go([3])
    assert dropped == [3]


def test_a_step_that_fails_costs_copies_of_what_it_may_have_written_alone() -> None:
    pages, fetched, _ = pages_of(8)
    pages.ran([item(1, 0, [0, 1, 2], 40)], [])
    pages.make_whole([0, 1, 2])
    pages.let_go([0, 1, 2])
    assert pages.copies_left == 8
    for start in range(40, 43):
        pages.missing([item(1, start, [0, 1, 2])])
    pages.failed()
    assert pages.copies_left == 7
    pages.make_whole([0, 1])
    assert fetched == [[0, 1, 2]], "both sides have them as before"
    assert pages.missing([item(1, 40, [0, 1, 2])]) == [2]


def test_blocks_that_a_step_skips_are_not_brought() -> None:
    pages, _, _ = pages_of()
    pages.opened([1, 2, 3])
    assert pages.missing([SequenceStep(1, [0], 48, [1, 2, 3, 4], gap=(1, 2))]) == [1, 3]


def test_a_branch_of_drafts_is_written_on_the_card_alone() -> None:
    pages, _, _ = pages_of()
    pages.taken([1, 2])
    step = SequenceStep(1, [0] * 3, 4, [1], draft_branches=(DraftBranch(1, 2, 1, [2]),))
    pages.ran([step], pages.missing([step]))
    assert pages.missing([item(1, 6, [2])]) == []
