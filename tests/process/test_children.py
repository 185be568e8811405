import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from baton.process import children
from baton.process.children import ChildProcess
from baton.process.processes import session_members

FAMILY = "import subprocess, time; subprocess.Popen(['sleep', '60']); time.sleep(60)"
HEIR = "from subprocess import Popen; print(Popen(['sleep', '30'], start_new_session=True).pid, flush=True)"
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
REST = "time.sleep(60)"


@asynccontextmanager
async def with_heir(process: asyncio.subprocess.Process) -> AsyncIterator[asyncio.subprocess.Process]:
    """Yields the process for 30 s at most, then kills the heir whose pid it prints first, which closes the
    pipes.
    """
    assert process.stdout is not None
    heir = int(await process.stdout.readline())
    try:
        async with asyncio.timeout(30):
            yield process
    finally:
        os.kill(heir, signal.SIGKILL)
        await process.stdout.read()


async def test_stopping_a_child_ends_its_whole_session(tmp_path: Path) -> None:
    child = ChildProcess([sys.executable, "-c", FAMILY], tmp_path / "log")
    process = await child.start()
    while len(session_members(process.pid)) < 2:
        await asyncio.sleep(0.02)
    await child.stop(1.0)
    assert session_members(process.pid) == []


async def test_a_killed_child_is_over_although_another_session_has_its_pipes(tmp_path: Path) -> None:
    child = ChildProcess([sys.executable, "-c", f"{DEAF}; {HEIR}; {REST}"], tmp_path / "log", True)
    async with with_heir(await child.start()) as process:
        await child.stop(0.1)
    assert process.returncode == -signal.SIGKILL


async def test_an_ended_child_is_noted_although_another_session_has_its_pipes(tmp_path: Path) -> None:
    child, notes = (
        ChildProcess([sys.executable, "-c", f"{HEIR}; exit(7)"], tmp_path / "log", True),
        asyncio.Queue[str](),
    )

    async def started(_: asyncio.subprocess.Process) -> None:
        await asyncio.sleep(0)

    async with with_heir(await child.start()):
        keeping = asyncio.create_task(child.keep(notes.put_nowait, started))
        assert await notes.get() == "ended with code 7"
        keeping.cancel()


async def test_a_child_that_ends_is_noted_and_started_again(tmp_path: Path) -> None:
    child, notes, pids = ChildProcess(["sh", "-c", "exit 7"], tmp_path / "log"), asyncio.Queue[str](), []

    async def started(process: asyncio.subprocess.Process) -> None:
        pids.append(process.pid)

    keeping = asyncio.create_task(child.keep(notes.put_nowait, started))
    assert [await notes.get(), await notes.get()] == ["ended with code 7"] * 2
    keeping.cancel()
    assert len(set(pids)) >= 2


async def test_a_child_is_started_when_the_machine_can_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child, notes, begun = (
        ChildProcess(["sh", "-c", "exit 7"], tmp_path / "log"),
        asyncio.Queue[str](),
        asyncio.Event(),
    )
    start, tries = ChildProcess.start, []

    async def refuses_the_second(self: ChildProcess) -> asyncio.subprocess.Process:
        tries.append(self)
        if len(tries) == 2:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return await start(self)

    async def started(process: asyncio.subprocess.Process) -> None:
        if len(tries) == 3:
            begun.set()

    monkeypatch.setattr(ChildProcess, "start", refuses_the_second)
    monkeypatch.setattr(children, "BACKOFF_S", (0.01, 0.01))
    keeping = asyncio.create_task(child.keep(notes.put_nowait, started))
    await asyncio.wait_for(begun.wait(), 30)
    assert await notes.get() == "ended with code 7"
    assert "temporarily unavailable" in await notes.get()
    keeping.cancel()


async def test_its_last_words_are_its_error(tmp_path: Path) -> None:
    child = ChildProcess(["sh", "-c", "echo noise; echo 'error: no such policy' >&2; exit 1"], tmp_path / "log")
    await (await child.start()).wait()
    assert child.last_words() == f"no such policy (log: {tmp_path / 'log'})"


def test_of_a_long_log_only_the_end_is_read(tmp_path: Path) -> None:
    child = ChildProcess(["none"], tmp_path / "log")
    with child.log.open("wb") as log:
        log.truncate(1 << 33)  # a file of holes: 8 GiB to whoever reads them
        log.seek(0, os.SEEK_END)
        log.write(b"\nerror: \xff no such policy\n")
    assert child.last_words() == f"\ufffd no such policy (log: {child.log})"
