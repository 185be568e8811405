"""Tests which pages come over to a device before a step: what could have changed since, and no others."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from baton.engine.backends.residency import MOST_RECORDS, PageResidency, missing_of, ran
from baton.engine.plan import DraftBranch, SequenceStep


def item(seq: int, start: int, pages: list[int], count: int = 1) -> SequenceStep:
    return SequenceStep(seq, [0] * count, start, pages)


def run(resident: PageResidency, *items: SequenceStep) -> list[int]:
    brought = resident.missing(items)
    resident.ran(items, brought)
    return brought


def test_a_prompt_needs_nothing_and_its_decodes_neither() -> None:
    resident = PageResidency(8)
    assert run(resident, item(1, 0, [3, 5], 20)) == []
    assert run(resident, item(1, 20, [3, 5])) == []
    assert run(resident, item(1, 21, [3, 5])) == []


def test_a_prefix_or_a_handoff_brings_what_lies_below_its_start_alone() -> None:
    resident = PageResidency(8)
    assert run(resident, item(1, 17, [6, 2, 4], 30)) == [2, 6]
    assert run(resident, item(1, 47, [6, 2, 4])) == []


def test_two_that_share_a_prefix_do_not_bring_it_step_after_step() -> None:
    resident = PageResidency(8)
    assert run(resident, item(1, 16, [0, 1])) == [0]
    assert run(resident, item(1, 17, [0, 1]), item(2, 16, [0, 2])) == [0]
    assert run(resident, item(1, 18, [0, 1]), item(2, 17, [0, 2])) == []


def test_one_that_was_away_brings_what_others_touched_meanwhile() -> None:
    resident = PageResidency(8)
    run(resident, item(1, 0, [0, 1], 32))
    run(resident, item(2, 0, [1], 3))  # took over a page of the first, which came back to it by a tier
    assert run(resident, item(1, 32, [0, 1, 2])) == [1]
    assert run(resident, item(2, 3, [1])) == [1]


def test_a_branch_of_drafts_touches_its_pages_and_whoever_goes_on_with_them_brings_them() -> None:
    resident = PageResidency(8)
    run(resident, item(1, 0, [0, 1], 32))
    drafted = SequenceStep(2, [0] * 4, 0, [3], draft_branches=(DraftBranch(0, 3, 1, pages=[1]),))
    assert run(resident, drafted) == []
    assert run(resident, item(1, 32, [0, 1, 2]), item(2, 2, [1])) == [1]  # a tier brought it back to the first


def test_another_page_at_the_same_place_is_brought() -> None:
    resident = PageResidency(8)
    run(resident, item(1, 0, [0, 1], 32))
    assert run(resident, item(1, 32, [0, 4, 5])) == [4]


def test_a_step_that_is_repeated_or_taken_back_needs_nothing() -> None:
    resident = PageResidency(8)
    run(resident, item(1, 0, [0, 1], 20))
    run(resident, item(1, 20, [0, 1], 4))
    assert run(resident, item(1, 20, [0, 1], 4)) == []
    assert run(resident, item(1, 22, [0, 1])) == []


def test_a_start_beyond_what_was_run_brings_all() -> None:
    resident = PageResidency(8)
    run(resident, item(1, 0, [0, 1], 8))
    assert run(resident, item(1, 16, [0, 1])) == [0]


def test_after_a_failure_everything_comes_again() -> None:
    resident = PageResidency(8)
    run(resident, item(1, 0, [0, 1], 20))
    resident.failed()
    assert run(resident, item(1, 20, [0, 1])) == [0, 1]


def test_records_of_sequences_long_gone_are_dropped() -> None:
    resident = PageResidency(2)
    for seq in range(MOST_RECORDS + 5):
        run(resident, item(seq, 0, [0]))
    assert len(resident._records) == MOST_RECORDS


def test_what_landed_on_the_device_is_not_brought_and_what_did_not_is() -> None:
    resident, table = PageResidency(8), [6, 2, 4, 1]
    resident.opened(table[1:])
    resident.landed(1, table, [1])
    resident.landed(1, table, [3])
    assert run(resident, item(1, 57, table)) == [4, 6]
    assert run(resident, item(1, 58, table)) == []


def test_what_landed_counts_on_its_own_table_alone() -> None:
    """Preempted before it ran: the pages that it gets back are others', or may have been."""
    resident, table = PageResidency(8), [6, 2]
    resident.landed(1, table, [0, 1])
    assert run(resident, item(1, 30, [*table])) == [2, 6]
    resident.landed(2, table, [0, 1])
    assert run(resident, item(3, 30, table)) == [2, 6]


def test_pages_that_a_handoff_may_have_written_are_brought_again_for_whoever_had_them() -> None:
    for ran_last in (True, False):
        resident = PageResidency(8)
        run(resident, item(1, 0, [0, 1], 32))
        if not ran_last:
            run(resident, item(2, 0, [5], 3))
        resident.opened([1, 3])  # it was preempted, and its second page leased to a handoff that broke off
        assert run(resident, item(1, 32, [0, 1, 2])) == [1]


def test_a_failed_step_leaves_nothing_of_what_landed() -> None:
    resident, table = PageResidency(8), [6, 2]
    resident.landed(1, table, [0, 1])
    resident.failed()
    assert run(resident, item(1, 30, table)) == [2, 6]


