"""Work beside a block: it runs while the block does, and has ended when the block is left."""

from __future__ import annotations

import asyncio

import pytest

from baton.tasks.beside import beside


async def test_work_runs_while_entered_and_has_ended_afterwards() -> None:
    told = list[str]()

    async def work() -> None:
        told.append("begun")
        try:
            await asyncio.sleep(1000)
        finally:
            await asyncio.sleep(0)
            told.append("ended")

    async with beside(work, "work"):
        await asyncio.sleep(0)
        assert told == ["begun"]
        assert any(task.get_name() == "work" for task in asyncio.all_tasks())
    assert told == ["begun", "ended"]


async def test_an_error_of_the_block_is_raised_and_one_of_the_work_is_not() -> None:
    async def fails() -> None:
        raise ValueError("of the work")

    async def block() -> None:
        async with beside(fails, "work"):
            await asyncio.sleep(0)
            raise KeyError("of the block")

    with pytest.raises(KeyError, match="of the block"):
        await block()
