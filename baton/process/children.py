"""One child process of the local cluster: started, watched, restarted, ended.

Knows nothing of what it runs. It leads its own session (Ctrl-C reaches only this process) and dies with this
process.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import baton
from baton.process.processes import die_with_parent, kill_session

BACKOFF_S = (0.1, 0.5, 1.0, 2.0, 5.0)  # seconds before each new start: what dies at once must not cost a core
HEALTHY_S = 10.0  # seconds of life after which the next death counts as a first one again
LOOK_S = 0.5  # how late, at most, the end of a process is seen whose pipes others have
OnStart = Callable[[asyncio.subprocess.Process], Awaitable[None]]


class ChildProcess:
    """Runs a command as a child, with its output in the file ``log``.

    ``start`` it from the main thread: it dies with the thread that started it. With ``pipes``, its stdin and stdout
    are pipes of this process.
    """

    def __init__(self, command: Sequence[str], log: Path, pipes: bool = False) -> None:
        self._command, self.log, self._pipes = list(command), log, pipes
        self.process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """Returns the pid of the process started last; None before the first start."""
        return self.process.pid if self.process else None

    async def start(self) -> asyncio.subprocess.Process:
        """Starts the process, also again, and returns it. Raises OSError."""
        pipe = asyncio.subprocess.PIPE if self._pipes else asyncio.subprocess.DEVNULL
        with _appended(self.log) as log:
            self.process = await asyncio.create_subprocess_exec(
                *self._command, stdin=pipe, stdout=pipe if self._pipes else log, stderr=log,
                env=child_environment(), start_new_session=True, preexec_fn=die_with_parent,
            )  # fmt: skip
        return self.process

    async def keep(self, note: Callable[[str], None], started: OnStart) -> None:
        """Restarts the process whenever it ends, until cancelled.

        ``started`` is awaited with each new process; ``note`` is called with a text about each end.
        """
        deaths, now = 0, asyncio.get_running_loop().time
        process = self.process or await self.start()
        while True:
            since = now()
            await started(process)
            code = await _ended(process)
            kill_session(process.pid)
            note(f"ended with code {code}")
            deaths = 0 if now() - since > HEALTHY_S else deaths
            await asyncio.sleep(BACKOFF_S[min(deaths, len(BACKOFF_S) - 1)])
            deaths += 1
            process = await self._start_again(note)

    async def _start_again(self, note: Callable[[str], None]) -> asyncio.subprocess.Process:
        """Starts the process again and again until it works: a machine without memory to give now may have some
        soon.
        """
        while True:
            try:
                return await self.start()
            except OSError as error:
                note(f"can't be started: {error}")
                await asyncio.sleep(BACKOFF_S[-2])

    async def stop(self, grace_s: float) -> None:
        """Sends SIGTERM, and after ``grace_s`` seconds SIGKILL to what is left of the process's session; waits for
        its end.
        """
        if self.process is None:
            return
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        with suppress(TimeoutError):
            await asyncio.wait_for(_ended(self.process), grace_s)
        kill_session(self.process.pid)
        await _ended(self.process)

    def last_words(self, size: int = 800) -> str:
        """Returns the log's last ``size`` bytes, or what follows "error: " in them, and its path."""
        text = _end_of(self.log, size).strip()
        return f"{text.rpartition('error: ')[2] or 'it printed nothing'} (log: {self.log})"


async def _ended(process: asyncio.subprocess.Process) -> int:
    """Waits for the exit code of ``process``; ``wait`` alone also waits for its pipes, which heirs may hold."""
    while process.returncode is None:
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), LOOK_S)
    return process.returncode


def _appended(log: Path) -> BinaryIO:
    return log.open("ab")


def _end_of(log: Path, size: int) -> str:
    """Returns the last ``size`` bytes of a file, however long it is, as text; empty if there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - size))
            return file.read(size).decode(errors="replace")
    except OSError:
        return ""


def python(*arguments: str) -> list[str]:
    """Returns the command line by which this interpreter runs a module: ``python("baton.x", "--flag")``."""
    return [sys.executable, "-m", *arguments]


def child_environment() -> dict[str, str]:
    """Returns the environment of this process, extended so that a child can import this package."""
    root = str(Path(baton.__file__).resolve().parents[1])
    path = [root, *(p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and p != root)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1"}
