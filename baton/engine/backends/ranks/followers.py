"""Starts the processes of a worker's other ranks, gives them what they share, and watches that they live.

Knows nothing of models or steps. A follower hears over its own socket: the ranks' memory, then the KV pages; it
says once that it is ready, or why not. It ends with the process that started it.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

import msgspec

from baton.engine.load import EngineConfig
from baton.kernels.collective.native import lose
from baton.protos.errors import ErrorInfo, RankLost, StartupError, from_info

log = logging.getLogger("baton.engine")

MOST_WORDS = 1 << 16  # bytes of what a follower says at its start
HEARD = b"1"  # what a follower answers
LEAVE_S = 1.0  # seconds for a follower to leave when told to


class RankSpec(msgspec.Struct, frozen=True):
    """Says which rank a follower is, and of what."""

    config: EngineConfig
    index: int


class RankReady(msgspec.Struct, frozen=True):
    """Is what a follower says once it has its weights; ``error`` says why it has not."""

    fingerprint: str = ""
    error: ErrorInfo | None = None


class Follower:
    """Is one rank's process. Start it from the main thread, because it dies with the thread that started it."""

    def __init__(self, spec: RankSpec) -> None:
        self.rank = spec.index
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "baton.engine.backends.ranks.main", "--parent", str(os.getpid())]
        command += ["--fd", str(theirs.fileno()), "--spec", msgspec.json.encode(spec).decode()]
        with theirs:
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        self.pidfd = os.pidfd_open(self.process.pid)

    def await_ready(self) -> RankReady:
        """Returns what the follower has loaded. Raises its own error, or StartupError where it died."""
        said = self._socket.recv(MOST_WORDS)
        if not said:
            code = self.process.wait()
            raise StartupError(f"rank {self.rank} died at start (exit status {code}); see the worker's log")
        ready = msgspec.json.decode(said, type=RankReady)
        if ready.error is not None:
            raise from_info(ready.error)
        return ready

    def give(self, fd: int, size: int) -> None:
        """Sends a descriptor of shared memory and its size."""
        socket.send_fds(self._socket, [size.to_bytes(8, "little")], [fd])

    def tell(self, fd: int, size: int, patience_s: float) -> None:
        """Sends a descriptor and returns when it was taken. Raises RankLost."""
        self._socket.settimeout(patience_s or None)
        try:
            self.give(fd, size)
            heard = self._socket.recv(len(HEARD))
        except TimeoutError:
            raise RankLost(f"rank {self.rank} is stuck: it doesn't take what it is told", rank=self.rank) from None
        except ConnectionError:
            heard = b""
        if not heard:
            raise RankLost(f"rank {self.rank} is gone", rank=self.rank)

    def end(self, patience_s: float) -> None:
        """Waits ``patience_s`` seconds for the process to be gone, then ends it, and closes what led to it."""
        self._socket.close()
        try:
            self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Followers:
    """Owns all ranks but the lead's own. ``meeting``: where the ranks meet, once that is known."""

    def __init__(self, config: EngineConfig) -> None:
        self._leaving = False
        self._lost: Callable[[RankLost], None] = lambda error: None
        self._all: list[Follower] = []
        try:
            for index in range(1, config.widths.count):
                self._all.append(Follower(RankSpec(config, index)))
        except BaseException:
            self.kill()
            raise

    def await_ready(self, fingerprint: str) -> None:
        """Returns when all have their weights, of the checkpoint that the lead has. Raises StartupError."""
        for follower in self._all:
            if (theirs := follower.await_ready().fingerprint) != fingerprint:
                raise StartupError(f"rank {follower.rank} read another checkpoint ({theirs[:12]}); start again")

    def share(self, fd: int, size: int) -> None:
        """Gives every follower a piece of shared memory."""
        for follower in self._all:
            with suppress(ConnectionError):  # whoever died is heard of by the watch
                follower.give(fd, size)

    def tell(self, fd: int, size: int, patience_s: float) -> None:
        """Gives all followers, which were called, what is at ``fd``; returns when they have it. Raises RankLost."""
        for follower in self._all:
            follower.tell(fd, size, patience_s)

    def watch(self, meeting: int, lost: Callable[[RankLost], None]) -> None:
        """Tells the meeting and ``lost`` of a rank whose process ends, unless it was told to."""
        threading.Thread(target=self._watch, args=(meeting, lost), name="ranks", daemon=True).start()

    def _watch(self, meeting: int, lost: Callable[[RankLost], None]) -> None:
        poller = select.poll()
        of = {follower.pidfd: follower for follower in self._all}
        for fd in of:
            poller.register(fd, select.POLLIN)
        gone = of[poller.poll()[0][0]]
        if self._leaving:
            return
        lose(meeting, gone.rank)
        code = gone.process.wait()
        lost(RankLost(f"rank {gone.rank} of {len(of) + 1} ended by itself ({ending(code)})", rank=gone.rank))

    def pids(self) -> list[int]:
        """Returns the followers' process ids, by rank from 1 on."""
        return [follower.process.pid for follower in self._all]

    def leave(self, tell: Callable[[], None]) -> None:
        """Tells the followers to leave by ``tell`` and ends those that don't; none of them counts as lost."""
        self._leaving = True
        tell()
        for follower in self._all:
            follower.end(LEAVE_S)

    def kill(self) -> None:
        """Ends all of them now."""
        self._leaving = True
        for follower in self._all:
            follower.process.kill()
            follower.end(LEAVE_S)


def ending(code: int) -> str:
    """Returns how a process with return code ``code`` ended, in words."""
    return f"signal {-code}" if code < 0 else f"exit status {code}"
