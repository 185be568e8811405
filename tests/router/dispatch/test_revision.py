"""Tests that changes to the cluster reach those that wait for one, however many they are."""

from __future__ import annotations

import asyncio

from baton.process.turns import A_TURN
from baton.router.dispatch.revision import ClusterRevision


async def test_a_change_ends_a_wait_and_none_ends_it_after_its_time() -> None:
    told: list[int] = []
    revision = ClusterRevision(lambda: told.append(1))
    waiting = asyncio.create_task(revision.changed(60.0))
    await asyncio.sleep(0)
    revision.advance()
    assert (revision.number, told) == (1, [1])
    await asyncio.wait_for(waiting, 30)
    await asyncio.wait_for(revision.changed(0.01), 30)


async def test_a_thousand_choices_that_a_worker_gives_back_at_once_are_each_woken_once() -> None:
    revision, wakes = ClusterRevision(lambda: None), 0

    async def given_back() -> None:
        nonlocal wakes
        for _ in range(3):  # its prefill, its lease and its seat
            revision.advance()
        await revision.changed(60.0)
        wakes += 1
        await revision.changed(60.0)

    tasks = [asyncio.create_task(given_back()) for _ in range(1000)]
    most = 0
    while (before := wakes) < 1000:
        await asyncio.sleep(0)
        most = max(most, wakes - before)
    assert most <= A_TURN, "others are served between them"
    assert not any(task.done() for task in tasks), "they were woken by each other's changes"
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert revision._waiters == {}
