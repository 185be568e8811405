"""Whose turn it is to compile: no tenant waits for more than one item of each other tenant."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from baton.grammars.turns import Turns


def test_a_tenant_with_many_items_has_one_under_way_and_others_begin_beside_it() -> None:
    turns: Turns[str] = Turns(2)
    for item in ("p1", "p2", "p3"):
        turns.join("poisonous", item)
    assert (turns.next(), turns.next()) == ("p1", None)
    turns.join("ordinary", "o1")
    assert (turns.next(), turns.waiting("poisonous"), len(turns)) == ("o1", 2, 2)
    turns.leave("poisonous", "p1")
    assert turns.next() == "p2"


def test_a_tenant_alone_may_have_several_and_the_next_slot_goes_to_who_has_none() -> None:
    turns: Turns[str] = Turns(2, each=2)
    for item in ("a1", "a2", "a3"):
        turns.join("a", item)
    assert (turns.next(), turns.next(), turns.next()) == ("a1", "a2", None)
    turns.join("b", "b1")
    turns.leave("a", "a2")
    assert (turns.next(), turns.next()) == ("b1", None)
    turns.leave("a", "a1")
    assert turns.next() == "a3"


def test_who_leaves_the_line_is_never_called() -> None:
    turns: Turns[str] = Turns(1)
    turns.join("a", "a1")
    turns.join("b", "b1")
    turns.leave("a", "a1")
    turns.leave("a", "a1")
    assert (turns.next(), turns.next()) == ("b1", None)


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.booleans()), max_size=60), st.integers(1, 3))
def test_between_two_turns_of_a_tenant_that_waits_each_other_has_one_at_most(steps, slots: int) -> None:
    turns: Turns[int] = Turns(slots)
    owners: dict[int, str] = {}
    running: list[int] = []
    passed: dict[str, Counter[str]] = {}
    for number, (tenant, ends) in enumerate(steps):
        if ends and running:
            ended = running.pop(0)
            turns.leave(owners[ended], ended)
        owners[number] = tenant
        turns.join(tenant, number)
        while (item := turns.next()) is not None:
            running.append(item)
            passed[owners[item]] = Counter()
            for waiter in "abcd":
                busy = any(owners[other] == waiter for other in running)
                if turns.waiting(waiter) and not busy and waiter != owners[item]:
                    passed.setdefault(waiter, Counter())[owners[item]] += 1
                    assert passed[waiter][owners[item]] <= 1 + slots
        assert len(running) <= slots
        assert len({owners[item] for item in running}) == len(running)
