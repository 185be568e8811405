"""Which pages come over to a device before a step: what could have changed since, and no others."""

from __future__ import annotations

import random

from baton.engine.plan import SequenceStep
from baton.engine.resident import MOST_RECORDS, Resident


def item(seq: int, start: int, pages: list[int], count: int = 1) -> SequenceStep:
    return SequenceStep(seq, [0] * count, start, pages)


def run(resident: Resident, *items: SequenceStep) -> list[int]:
    brought = resident.missing(items)
    resident.ran(items, brought)
    return brought


def test_a_prompt_needs_nothing_and_its_decodes_neither() -> None:
    resident = Resident(8)
    assert run(resident, item(1, 0, [3, 5], 20)) == []
    assert run(resident, item(1, 20, [3, 5])) == []
    assert run(resident, item(1, 21, [3, 5])) == []


def test_a_prefix_or_a_handoff_brings_what_lies_below_its_start_alone() -> None:
    resident = Resident(8)
    assert run(resident, item(1, 17, [6, 2, 4], 30)) == [2, 6]
    assert run(resident, item(1, 47, [6, 2, 4])) == []


def test_two_that_share_a_prefix_do_not_bring_it_step_after_step() -> None:
    resident = Resident(8)
    assert run(resident, item(1, 16, [0, 1])) == [0]
    assert run(resident, item(1, 17, [0, 1]), item(2, 16, [0, 2])) == [0]
    assert run(resident, item(1, 18, [0, 1]), item(2, 17, [0, 2])) == []


def test_one_that_was_away_brings_what_others_touched_meanwhile() -> None:
    resident = Resident(8)
    run(resident, item(1, 0, [0, 1], 32))
    run(resident, item(2, 0, [1], 3))  # took over a page of the first, which came back to it by a tier
    assert run(resident, item(1, 32, [0, 1, 2])) == [1]
    assert run(resident, item(2, 3, [1])) == [1]


def test_another_page_at_the_same_place_is_brought() -> None:
    resident = Resident(8)
    run(resident, item(1, 0, [0, 1], 32))
    assert run(resident, item(1, 32, [0, 4, 5])) == [4]


def test_a_step_that_is_repeated_or_taken_back_needs_nothing() -> None:
    resident = Resident(8)
    run(resident, item(1, 0, [0, 1], 20))
    run(resident, item(1, 20, [0, 1], 4))
    assert run(resident, item(1, 20, [0, 1], 4)) == []
    assert run(resident, item(1, 22, [0, 1])) == []


def test_a_start_beyond_what_was_run_brings_all() -> None:
    resident = Resident(8)
    run(resident, item(1, 0, [0, 1], 8))
    assert run(resident, item(1, 16, [0, 1])) == [0]


def test_after_a_failure_everything_comes_again() -> None:
    resident = Resident(8)
    run(resident, item(1, 0, [0, 1], 20))
    resident.failed()
    assert run(resident, item(1, 20, [0, 1])) == [0, 1]


def test_records_of_sequences_long_gone_are_dropped() -> None:
    resident = Resident(2)
    for seq in range(MOST_RECORDS + 5):
        run(resident, item(seq, 0, [0]))
    assert len(resident._records) == MOST_RECORDS


def test_a_device_that_follows_it_always_has_what_the_host_has() -> None:
    """Sequences come, go, move to other pages and share them, at random; others rewrite pages between steps."""
    rng = random.Random(4)
    host, device = [0] * 24, [0] * 24
    resident, live, serial = Resident(24), dict[int, tuple[list[int], int]](), 1
    for _ in range(3000):
        free = [page for page in range(24) if all(page not in pages for pages, _ in live.values())]
        if len(free) >= 3 and rng.random() < 0.3:
            pages, start = rng.sample(free, 3), rng.choice([0, 16, 20])
            for page in pages[: -(-start // 16)]:  # a handoff
                host[page] = serial = serial + 1
            live[serial * 1000 + len(live)] = (pages, start)
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
                host[moved[at]] = host[pages[at]]
                live[seq] = (moved, start)
        chosen = [seq for seq in live if rng.random() < 0.8 and live[seq][1] < 47]
        items = [item(seq, live[seq][1], live[seq][0]) for seq in chosen]
        brought = resident.missing(items)
        for page in brought:
            device[page] = host[page]
        for each in items:
            for page in each.pages[: -(-each.start // 16)]:
                assert device[page] == host[page]
            serial += 1
            page = each.pages[each.start // 16]
            device[page] = host[page] = serial
            live[each.seq] = (live[each.seq][0], each.start + 1)
        resident.ran(items, brought)
