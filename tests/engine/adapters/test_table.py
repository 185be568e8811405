"""Tests who goes when there is no room, who never goes, what is answered: the table alone, with readings in
memory.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator

import pytest

from baton.engine.adapters.base import AdapterBase
from baton.engine.adapters.host import AdapterHost
from baton.engine.adapters.packed import PackedAdapter
from baton.engine.adapters.table import AdapterTable, ReadAdapter
from baton.protos import channel as ch
from baton.protos.adapter_id import adapter_id
from baton.protos.errors import AdapterNotLoaded, AdapterRefused, BatonError, RankLost
from baton.protos.nouns import AdapterInfo, AdapterLimits

BYTES = 100


def named(name: str, version: int = 0) -> str:
    return adapter_id(name, f"{version:016x}")


class Host(AdapterHost):
    """Applies nothing; says what it was given."""

    base = AdapterBase({}, 64, 1 << 20)

    def __init__(self) -> None:
        self.held: list[str] = []
        self.pieces = 2  # that holding takes
        self.fault: Exception | None = None  # that the next one's first piece raises

    def holding(self, adapter: str, packed: PackedAdapter) -> Iterator[None]:
        for _ in range(self.pieces):
            yield
            if self.fault is not None:
                fault, self.fault = self.fault, None
                raise fault
        self.held.append(adapter)

    def drop(self, adapter: str) -> None:
        self.held.remove(adapter)


class Read:
    """A reading that is done when it is asked the second time; its content is its path."""

    def __init__(self, source: ch.AdapterPlace) -> None:
        self.source, self.looks = source, 0

    def result(self) -> ReadAdapter | BatonError | None:
        self.looks += 1
        if self.looks < 2:
            return None
        if self.source.path == "unmapped":
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        if self.source.path == "bad":
            return AdapterRefused("bad files", "lora_path")
        info = AdapterInfo(named(self.source.name, int(self.source.path)), self.source.path, 8, BYTES)
        return ReadAdapter(info, PackedAdapter((), memoryview(b"")))

    def close(self) -> None:
        """Does nothing, because nothing is open."""


class Table:
    """The table under test, and what it answered."""

    def __init__(self, most: int = 3, size: int = 1000) -> None:
        self.host, self.answers, self._ticket = Host(), list[object](), 0
        self.table = AdapterTable(self.host, AdapterLimits(most, size, 64), Read)

    def load(
        self, name: str, version: int = 0, pinned: bool = False, path: str = "", known: bool = False
    ) -> object:
        self._ticket += 1
        digest = f"{version:016x}" if known else ""
        place = ch.AdapterPlace(name, path or str(version), "", digest)
        self.take(self.table.load(ch.LoadAdapter(self._ticket, place, pinned)))
        while self.table.reading:
            self.take(self.table.turn())
        return next(a for a in self.answers if getattr(a, "ticket", None) == self._ticket)

    def unload(self, adapter: str) -> object:
        self._ticket += 1
        self.take(self.table.unload(ch.UnloadAdapter(self._ticket, adapter)))
        return next(a for a in self.answers if getattr(a, "ticket", None) == self._ticket)

    def take(self, answers: Iterable[object]) -> None:
        self.answers += answers


def test_the_least_recently_used_goes_first() -> None:
    t = Table()
    for name in "abc":
        t.load(name)
    t.table.use(1, named("a"))
    t.table.release(1)
    t.load("d")
    assert t.table.ids == (named("a"), named("c"), named("d"))
    assert sorted(t.host.held) == list(t.table.ids)
    assert t.answers[-1] == ch.AdaptersChanged(t.table.ids)


def test_what_was_read_is_held_a_piece_a_turn_and_answered_once_all_are() -> None:
    t = Table()
    t.host.pieces = 5
    t.take(t.table.load(ch.LoadAdapter(7, ch.AdapterPlace("a", "0"), False)))
    t.take(t.table.load(ch.LoadAdapter(8, ch.AdapterPlace("b", "0"), False)))
    turns = 0
    while t.table.reading:
        assert t.table.ids == tuple(named(name) for name in "ab" if named(name) in t.host.held)
        t.take(t.table.turn())
        turns += 1
    assert turns == 2 * (1 + 1 + t.host.pieces)  # not yet read, then a turn per piece, then the answer
    assert [a.ticket for a in t.answers if isinstance(a, ch.AdapterIs)] == [7, 8]
    assert t.table.ids == (named("a"), named("b"))


def test_one_that_is_unloaded_while_it_is_being_held_is_not_there_yet() -> None:
    t = Table()
    t.take(t.table.load(ch.LoadAdapter(7, ch.AdapterPlace("a", "0"), False)))
    while not t.table.holding:
        t.take(t.table.turn())
    refused = t.unload(named("a"))
    assert isinstance(refused, ch.AdapterFailed)
    assert refused.error.type == "AdapterUnknown"
    with pytest.raises(AdapterNotLoaded):
        t.table.use(1, named("a"))
    while t.table.reading:
        t.take(t.table.turn())
    t.table.use(1, named("a"))


def test_bytes_are_bounded_too() -> None:
    t = Table(most=9, size=2 * BYTES)
    for name in "abc":
        t.load(name)
    assert t.table.ids == (named("b"), named("c"))


def test_pinned_and_used_ones_stay_and_the_new_one_is_refused() -> None:
    t = Table()
    t.load("a", pinned=True)
    t.load("b")
    t.load("c")
    t.table.use(1, named("b"))
    t.table.use(2, named("c"))
    refused = t.load("d")
    assert isinstance(refused, ch.AdapterFailed)
    assert refused.error.type == "AdaptersFull"
    assert t.table.ids == (named("a"), named("b"), named("c"))
    t.table.release(2)
    assert isinstance(t.load("d"), ch.AdapterIs)
    assert t.table.ids == (named("a"), named("b"), named("d"))


def test_one_that_is_unloaded_ends_with_its_last_sequence() -> None:
    t = Table()
    t.load("a")
    t.table.use(1, named("a"))
    t.table.use(2, named("a"))
    answer = t.unload(named("a"))
    assert isinstance(answer, ch.AdapterIs)
    assert (answer.adapter.running, answer.adapter.leaving) == (2, True)
    assert t.answers[-1] == ch.AdaptersChanged(())
    with pytest.raises(AdapterNotLoaded, match="load it, or ask another"):
        t.table.use(3, named("a"))
    t.table.release(1)
    assert t.host.held == [named("a")]
    t.table.release(2)
    t.table.release(2)
    assert t.host.held == []
    again = t.unload(named("a"))
    assert isinstance(again, ch.AdapterFailed)
    assert again.error.type == "AdapterUnknown"


def test_a_replaced_content_is_another_adapter_beside_its_predecessor() -> None:
    t = Table()
    t.load("a", 1)
    t.table.use(1, named("a", 1))
    t.load("a", 2)
    assert t.table.ids == (named("a", 1), named("a", 2))
    t.unload(named("a", 1))
    assert t.table.ids == (named("a", 2),)
    t.table.release(1)
    assert t.host.held == [named("a", 2)]


def test_what_is_held_is_answered_at_once_and_comes_back_where_it_was_leaving() -> None:
    t = Table()
    t.load("a", 7)
    t.table.use(1, named("a", 7))
    t.unload(named("a", 7))
    answer = t.load("a", 7, pinned=True, known=True)
    assert isinstance(answer, ch.AdapterIs)
    assert (answer.adapter.leaving, answer.adapter.pinned, answer.adapter.running) == (False, True, 1)
    assert t.table.ids == (named("a", 7),)
    assert t.host.held == [named("a", 7)]


def test_loads_wait_for_one_another_and_a_bad_one_harms_none() -> None:
    t = Table()
    for ticket, path in ((1, "bad"), (2, "5")):
        t.take(t.table.load(ch.LoadAdapter(ticket, ch.AdapterPlace("a", path), False)))
    while t.table.reading:
        t.take(t.table.turn())
    failed, held, changed = t.answers
    assert isinstance(failed, ch.AdapterFailed)
    assert (failed.ticket, failed.error.type) == (1, "AdapterRefused")
    assert isinstance(held, ch.AdapterIs)
    assert held.adapter.id == named("a", 5)
    assert changed == ch.AdaptersChanged((named("a", 5),))


@pytest.mark.parametrize("where", ["reading", "holding"])
def test_a_machine_without_memory_fails_that_adapter_alone(where: str) -> None:
    t = Table()
    t.load("before")
    if where == "holding":
        t.host.fault = OSError(errno.EMFILE, "Too many open files")
    failed = t.load("a", path="unmapped" if where == "reading" else "")
    assert isinstance(failed, ch.AdapterFailed)
    assert failed.error.type == "Unavailable"
    assert "to spare" in failed.error.message
    assert isinstance(t.load("a"), ch.AdapterIs)
    assert t.table.ids == (named("a"), named("before"))


def test_a_lost_rank_ends_the_engine_all_the_same() -> None:
    t = Table()
    t.host.fault = RankLost("rank 1 has ended")
    with pytest.raises(RankLost):
        t.load("a")


def test_the_list_tells_use_and_order() -> None:
    t = Table()
    t.load("a")
    t.load("b")
    t.table.use(4, named("a"))
    listed = t.table.listed(ch.ListAdapters(9)).adapters
    assert [(one.id, one.running) for one in listed] == [(named("b"), 0), (named("a"), 1)]


def test_an_engine_that_applies_none_says_so() -> None:
    table = AdapterTable()
    (answer,) = table.load(ch.LoadAdapter(1, ch.AdapterPlace("a", "x"), False))
    assert isinstance(answer, ch.AdapterFailed)
    assert "applies no adapters" in answer.error.message
    table.use(1, "")
    with pytest.raises(AdapterNotLoaded):
        table.use(2, named("a"))
