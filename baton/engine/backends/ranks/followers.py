"""Starts the processes of a worker's other ranks, passes them shared memory, and watches whether they run.

Knows nothing of models or steps. A follower gets descriptors over its own socket, of the ranks' memory, then of the
KV pages; it reports once that it is ready, or why not. It ends with the process that started it.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from baton.engine.backends.cuda.card_locks import TakenCard
from baton.engine.backends.ranks.link_plan import LINK_S, LinkPlan
from baton.engine.config import EngineConfig
from baton.kernels.collective.native import lose
from baton.protos.errors import ErrorInfo, RankLost, StartupError, from_info

log = logging.getLogger("baton.engine")

MOST_WORDS = 1 << 16  # bytes of a follower's report at its start
HEARD = b"1"  # a follower's acknowledgement
LOST_STATUS = 75  # exit status of a follower if another rank is gone; the lead reports which
LEAVE_S = 1.0  # seconds for a follower to leave when told to


class RankSpec(msgspec.Struct, frozen=True):
    """The configuration and the rank of a follower process; ``hosted`` says that it must connect to other hosts.
    ``cards`` are the indices of all ranks' cards, by rank.
    """

    config: EngineConfig
    index: int
    hosted: bool = False
    cards: tuple[int, ...] = ()


class RankReady(msgspec.Struct, frozen=True):
    """A follower's report once it has loaded its weights, with the checkpoint's fingerprint; ``error`` says why it
    couldn't. ``room`` is the handle of a card's room, by which the others write to it.
    """

    fingerprint: str = ""
    error: ErrorInfo | None = None
    room: bytes = b""


class RoomPlan(msgspec.Struct, frozen=True):
    """The handles of all ranks' rooms on their cards, by rank."""

    handles: tuple[bytes, ...]


