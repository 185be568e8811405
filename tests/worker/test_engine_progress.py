"""An engine that doesn't answer: it computes a long step, or it is stuck."""

from __future__ import annotations

import asyncio

import pytest

from baton.process.effort import Effort
from baton.protos import channel as ch
from baton.protos.errors import WorkerLost
from baton.protos.nouns import PoolSnapshot
from baton.worker import engine_progress
from baton.worker.control import WorkerControl
from baton.worker.engine_progress import EngineProgress
from tests.router.fake_services import info


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_progress, "LOOK_S", 0.005)


class Engine:
    """An engine whose second thread computes while ``computes``; it answers when it is told to."""

    def __init__(self, most_s: float = 60.0) -> None:
        self.asked: list[ch.AskSnapshot] = []
        self.computes, self.waits = True, False
        self.looks = 0
        progress = EngineProgress(self.efforts, most_s)
        self.control = WorkerControl(info("w", "prefill"), self.asked.append, None, progress=progress)  # type: ignore[arg-type]

    def efforts(self) -> dict[int, Effort]:
        self.looks += 1
        now = asyncio.get_running_loop().time() if self.computes else 1.0
        return {1: Effort(5.0, 1.0), 2: Effort(1.0, now) if self.waits else Effort(now, 1.0)}

    def answer(self) -> None:
        for ask in self.asked:
            self.control.answered(ch.SnapshotIs(ask.ticket, PoolSnapshot(pages=7)))


async def test_one_that_computes_is_told_of_at_once_and_nothing_is_counted() -> None:
    engine = Engine()
    said = await engine.control.progress()
    assert (said.computing, said.incarnation, said.pages) == (True, "w-1", 0)
    assert not said.at_baseline
    assert not engine.control._asked


async def test_one_that_answers_soon_is_not_looked_at() -> None:
    engine = Engine()
    asking = asyncio.create_task(engine.control.progress())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    engine.answer()
    assert (await asking).pages == 7
    assert engine.looks == 0


async def test_one_that_neither_answers_nor_computes_is_waited_for() -> None:
    engine = Engine()
    engine.computes = False
    asking = asyncio.create_task(engine.control.progress())
    while engine.looks < 8:
        await asyncio.sleep(0.001)
    assert not asking.done()
    engine.answer()
    assert (await asking).pages == 7


async def test_one_that_dies_is_lost() -> None:
    engine = Engine()
    engine.computes = False
    asking = asyncio.create_task(engine.control.progress())
    await asyncio.sleep(0.001)
    engine.control.lost(WorkerLost("it died"))
    with pytest.raises(WorkerLost, match="it died"):
        await asking


async def test_one_that_computes_without_end_is_stuck_and_one_that_answered_may_begin_anew() -> None:
    engine = Engine(most_s=0.0)
    asking = asyncio.create_task(engine.control.progress())
    while engine.looks < 8:
        await asyncio.sleep(0.001)
    assert not asking.done()
    engine.answer()
    assert (await asking).pages == 7
    engine.control._progress._most_s = 60.0
    assert (await engine.control.progress()).computing


async def test_what_it_waits_for_a_core_is_the_machines_fault() -> None:
    engine = Engine(most_s=1e-9)
    engine.waits = True
    for _ in range(3):
        assert (await engine.control.progress()).computing
