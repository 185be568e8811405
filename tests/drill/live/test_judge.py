"""The live judge finds what a server does wrong, names it, and has nothing against one that does nothing wrong."""

from __future__ import annotations

import asyncio
import os

import msgspec
import pytest
from typer.testing import CliRunner

from baton.console.main import app
from baton.drill.live import judge
from baton.drill.live.answers import Asker, Question
from baton.drill.live.http import Http, Unreachable
from baton.drill.live.judge import LiveJudge, LiveLoad
from tests.drill.live.server import SmallServer
from tests.e2e.fleet import Fleet

PLAN = LiveLoad(questions=10, rounds=3, at_once=8, max_tokens=8, limit_s=30.0)


async def test_a_server_that_does_nothing_wrong_passes() -> None:
    async with SmallServer() as server:
        card = await LiveJudge(server.url, plan=PLAN).run()
    assert card.passed, card
    assert not card.differs
    assert card.requests > 3 * PLAN.questions
    assert card.refused == 0


@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        ("foreign", "foreign"),
        ("changes", "differs"),
        ("repeats", "unlike"),
        ("loses", "unlike"),
        ("stops", "broken"),
        ("breaks", "broken"),
        ("shapeless", "broken"),
        ("health", "health"),
        ("held", "held"),
        ("endless", "endless"),
    ],
)
async def test_what_a_server_does_wrong_is_seen(fault: str, seen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "CALM_S", 0.05)
    monkeypatch.setattr(judge, "LOOK_S", 0.06 if fault == "health" else 0.005)  # an answer ends between looks
    plan = LiveLoad(10, 3, 8, 8, limit_s=1.0 if fault == "endless" else 30.0)
    async with SmallServer(fault) as server:
        card = await LiveJudge(server.url, plan=plan).run()
    assert getattr(card, seen), card


@pytest.mark.parametrize("fault", ["cuts", "foreign", "never again"])
async def test_a_cut_stream_is_excused_by_a_kill_and_a_wrong_answer_or_the_loss_of_the_server_is_not(
    fault: str,
) -> None:
    victim = await asyncio.create_subprocess_exec("sleep", "600")
    plan = msgspec.structs.replace(PLAN, pids=(victim.pid,), recovery_s=0.3)
    async with SmallServer(fault) as server:
        live = LiveJudge(server.url, plan=plan)
        server.has_lost = lambda: bool(live._kills.killed)  # a busy machine hears of a process's end later
        card = await live.run()
    assert card.killed == [victim.pid]
    assert await victim.wait() == -9
    assert not card.broken
    assert card.passed == (fault == "cuts"), card
    assert card.refused > 0 or fault == "foreign"
    assert bool(card.foreign) == (fault == "foreign")
    assert any("nothing is answered" in text for text in card.health) == (fault == "never again")


async def test_who_is_to_be_killed_and_has_gone_before_is_said() -> None:
    victim = await asyncio.create_subprocess_exec("true")
    await victim.wait()
    async with SmallServer() as server:
        card = await LiveJudge(server.url, plan=msgspec.structs.replace(PLAN, pids=(victim.pid,))).run()
    assert (card.killed, card.missing, card.passed) == ([], [victim.pid], False)


@pytest.mark.parametrize("pids", ["1", "0", "-5", "x", "12,1", "own", "9" * 25])
def test_what_is_no_process_to_kill_is_refused(pids: str) -> None:
    asked = str(os.getpid()) if pids == "own" else pids
    done = CliRunner().invoke(app, ["drill", "--live", "http://127.0.0.1:9", "--kill", asked])
    assert done.exit_code != 0
    assert "--kill" in done.stderr


async def test_a_stream_that_breaks_before_its_client_would_leave_is_a_broken_one() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nb\r\ndata: {}\n\n\n\r\nff\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        left = await Asker(Http(url), "small", 5.0).leave(Question("so", 8), events=4)
    assert "breaks in the middle" in left.cut


async def test_nobody_there_is_said() -> None:
    with pytest.raises(Unreachable, match="no connection"):
        await LiveJudge("http://127.0.0.1:9").run()


async def test_a_cluster_of_ours_passes_and_its_answers_are_the_same_under_load() -> None:
    with Fleet(prefill=1, decode=1, worker={"device": "paced:zero"}) as fleet:
        card = await LiveJudge(fleet.url, plan=PLAN).run()
    assert card.passed, card
    assert not card.differs, card.differs
    assert card.refused == 0
    assert card.random_alone == 0


@pytest.mark.thorough
async def test_a_cluster_of_ours_whose_worker_and_engine_are_killed_says_nothing_wrong_and_answers_again() -> None:
    with Fleet(prefill=2, decode=2, worker={"device": "paced:zero"}) as fleet:
        pids = fleet.record("decode-0").pid, fleet.record("prefill-0").engine_pid
        card = await LiveJudge(fleet.url, plan=msgspec.structs.replace(PLAN, pids=pids)).run()
    assert sorted(card.killed) == sorted(pids)
    assert card.passed, card
    assert not card.differs, card.differs