class Follower:
    """The process of one rank, which inherits the descriptors ``kept``. Start it from the main thread, because it
    ends with the thread that started it.
    """

    def __init__(self, spec: RankSpec, kept: Sequence[int] = ()) -> None:
        self.rank = spec.index
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "baton.engine.backends.ranks.main", "--parent", str(os.getpid())]
        command += ["--fd", str(theirs.fileno()), "--spec", msgspec.json.encode(spec).decode()]
        with theirs:
            self.process = self.spawn(command, [theirs.fileno(), *kept])
        self.pidfd = os.pidfd_open(self.process.pid)

    @staticmethod
    def spawn(command: Sequence[str], fds: Sequence[int]) -> subprocess.Popen[bytes]:
        """Starts ``command``, which inherits the descriptors ``fds`` under their numbers."""
        return subprocess.Popen(command, pass_fds=fds, stdin=subprocess.DEVNULL)

    def await_ready(self) -> RankReady:
        """Waits for the follower's report and returns it. Raises its own error, or StartupError if it died."""
        self._socket.settimeout(None)
        try:
            said = self._socket.recv(MOST_WORDS)
        except ConnectionError:
            said = b""
        if not said:
            code = self.process.wait()
            raise StartupError(f"rank {self.rank} died at start (exit status {code}); see the worker's log")
        ready = msgspec.json.decode(said, type=RankReady)
        if ready.error is not None:
            raise from_info(ready.error)
        return ready

    def give(self, fd: int, size: int) -> None:
        """Sends the descriptor ``fd`` of shared memory and its size in bytes."""
        socket.send_fds(self._socket, [size.to_bytes(8, "little")], [fd])

    def begin_tell(self, fd: int, size: int) -> None:
        """Sends a descriptor and its size, which the follower uses by and by (``await_heard``). Raises RankLost, as
        for want of memory or descriptors.
        """
        try:
            self.give(fd, size)
        except ConnectionError:
            pass  # whoever died is heard of by ``await_heard``
        except OSError as error:
            raise self._untold(error) from error

    def await_heard(self, patience_s: float) -> None:
        """Returns when the follower has used what ``begin_tell`` sent. Raises RankLost, also after ``patience_s``
        seconds (0: no limit).
        """
        self._socket.settimeout(patience_s or None)
        try:
            heard = self._socket.recv(len(HEARD))
        except TimeoutError:
            raise RankLost(f"rank {self.rank} is stuck: it doesn't take what it is told", rank=self.rank) from None
        except ConnectionError:
            heard = b""
        except OSError as error:
            raise self._untold(error) from error
        if not heard:
            raise RankLost(f"rank {self.rank} is gone", rank=self.rank)

    def _untold(self, error: OSError) -> RankLost:
        return RankLost(f"rank {self.rank} can't be told what it waits for: {error}", rank=self.rank)

    def begin_link(self, plan: LinkPlan | RoomPlan) -> None:
        """Has the follower connect to other hosts, or open the rooms of other cards, as ``plan`` says."""
        with suppress(ConnectionError):  # whoever died is heard of by ``await_linked``
            self._socket.send(msgspec.json.encode(plan))

    def await_linked(self) -> None:
        """Returns when the follower is connected. Raises StartupError."""
        self._socket.settimeout(LINK_S)
        try:
            heard = self._socket.recv(len(HEARD))
        except OSError:
            heard = b""
        if not heard:
            raise StartupError(f"rank {self.rank} couldn't connect to the other ranks; see the worker's log")

    def end(self, patience_s: float) -> None:
        """Waits up to ``patience_s`` seconds for the process to end, then kills it; closes its socket."""
        self._socket.close()
        try:
            self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Followers:
    """The processes of a host's ranks except the lead's own: ``ranks``, or all of a worker's.

    ``hosted`` says that the worker has ranks on other hosts too. Those on ``cards``, which are given by rank, each
    hold their own for as long as they run.
    """

    def __init__(
        self,
        config: EngineConfig,
        ranks: range | None = None,
        hosted: bool = False,
        cards: Sequence[TakenCard] = (),
    ) -> None:
        self._leaving = False
        self._all: list[Follower] = []
        self._count = config.widths.count
        try:
            for index in range(1, self._count) if ranks is None else ranks:
                spec = RankSpec(config, index, hosted, tuple(card.index for card in cards))
                self._all.append(Follower(spec, [cards[index].fd] if cards else []))
        except BaseException:
            self.kill()
            raise

    def await_ready(self, fingerprint: str) -> list[bytes]:
        """Returns the handles of the followers' rooms when all have loaded their weights. Raises StartupError
        unless their fingerprint is ``fingerprint``, the lead's.
        """
        rooms = []
        for follower in self._all:
            ready = follower.await_ready()
            if ready.fingerprint != fingerprint:
                text = f"rank {follower.rank} read another checkpoint ({ready.fingerprint[:12]}); start again"
                raise StartupError(text)
            rooms.append(ready.room)
        return rooms

    @property
    def all(self) -> tuple[Follower, ...]:
        """Returns the followers, by rank."""
        return tuple(self._all)

    def agreed_fingerprint(self) -> str:
        """Returns the fingerprint of the weights that all have loaded. Raises StartupError if they differ."""
        fingerprint = self._all[0].await_ready().fingerprint
        for follower in self._all[1:]:
            if follower.await_ready().fingerprint != fingerprint:
                raise StartupError(f"rank {follower.rank} read another checkpoint than its neighbours; start again")
        return fingerprint

    def link(self, plan: LinkPlan | RoomPlan) -> None:
        """Has all followers connect to the other ranks, and returns when they are. Raises StartupError."""
        for follower in self._all:
            follower.begin_link(plan)
        for follower in self._all:
            follower.await_linked()

    def share(self, fd: int, size: int) -> None:
        """Sends every follower the descriptor ``fd`` of shared memory and its size in bytes."""
        for follower in self._all:
            with suppress(ConnectionError):  # whoever died is heard of by the watch
                follower.give(fd, size)

    def tell(self, fd: int, size: int, patience_s: float) -> None:
        """Sends the descriptor ``fd`` and its size to all followers, which must be listening; returns when they
        have used it. Raises RankLost.
        """
        for follower in self._all:
            follower.begin_tell(fd, size)
        for follower in self._all:
            follower.await_heard(patience_s)

    def watch(self, meeting: int, lost: Callable[[RankLost], None]) -> None:
        """Starts a thread that, if a rank's process ends unexpectedly, unblocks the ranks meeting at address
        ``meeting`` and calls ``lost``.
        """
        if not self._all:
            return
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
        lost(RankLost(f"rank {gone.rank} of {self._count} ended by itself ({ending(code)})", rank=gone.rank))

    def pids(self) -> list[int]:
        """Returns the followers' process ids, by rank from 1 on."""
        return [follower.process.pid for follower in self._all]

    def leave(self, tell: Callable[[], None]) -> None:
        """Ends the followers: ``tell`` asks them to leave, those that don't are killed; none counts as lost."""
        self._leaving = True
        tell()
        for follower in self._all:
            follower.end(LEAVE_S)

    def kill(self) -> None:
        """Kills all followers at once; none counts as lost."""
        self._leaving = True
        for follower in self._all:
            follower.process.kill()
            follower.end(LEAVE_S)


def ending(code: int) -> str:
    """Returns in words how a process with return code ``code`` ended: a signal or an exit status."""
    return f"signal {-code}" if code < 0 else f"exit status {code}"
