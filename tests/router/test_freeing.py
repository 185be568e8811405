"""Tests that what an answer was made of is freed as it ends: a collection has nothing of it to find."""

from __future__ import annotations

import asyncio
import gc

import pytest

from baton.router.dispatch.choice_run import ChoiceRun
from tests.router.fake_workers import Cluster, cluster, collect, until

PROMPT = tuple(range(40))


async def answered(c: Cluster) -> None:
    [stream] = c.open(PROMPT)
    await collect(stream)


async def of_several_choices(c: Cluster) -> None:
    await asyncio.gather(*map(collect, c.open(PROMPT, n=2)))


def runs() -> list[ChoiceRun]:
    return [o for o in gc.get_objects() if isinstance(o, ChoiceRun)]


def left(others: list[ChoiceRun]) -> list[str]:
    """Returns the runs of choices that are still there; a call of gRPC's may end a little after its answer."""
    known = {id(o) for o in others}
    return [repr(o) for o in runs() if id(o) not in known]


@pytest.mark.parametrize("how", [answered, of_several_choices])
async def test_an_answer_leaves_no_cycle(how) -> None:
    gc.collect()
    gc.disable()  # only what nobody refers to is freed from here on
    others = runs()  # held, so that no later run has the id of one of them
    try:
        async with cluster() as c:
            await how(c)
            await c.idle()
            await c.core.decisions.flush()
            await until(lambda: not left(others), what=lambda: left(others))
    finally:
        gc.enable()
