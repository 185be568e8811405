"""Work that lasts: what fails is counted, logged and begun again, and no endless work is started in another way."""

from __future__ import annotations

import ast
import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis.asyncio

import baton
from baton.cluster.membership import PolledRoster
from baton.tasks import lasting as module
from baton.tasks.lasting import counting_failures, lasting

ROOT = Path(baton.__file__).parent
# Where endless work is a part of other work, which waits for it and ends with it.
WAITED_FOR = {
    "decode_worker/io/host_receivers.py": {"run"},  # whose end is the news that a host is lost
    "kv/transport/loopback.py": {"_run"},  # whose end ends its stream
    "kv/transport/nccl.py": {"_watch"},  # nor is what waits for one channel to break
    "kv/tiers/stack.py": {"run"},  # a tier's ``run`` is no endless one
    "prefill_worker/io/divided_handoff.py": {"_run"},  # nor is a part's of a handoff
    "prefill_worker/io/host_handoff.py": {"_pass_on"},  # whose call's answer says how it ended
    "router/api/batch/lane.py": {"_end_if_cancelled"},
    "router/dispatch/dispatcher.py": {"run"},  # nor is a choice's
    "router/workers/link.py": {"_watch", "write_all", "read_all"},
    "router/workers/link_table.py": {"run"},  # a link makes itself anew
    "worker/rank_sender.py": {"run"},  # nor is a handoff's
}


async def test_work_that_fails_is_counted_logged_and_begun_again(caplog: pytest.LogCaptureFixture) -> None:
    counted, tries = list[str](), list[int]()
    again = asyncio.Event()

    async def work() -> None:
        tries.append(len(tries))
        if len(tries) == 1:
            raise ValueError("once")
        again.set()
        await asyncio.sleep(1000)

    with counting_failures(counted.append), caplog.at_level(logging.ERROR, "baton.tasks"):
        task = lasting(work, "a meter")
        await asyncio.wait_for(again.wait(), 20)
        task.cancel()
        await asyncio.wait({task})
    assert (counted, tries, task.cancelled(), task.get_name()) == (["a meter"], [0, 1], True, "a meter")
    assert "'a meter' failed" in caplog.text
    assert "ValueError: once" in caplog.text


async def test_a_roster_that_cannot_be_read_is_counted_at_each_look(monkeypatch: pytest.MonkeyPatch) -> None:
    counted, enough = list[str](), asyncio.Event()

    def count(name: str) -> None:
        counted.append(name)
        if len(counted) == 2:
            enough.set()

    async def look(roster: PolledRoster) -> None:
        if roster._task is not None:
            raise ValueError("no roster")

    monkeypatch.setattr(PolledRoster, "refresh", look)
    with counting_failures(count):
        async with PolledRoster(redis.asyncio.Redis(), "n", poll_s=0.001):
            await asyncio.wait_for(enough.wait(), 20)
    assert set(counted) == {"roster"}


async def test_work_that_returns_is_over_and_one_that_goes_on_failing_is_tried_ever_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept, tries = list[float](), 0

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    async def work() -> None:
        nonlocal tries
        tries += 1
        if tries <= 12:
            raise ValueError

    monkeypatch.setattr(module.asyncio, "sleep", sleep)
    await lasting(work, "a meter")
    assert slept[:3] == [0.1, 0.2, 0.4]
    assert slept[-1] == module.LONGEST_S
    assert tries == 13


def test_endless_work_is_started_as_lasting_work_alone() -> None:
    """A task that nobody waits for would end unseen with its first exception, and never do its work again."""
    trees = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in sources()}
    endless = {node.name for tree in trees.values() for node in ast.walk(tree) if is_endless(node)}
    assert {"_run", "run", "watch_scale", "beat"} <= endless, "the search itself works"
    found = {(file, name) for file, tree in trees.items() for name in started(tree) if name in endless}
    allowed = {(file, name) for file, names in WAITED_FOR.items() for name in names}
    assert found - allowed == set(), "start it by baton.tasks.lasting.lasting"
    assert allowed - found == set(), "these are started so no more"


def test_endless_work_that_survives_a_failed_turn_counts_it() -> None:
    """Such a task never fails, so that nobody would see that each of its turns does."""
    uncounted, counted = set[str](), set[str]()
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if is_endless(node):
                for handler in handlers_of_anything(node):
                    calls = {called(part) for part in ast.walk(handler) if isinstance(part, ast.Call)}
                    at = f"{path.relative_to(ROOT)}: {getattr(node, 'name', '')}"
                    (counted if "count_failure" in calls else uncounted).add(at)
    assert "cluster/membership.py: _run" in counted, "the search itself works"
    assert uncounted == set(), "call baton.tasks.lasting.count_failure"


def handlers_of_anything(node: ast.AST) -> Iterator[ast.ExceptHandler]:
    """Yields the handlers of ``node`` that catch every exception and raise none."""
    for part in of_itself(node):
        catches = isinstance(part, ast.ExceptHandler) and getattr(part.type, "id", "") == "Exception"
        if catches and not any(isinstance(inner, ast.Raise) for inner in ast.walk(part)):
            yield part


def sources() -> Iterator[Path]:
    for path in ROOT.rglob("*.py"):
        if path.relative_to(ROOT).parts[0] not in ("drill", "bench"):  # where a task that fails fails the run
            yield path


def is_endless(node: ast.AST) -> bool:
    """Returns whether ``node`` is a coroutine with a loop that only an exception ends."""
    return isinstance(node, ast.AsyncFunctionDef) and any(
        isinstance(part, ast.While)
        and isinstance(part.test, ast.Constant)
        and not any(isinstance(inner, ast.Return | ast.Break) for inner in of_itself(part))
        for part in of_itself(node)
    )


def of_itself(node: ast.AST) -> Iterator[ast.AST]:
    """Yields all parts of ``node`` but those of functions within it."""
    for part in ast.iter_child_nodes(node):
        yield part
        if not isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            yield from of_itself(part)


def started(tree: ast.AST) -> Iterator[str]:
    """Yields the names of the functions whose coroutines become tasks in another way."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and called(node) in ("create_task", "ensure_future") and node.args:
            work = node.args[0]
            yield called(work) if isinstance(work, ast.Call) else ""


def called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
