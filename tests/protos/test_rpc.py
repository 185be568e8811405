"""Cancellations that are swallowed, and those that were never ours."""

import asyncio
import contextlib

import pytest

from baton.protos.rpc import heed_cancel, settled


async def fails() -> None:
    await asyncio.sleep(0)
    raise ValueError("mine")


@pytest.mark.parametrize("body_turns", [0, 3])
async def test_a_task_that_fails_in_a_settled_group_leaves_no_cancellation_behind(body_turns: int) -> None:
    async def work() -> None:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(fails()), group.create_task(asyncio.sleep(5))]
            for _ in range(body_turns):
                await asyncio.sleep(0)
            await settled(tasks)

    with pytest.raises(ExceptionGroup):
        await work()
    heed_cancel()


async def test_a_cancellation_from_outside_still_ends_a_settled_group() -> None:
    async def work() -> None:
        async with asyncio.TaskGroup() as group:
            await settled([group.create_task(asyncio.sleep(5))])

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_swallowed_cancellation_is_raised_again() -> None:
    async def work() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(5)
        heed_cancel()

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_nothing_to_settle_is_settled() -> None:
    await settled([])
