"""Work that lasts: what fails is counted, logged and begun again."""

from __future__ import annotations

import asyncio
import logging

import pytest
import redis.asyncio

from baton.cluster.membership import PolledRoster
from baton.tasks import lasting as module
from baton.tasks.lasting import counting_failures, lasting


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
