"""Tests work done in processes side by side: results in order, and what is raised there is raised here."""

import os
import signal
import subprocess
import sys

import pytest

from baton.planner.processes import each
from baton.protos.errors import ConfigError

AFTER_GRPC = """
import asyncio, gc, operator
import grpc.aio
from baton.planner.processes import each

async def called():
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        held = [channel]
        held.append(held)  # found by a collection alone

if __name__ == "__main__":
    gc.disable()
    asyncio.run(called())
    print(list(each(operator.methodcaller("__call__"), [gc.collect, gc.collect], processes=2)) != [])
"""


def doubled(number: int) -> tuple[int, int]:
    return 2 * number, os.getpid()


def divided(number: int) -> int:
    return 1 // number


def killed(_: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_results_come_in_the_order_of_their_items_from_other_processes() -> None:
    found = list(each(doubled, range(5), processes=2))
    assert [double for double, _ in found] == [0, 2, 4, 6, 8]
    assert os.getpid() not in {pid for _, pid in found}


@pytest.mark.parametrize(("count", "processes"), [(1, 8), (3, 1)])
def test_nothing_is_started_for_one_item_or_one_process(count: int, processes: int) -> None:
    assert list(each(lambda _: os.getpid(), range(count), processes)) == [os.getpid()] * count


def test_an_error_of_an_item_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        list(each(divided, [1, 0], processes=2))


def test_a_process_that_is_killed_is_said_in_words() -> None:
    with pytest.raises(ConfigError, match=r"was killed.*fewer cores"):
        list(each(killed, [1, 2], processes=2))


def test_what_grpc_leaves_in_a_process_holds_no_simulation_up(tmp_path) -> None:
    program = tmp_path / "program.py"
    program.write_text(AFTER_GRPC)
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "True", done.stderr[-2000:]
