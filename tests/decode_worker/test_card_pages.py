"""The decode loop with pages on a card: whatever way blocks come and pages change hands, steps read what is right.

The paced engine computes from its pages, here from the card's: a page that is stale there gives a wrong answer.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from baton.engine.backends.cuda.demand_pages import DemandPages
from baton.engine.backends.paced.runner import PacedRunner, rows_after
from baton.engine.backends.residency import PageResidency
from baton.engine.plan import StepPlan, StepResult
from baton.engine.wide_pages import WideMirror
from baton.protos import channel as ch
from tests.decode_worker.engine.loop_bench import KV, MODEL, Bench, answer, prompt_of

PAGE = 16 * KV


class Mirror:
    """Stands for engine/backends/cuda/page_share.py, without a driver."""

    def __init__(self, resident: PageResidency) -> None:
        self.opened, self.landed = resident.opened, resident.landed
        self.shared = None
        self.taken = self.make_whole = self.let_go = lambda pages: None  # the host has every page whole


class CardRunner(PacedRunner):
    """Computes on the card's pages, and keeps them as engine/backends/cuda/runner.py does; with ``copies``, the
    host's are copies made on demand, of which so many may stay.
    """

    copies: int | None = None

    def bind(self, buffer: memoryview, pages: int) -> None:
        self.card = memoryview(bytearray(b"\xee" * (pages * self.spec.layout.page_bytes)))
        super().bind(self.card, pages)
        self.host, self.brought = buffer, 0
        self.resident: PageResidency | DemandPages = PageResidency(pages)
        self.mirror: Any = Mirror(self.resident)
        if self.copies is not None:
            self.mirror = self.resident = DemandPages(pages, self.copies, self._fetch, self._drop)

    def _fetch(self, pages: Sequence[int]) -> None:
        for page in pages:
            self.host[page * PAGE : (page + 1) * PAGE] = self.card[page * PAGE : (page + 1) * PAGE]

    def _drop(self, page: int) -> None:
        self.host[page * PAGE : (page + 1) * PAGE] = b"\xdd" * PAGE

    def run(self, plan: StepPlan) -> StepResult:
        brought = self.resident.missing(plan.items)
        for page in brought:
            self.card[page * PAGE : (page + 1) * PAGE] = self.host[page * PAGE : (page + 1) * PAGE]
        self.brought += len(brought)
        result = super().run(plan)
        for item in plan.items if self.copies is None else ():
            for token in range(item.start, item.start + len(item.tokens)):
                at = item.pages[token // 16] * PAGE + token % 16 * KV
                self.host[at : at + KV] = self.card[at : at + KV]
        self.resident.ran(plan.items, brought)
        self.resident.ended()
        return result


class Cards(Bench):
    """Adds an I/O process, played by hand, that may write the card's pages."""

    def __init__(self, pages: int = 64, copies: int | None = None, **limits: Any) -> None:
        self.card = CardRunner("test", step_seconds=lambda s: 0.0, **MODEL)
        self.card.copies = copies
        super().__init__(pages, self.card, **limits)
        assert self.loop.swap is not None
        self.loop.swap._cheaper = lambda size, tokens: True  # type: ignore[method-assign]

    def land(self, admitted: ch.Admitted, prompt: list[int], blocks: Sequence[int], card: bool) -> None:
        rows = list(rows_after(b"", prompt, 0, KV))
        for index in blocks:
            data, at = b"".join(rows[16 * index : 16 * index + 16]), admitted.pages[index] * PAGE
            if not card or self.card.copies is None:
                self.memory.view()[at : at + len(data)] = data
            if card:
                self.card.card[at : at + len(data)] = data
        self.say(ch.BlocksReceived(admitted.key, 1, tuple(blocks), tuple(blocks) if card else ()))

    def spoil(self, admitted: ch.Admitted) -> None:
        """A stream that ends with wrong checksums has written, on the card and on the host."""
        for page in admitted.pages[admitted.held_blocks :]:
            for memory in (self.memory.view(), self.card.card):
                memory[page * PAGE : (page + 1) * PAGE] = random.Random(page).randbytes(PAGE)


def test_blocks_that_landed_on_the_card_are_not_brought_over_again() -> None:
    bench, prompt = Cards(), prompt_of(57)
    admitted = bench.admit(prompt, local=False)
    bench.say(ch.ReceiveOpened(admitted.key, 1))
    bench.land(admitted, prompt, [0, 1], card=True)
    bench.land(admitted, prompt, [2], card=False)
    bench.land(admitted, prompt, [3], card=True)
    bench.commit(admitted, prompt)
    assert bench.finish(admitted.key)[admitted.key] == answer(prompt)
    assert bench.card.brought == 1, "only what came by the host"


def test_a_prefix_that_was_held_is_brought_and_what_landed_behind_it_is_not() -> None:
    bench, prompt = Cards(), prompt_of(64)
    first = bench.admit(prompt, local=False)
    bench.say(ch.ReceiveOpened(first.key, 1))
    bench.land(first, prompt, range(4), card=False)
    bench.say(ch.ReceiveClosed(first.key, 1))
    bench.commit(first, prompt)
    bench.finish(first.key)
    brought = bench.card.brought
    longer = [*prompt, *prompt_of(30, 9)]
    admitted = bench.admit(longer, local=False)
    assert admitted.held_blocks == 4
    bench.say(ch.ReceiveOpened(admitted.key, 1))
    bench.land(admitted, longer, range(4, 6), card=True)
    bench.commit(admitted, longer)
    assert bench.finish(admitted.key)[admitted.key] == answer(longer)
    assert bench.card.brought == brought + 4