class Both:
    """Holds what the host and a device that follows ``resident`` have on each page, as the number of the write."""

    def __init__(self, resident: PageResidency, pages: int) -> None:
        self.host, self.device, self._resident, self._last = [0] * pages, [0] * pages, resident, 1

    def number(self) -> int:
        self._last += 1
        return self._last

    def spoil(self, pages: Sequence[int]) -> None:
        """Overwrites pages as a handoff does, before anything of it was verified."""
        self._resident.opened(pages)
        for page in pages:
            self.host[page], self.device[page] = self.number(), self.number()

    def step(self, live: dict[int, tuple[list[int], int]], seqs: Sequence[int], turn: int) -> None:
        """Each of ``seqs`` reads what it has on the device, and writes one token behind it on both."""
        items = [item(seq, live[seq][1], live[seq][0]) for seq in seqs]
        brought = self._resident.missing(items)
        for page in brought:
            self.device[page] = self.host[page]
        for each in items:
            for page in each.pages[: -(-each.start // 16)]:
                assert self.device[page] == self.host[page], f"page {page} of {each.seq} in turn {turn}"
            page = each.pages[each.start // 16]
            self.device[page] = self.host[page] = self.number()
            live[each.seq] = (live[each.seq][0], each.start + 1)
        self._resident.ran(items, brought)


def follow(resident: PageResidency, seed: int) -> None:
    """Sequences come by host and by card, are moved away and back, at random; streams leave rubbish behind."""
    rng = random.Random(seed)
    both = Both(resident, 16)
    host = both.host
    live: dict[int, tuple[list[int], int]] = {}
    for turn in range(1500):
        free = [page for page in range(16) if all(page not in pages for pages, _ in live.values())]
        kind = rng.random()
        if len(free) >= 3 and kind < 0.3:
            pages, start = rng.sample(free, 3), rng.choice([16, 20, 40])
            both.spoil(pages)
            if rng.random() < 0.6:
                blocks = [block for block in range(3) if rng.random() < 0.6]
                for block in range(3):
                    host[pages[block]] = both.number()
                    if block in blocks:
                        both.device[pages[block]] = host[pages[block]]
                resident.landed(turn, pages, blocks)
                live[turn] = pages, start
        elif live and kind < 0.45:
            seq = rng.choice([*live])  # preempted: its pages are others' for a while, and come back, or others do
            pages, start = live[seq]
            others, content = rng.sample(pages, rng.randint(0, 3)), [host[page] for page in pages]
            both.spoil(others)
            back = [rng.choice([page, *free[:1]]) if page in others and len(free) else page for page in pages]
            back = back if len(set(back)) == 3 else [*pages]
            for page, said in zip(back, content, strict=True):
                host[page] = said
            live[seq] = back, start
        elif live and kind < 0.5:
            live.pop(rng.choice([*live]))
        both.step(live, [seq for seq in live if rng.random() < 0.5 and live[seq][1] < 47], turn)


def test_a_device_that_handoffs_write_to_has_what_the_host_has_wherever_it_is_read() -> None:
    for seed in range(3):
        follow(PageResidency(16), seed)


@pytest.mark.parametrize("bug", ["opened", "landed", "table", "touched"])
def test_planted_bugs_in_what_it_knows_are_caught(bug: str) -> None:
    class Wrong(PageResidency):
        def opened(self, pages: Sequence[int]) -> None:
            if bug != "opened":
                super().opened(pages)

        def landed(self, seq: int, table: Sequence[int], blocks: Sequence[int]) -> None:
            super().landed(seq, table, range(len(table)) if bug == "landed" and blocks else blocks)

        def _not_landed(self, item: SequenceStep, blocks: int) -> Sequence[int]:
            if bug == "table" and item.seq in self._landed:
                self._landed[item.seq].table = item.pages
            return super()._not_landed(item, blocks)

        def _touch(self, pages: Sequence[int]) -> None:
            super()._touch([] if bug == "touched" else pages)

    with pytest.raises(AssertionError, match=r"of \d+ in turn"):
        all(follow(Wrong(16), seed) is None for seed in range(5))


def test_a_device_that_follows_it_always_has_what_the_host_has() -> None:
    """Sequences come, go, move to other pages and share them, at random; others rewrite pages between steps."""
    rng = random.Random(4)
    resident, live = PageResidency(24), dict[int, tuple[list[int], int]]()
    both = Both(resident, 24)
    for turn in range(3000):
        free = [page for page in range(24) if all(page not in pages for pages, _ in live.values())]
        if len(free) >= 3 and rng.random() < 0.3:
            pages, start = rng.sample(free, 3), rng.choice([0, 16, 20])
            for page in pages[: -(-start // 16)]:  # a handoff
                both.host[page] = both.number()
            live[turn] = (pages, start)
        for seq in [seq for seq in live if rng.random() < 0.05]:
            live.pop(seq)
        for seq, (pages, start) in list(live.items()):
            if (
                len(free := [p for p in range(24) if all(p not in q for q, _ in live.values())])
                and rng.random() < 0.05
            ):
                at = rng.randrange(len(pages))  # swapped out and in again: a page of the same bytes elsewhere
                moved = [*pages]
                moved[at] = rng.choice(free)
                both.host[moved[at]] = both.host[pages[at]]
                live[seq] = (moved, start)
        both.step(live, [seq for seq in live if rng.random() < 0.8 and live[seq][1] < 47], turn)


def test_what_a_step_writes_by_one_page_table_is_brought_to_sequences_that_have_it_in_another() -> None:
    tables = [PageResidency(8) for _ in range(2)]

    def step(seq: int, start: int, pages: list[int], further: list[int], count: int = 1) -> list[int]:
        items = [SequenceStep(seq, [0] * count, start, pages, tables=(further,))]
        brought = missing_of(tables, items)
        ran(tables, items, brought)
        return brought

    step(1, 0, [0, 1], [2, 3], 32)
    step(2, 0, [3], [4], 3)  # took over a page of the first's second table, which came back to it by a tier
    assert step(1, 32, [0, 1, 5], [2, 3, 6]) == [3]
