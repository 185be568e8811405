"""Runs ``controller.dial`` as a process beside the router at most every few seconds, and keeps its last answer.

Knows nothing of what is asked. A simulation holds a core for seconds, which a router's event loop must not.
"""

from __future__ import annotations

import asyncio
import logging
import subprocess

import msgspec

from baton.controller.dial import LEAST_REQUESTS, DialAnswer, DialQuestion
from baton.process.children import child_environment, python

log = logging.getLogger("baton.controller")

TIMEOUT_S = 300.0  # for one simulation of every ratio: seconds where cores are free, minutes beside busy workers


class Dial:
    """Keeps the last simulation's ``answer``; ``ask`` starts another if the last began ``every_s`` seconds ago.

    0: never.
    """

    def __init__(self, every_s: float) -> None:
        self.answer: DialAnswer | None = None
        self._every_s = every_s
        self._asked_at = float("-inf")
        self._task: asyncio.Task[None] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def is_due(self, now: float) -> bool:
        """Returns whether another simulation may begin: none runs, and the last began long before ``now``."""
        early = 0 <= now - self._asked_at < self._every_s  # a clock may be set back
        runs = self._task is not None and not self._task.done()
        return bool(self._every_s) and not early and not runs

    def ask(self, asked: DialQuestion, now: float) -> None:
        """Starts a simulation if one is due and there are enough requests; ``now`` is in seconds."""
        if self.is_due(now) and len(asked.served) >= LEAST_REQUESTS:
            self._asked_at = now
            self._task = asyncio.create_task(self._simulate(asked), name="ratio dial")

    async def close(self) -> None:
        """Kills the simulation that runs, if there is one."""
        if self._task is not None:
            if self._process is not None:
                self._process.kill()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _simulate(self, asked: DialQuestion) -> None:
        try:
            said = await asyncio.to_thread(self._answered, msgspec.json.encode(asked))
            self.answer = msgspec.json.decode(said, type=DialAnswer | None)
        except (subprocess.TimeoutExpired, msgspec.MsgspecError, OSError) as error:
            log.warning("the ratio dial could not be simulated: %r", error)

    def _answered(self, question: bytes) -> bytes:
        """Runs the simulation's process from a thread, by vfork, because the event loop's own way would fork a
        process with gRPC's threads.
        """
        command, pipe, quiet = python("baton.controller.dial"), subprocess.PIPE, subprocess.DEVNULL
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=quiet, env=child_environment()) as process:
            self._process = process
            try:
                return process.communicate(question, TIMEOUT_S)[0]
            finally:
                process.kill()
