"""Tests work done in processes side by side: results in order, and what is raised there is raised here."""

import os
import signal

import pytest

from baton.planner.processes import each
from baton.protos.errors import ConfigError


def test_results_come_in_the_order_of_their_items_from_other_processes() -> None:
    doubled = list(each(lambda n: (2 * n, os.getpid()), range(5), processes=2))
    assert [double for double, _ in doubled] == [0, 2, 4, 6, 8]
    assert os.getpid() not in {pid for _, pid in doubled}


@pytest.mark.parametrize(("count", "processes"), [(1, 8), (3, 1)])
def test_nothing_is_forked_for_one_item_or_one_process(count: int, processes: int) -> None:
    assert list(each(lambda _: os.getpid(), range(count), processes)) == [os.getpid()] * count


def test_an_error_of_an_item_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        list(each(lambda n: 1 // n, [1, 0], processes=2))


def test_a_process_that_is_killed_is_said_in_words() -> None:
    with pytest.raises(ConfigError, match=r"was killed.*fewer cores"):
        list(each(lambda _: os.kill(os.getpid(), signal.SIGKILL), [1, 2], processes=2))
