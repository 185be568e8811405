"""Another host of a worker's ranks: what ``baton ranks`` runs, beside this process on one machine."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from baton.engine.backends.ranks.hosts.agent import RankAgent
from baton.tls.identity import TlsFiles


def children(pid: int) -> list[int]:
    tasks = Path("/proc", str(pid), "task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


@contextmanager
def other_host(log: Path | None = None, **environment: str) -> Iterator[tuple[str, int]]:
    """Runs ``baton ranks`` as a user does, with further ``environment``; yields its address and its process id.
    What it logs goes to ``log``, None: to this process's stderr.
    """
    command = [sys.executable, "-m", "baton", "ranks", "--listen", "127.0.0.1:0"]
    said = nullcontext() if log is None else log.open("w")
    with (
        said as stderr,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=os.environ | environment
        ) as process,
    ):
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[-1], process.pid
        finally:
            process.terminate()
            assert process.wait(30) == 0


@contextmanager
def serving_agent(
    listen: str = "127.0.0.1:0",
    key_file: str = "",
    grace_s: float = 0.0,
    ended: threading.Event | None = None,
    tls: TlsFiles | None = None,
) -> Iterator[RankAgent]:
    """Runs what ``baton ranks`` does on a thread of this process, until ``ended``."""
    agent, ended = RankAgent(listen, key_file, tls=tls), ended or threading.Event()
    thread = threading.Thread(target=agent.serve, args=(lambda: not ended.is_set(), grace_s))
    thread.start()
    try:
        yield agent
    finally:
        ended.set()
        thread.join(60)
        assert not thread.is_alive()
