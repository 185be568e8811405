"""The ledger of adapters reports a request that was given another content than its adapter had at the time."""

from __future__ import annotations

import pytest

from baton.drill.checks.adapters import LAG_S, AdapterLedger


def judged(to: str | None, at: float, unsure: bool = False) -> list[str]:
    """Says what is wrong where a name is taken for ``to``: it was a@1 from second 1 on, and a@2 from second 2."""
    said: list[str] = []
    ledger = AdapterLedger(said.append, unsure)
    for second, content in ((1.0, "a@1"), (2.0, "a@2")):
        ledger.begins("a", content, second)
        ledger.is_done("a", content, second + 0.5)
    ledger.resolved(7, "a", to, at)
    return said


@pytest.mark.parametrize(("to", "at"), [("a@2", 2.0), ("a@1", 2.4), ("a@1", 2.5 + LAG_S), ("a@2", 99.0)])
def test_a_name_may_stand_for_the_last_content_and_for_a_while_for_the_one_before(to: str, at: float) -> None:
    assert not judged(to, at)


@pytest.mark.parametrize(("to", "at"), [("a@1", 2.6 + LAG_S), (None, 99.0), ("a@3", 2.0)])
def test_a_name_stands_for_no_content_that_was_replaced_long_ago_or_that_nobody_loaded(
    to: str | None, at: float
) -> None:
    assert f"adapter a is taken for {to}, and stands for" in judged(to, at)[0]


def test_where_a_router_may_not_hear_of_changes_old_contents_count() -> None:
    assert not judged("a@1", 99.0, unsure=True)
    assert not judged(None, 99.0, unsure=True)
    assert judged("a@3", 99.0, unsure=True)
