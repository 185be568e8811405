import asyncio
import sys
from pathlib import Path

import pytest

from baton.deploy import children
from baton.deploy.children import Child
from baton.deploy.processes import session_members

FAMILY = "import subprocess, time; subprocess.Popen(['sleep', '60']); time.sleep(60)"


async def test_stopping_a_child_ends_its_whole_session(tmp_path: Path) -> None:
    child = Child([sys.executable, "-c", FAMILY], tmp_path / "log")
    process = await child.start()
    while len(session_members(process.pid)) < 2:
        await asyncio.sleep(0.02)
    await child.stop(1.0)
    assert session_members(process.pid) == []


async def test_a_child_that_ends_is_noted_and_started_again(tmp_path: Path) -> None:
    child, notes, pids = Child(["sh", "-c", "exit 7"], tmp_path / "log"), asyncio.Queue[str](), []

    async def started(process: asyncio.subprocess.Process) -> None:
        pids.append(process.pid)

    keeping = asyncio.create_task(child.keep(notes.put_nowait, started))
    assert [await notes.get(), await notes.get()] == ["ended with code 7"] * 2
    keeping.cancel()
    assert len(set(pids)) >= 2


async def test_a_child_is_started_when_the_machine_can_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child, notes, begun = Child(["sh", "-c", "exit 7"], tmp_path / "log"), asyncio.Queue[str](), asyncio.Event()
    start, tries = Child.start, []

    async def refuses_the_second(self: Child) -> asyncio.subprocess.Process:
        tries.append(self)
        if len(tries) == 2:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return await start(self)

    async def started(process: asyncio.subprocess.Process) -> None:
        if len(tries) == 3:
            begun.set()

    monkeypatch.setattr(Child, "start", refuses_the_second)
    monkeypatch.setattr(children, "BACKOFF_S", (0.01, 0.01))
    keeping = asyncio.create_task(child.keep(notes.put_nowait, started))
    await asyncio.wait_for(begun.wait(), 10)
    assert await notes.get() == "ended with code 7"
    assert "temporarily unavailable" in await notes.get()
    keeping.cancel()


async def test_its_last_words_are_its_error(tmp_path: Path) -> None:
    child = Child(["sh", "-c", "echo noise; echo 'error: no such policy' >&2; exit 1"], tmp_path / "log")
    await (await child.start()).wait()
    assert child.last_words() == f"no such policy (log: {tmp_path / 'log'})"