def busy(seed: int, rounds: int = 120, copies: int | None = None, kind: type[Cards] = Cards) -> Cards:
    """Local requests and handoffs by card and by host come at random into few pages; some break off, some end."""
    rng, bench = random.Random(seed), kind(pages=18, copies=copies)
    wanted: dict[int, list[int]] = {}
    open_leases: list[tuple[ch.Admitted, list[int], list[int]]] = []
    for _ in range(rounds):
        prompt = prompt_of(rng.choice([5, 17, 40, 64]), salt=rng.randrange(6))
        kind = rng.random()
        if kind < 0.5:
            local = kind < 0.2
            admitted = bench.admit(prompt, local=local, max_tokens=rng.choice([1, 30, 120]))
            if isinstance(admitted, ch.Admitted):
                if local:
                    wanted[admitted.key] = prompt
                else:
                    bench.say(ch.ReceiveOpened(admitted.key, 1))
                    left = list(range(admitted.held_blocks, len(admitted.pages)))
                    open_leases.append((admitted, prompt, left))
        for lease in list(open_leases):
            admitted, prompt, left = lease
            if rng.random() < 0.15:
                bench.spoil(admitted)
                open_leases.remove(lease)
                bench.say(ch.Cancel(admitted.key, "gone"), ch.ReceiveClosed(admitted.key, 1))
            elif left:
                count = rng.randint(1, len(left))
                bench.land(admitted, prompt, left[:count], card=rng.random() < 0.7)
                del left[:count]
            else:
                open_leases.remove(lease)
                bench.say(ch.ReceiveClosed(admitted.key, 1))
                answered = bench.commit(admitted, prompt)
                assert any(isinstance(said, ch.Committed) for said in answered)
                wanted[admitted.key] = prompt
        for _ in range(rng.choice([0, 0, 1, 3])):
            bench.loop.turn([])
    for admitted, *_ in open_leases:
        bench.say(ch.Cancel(admitted.key, "gone"), ch.ReceiveClosed(admitted.key, 1))
    bench.finish()
    assert bench.loop.scheduler.preemptions
    for key, prompt in wanted.items():
        got = bench.tokens(key)
        assert got == answer(prompt, max_tokens=max(len(got), 1)), f"request {key} of seed {seed}"
    bench.at_baseline()
    return bench


@pytest.mark.parametrize("seed", range(6))
def test_answers_are_right_whatever_pages_change_hands(seed: int) -> None:
    busy(seed)


@pytest.mark.parametrize("copies", [0, 4])
@pytest.mark.parametrize("seed", range(6))
def test_answers_are_right_where_the_host_has_copies_on_demand(seed: int, copies: int) -> None:
    busy(seed, copies=copies)


def test_a_block_that_is_said_to_be_on_the_card_and_is_not_gives_a_wrong_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The planted bug counts all blocks behind a brought one as brought."""
    landed = PageResidency.landed

    def too_much(resident: PageResidency, seq: int, table: Sequence[int], blocks: Sequence[int]) -> None:
        landed(resident, seq, table, range(min(blocks), len(table)))

    monkeypatch.setattr(PageResidency, "landed", too_much)
    with pytest.raises(AssertionError, match="of seed"):
        [busy(seed) for seed in range(6)]


def test_pages_of_another_size_tell_the_pages_beneath() -> None:
    resident = PageResidency(12)
    heard: list[Any] = []
    beneath = Mirror(resident)
    beneath.landed = lambda seq, table, blocks: heard.append((seq, table, list(blocks)))  # type: ignore[method-assign]
    beneath.opened = heard.append  # type: ignore[method-assign]
    beneath.shared = None  # type: ignore[attr-defined]
    landing: dict[int, Any] = {}
    mirror = WideMirror(beneath, 3, landing)  # type: ignore[arg-type]
    table = [2, 0]
    mirror.opened([2])
    mirror.landed(7, table, [1])
    table.append(1)
    mirror.landed(7, table, [0, 2])
    assert heard[0] == [6, 7, 8]
    assert heard[1][2] == [3, 4, 5]
    assert heard[2] == (7, [6, 7, 8, 0, 1, 2, 3, 4, 5], [0, 1, 2, 6, 7, 8])
    assert heard[1][1] is heard[2][1] is landing[7][1], "one table, which the first step finds again"


def test_pages_of_a_handoff_that_was_cancelled_take_no_memory_of_the_host() -> None:
    cards, prompt = Cards(copies=0), prompt_of(100)
    admitted = cards.admit(prompt, local=False)
    cards.say(ch.ReceiveOpened(admitted.key, 1))
    cards.land(admitted, prompt, range(7), card=False)
    assert cards.card.mirror.copies == 7
    cards.say(ch.Cancel(admitted.key, "over"))
    assert cards.card.mirror.copies == 7, "a stream may still write them"
    cards.say(ch.ReceiveClosed(admitted.key, 1))
    assert cards.card.mirror.copies == 0
    assert cards.at_baseline()


def test_wide_pages_count_what_the_host_has_room_for_and_give_back_all_of_theirs() -> None:
    dropped: list[int] = []
    narrow = DemandPages(16, 8, lambda pages: None, dropped.append)
    wide = WideMirror(narrow, 4, {})
    assert wide.copies_left == 2
    wide.opened([0, 1, 2])
    assert wide.copies_left == -1
    assert wide.freed is not None
    wide.freed([0, 2])
    assert (wide.copies_left, dropped) == (1, [0, 1, 2, 3])
    assert WideMirror(Mirror(PageResidency(4)), 4, {}).freed is None  # type: ignore[arg-type]
