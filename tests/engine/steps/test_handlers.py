"""A loop's table of handlers holds its whole union, or there is no loop."""

from __future__ import annotations

import pytest

from baton.engine.steps.handlers import Handlers
from baton.protos import channel as ch


def test_a_union_that_is_covered_gives_a_table() -> None:
    heard: list[object] = []
    table = (
        Handlers().on(ch.Prefill, heard.append).on(ch.SendClosed, heard.append).covering(ch.Prefill | ch.SendClosed)
    )
    table[ch.SendClosed](ch.SendClosed(1))
    assert heard == [ch.SendClosed(1)]


@pytest.mark.parametrize(("union", "named"), [(ch.Drain | ch.Shutdown, "Drain"), (ch.Shutdown | ch.Pin, "Pin")])
def test_a_message_without_a_handler_and_a_handler_without_a_message_are_named(union: object, named: str) -> None:
    handlers = Handlers().on(ch.Shutdown, print)
    with pytest.raises(AssertionError, match=named):
        handlers.covering(union)


def test_a_message_has_one_handler() -> None:
    with pytest.raises(AssertionError, match="Drain has two"):
        Handlers().on(ch.Drain, print).on(ch.Drain, print)
