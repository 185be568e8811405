"""Tests context classes."""

from __future__ import annotations

import pytest

from baton.protos.errors import ConfigError
from baton.router.request.context_class import ContextClass, ContextClasses

CLASSES = ContextClasses([ContextClass("short", 10), ContextClass("medium", 100), ContextClass("long", 0)])


@pytest.mark.parametrize(
    ("tokens", "name"), [(1, "short"), (10, "short"), (11, "medium"), (100, "medium"), (101, "long")]
)
def test_a_prompt_is_of_the_first_class_it_fits_in(tokens, name):
    assert CLASSES.tag(tokens) == name


def test_the_last_class_takes_what_is_longer_even_with_a_limit():
    assert ContextClasses([ContextClass("a", 1), ContextClass("b", 2)]).tag(1000) == "b"


def test_no_class_at_all_is_refused():
    with pytest.raises(ConfigError, match="at least one"):
        ContextClasses([])


def test_classes_out_of_order_are_refused():
    with pytest.raises(ConfigError, match="rise"):
        ContextClasses([ContextClass("a", 5), ContextClass("b", 2), ContextClass("c", 0)])
    with pytest.raises(ConfigError, match="rise"):
        ContextClasses([ContextClass("a", 0), ContextClass("b", 2)])


BOUND = ContextClasses(
    [ContextClass("sql", 50, adapters=("sql", "sql2")), ContextClass("short", 10), ContextClass("long", 0)]
)


@pytest.mark.parametrize(
    ("tokens", "adapter", "name"),
    [(5, "sql", "sql"), (50, "sql2", "sql"), (51, "sql", "long"), (5, "other", "short"), (5, "", "short")],
)
def test_a_class_that_is_bound_to_adapters_takes_their_requests_alone(tokens, adapter, name):
    assert BOUND.tag(tokens, adapter) == name


def test_one_class_at_least_is_bound_to_no_adapter():
    with pytest.raises(ConfigError, match="bound to no adapters"):
        ContextClasses([ContextClass("sql", 0, adapters=("sql",))])
