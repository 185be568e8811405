"""Grammar processes for their user: one is always ready, and any can be killed at once.

Knows nothing of what a grammar means. Safe to use from several threads; nothing here waits for a process.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import socket
import subprocess
import sys
import threading
from collections import OrderedDict, deque
from contextlib import suppress

import msgspec

from baton.grammars.messages import (
    PACKET_BYTES,
    Fork,
    FromChild,
    Kill,
    ProcessEnded,
    ToChild,
    TokenizerFailed,
    TokenizerSpec,
)

log = logging.getLogger("baton.grammars")


class ForkServer:
    """Runs the process that forks grammar processes for one tokenizer; starts it when needed, and again if it
    died.
    """

    def __init__(self, tokenizer: TokenizerSpec) -> None:
        self._tokenizer = tokenizer
        self.bounds = tokenizer.bounds
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._spare: ForkedGrammar | None = None
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._failure = ""

    def warm(self) -> None:
        """Has a grammar process forked ahead, for the next ``child``, unless the machine has none to spare now."""
        with self._lock, suppress(OSError):
            self._fresh_spare()

    def child(self) -> ForkedGrammar:
        """Returns the grammar process that was forked ahead. Raises OSError if the machine has no process or
        descriptor to spare.

        Call ``warm`` after the child has its work, which a fork would delay.
        """
        with self._lock:
            self._fresh_spare()
            child, self._spare = self._spare, None
        assert child is not None
        return child

    def kill(self, number: int) -> None:
        """Kills grammar process ``number`` at once; does nothing if it has ended."""
        with self._lock:
            self._tell(Kill(number))

    def why_none(self) -> str:
        """Returns why there can't be grammar processes; "" if there can."""
        with self._lock:
            self._ended()
            return self._failure

    def close(self) -> None:
        """Ends the forking process; its children end as their users close their sockets."""
        with self._lock:
            if self._spare is not None:
                self._spare.socket.close()
            if self._process is not None:
                self._reap()
            self._spare = self._control = self._process = None

    def _fresh_spare(self) -> None:
        if self._process is None or self._ended():
            self._start()
            self._spare = None
        if self._spare is None or self._spare.gone:
            self._spare = self._fork()

    def _start(self) -> None:
        if self._process is not None:
            log.warning("the process that forks grammar processes ended; it is started again")
            self._reap()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            fd, spec = theirs.fileno(), msgspec.json.encode(self._tokenizer).decode()
            command = [sys.executable, "-m", "baton.grammars.server_main", str(fd), spec]
            self._process = subprocess.Popen(command, pass_fds=[fd], stdin=subprocess.DEVNULL)

    def _reap(self) -> None:
        assert self._process is not None
        assert self._control is not None
        self._control.close()
        self._process.kill()
        self._process.wait()

    def _fork(self) -> ForkedGrammar:
        number = next(self._numbers)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._tell(Fork(number), theirs)
        return ForkedGrammar(self, number, ours)

    def _tell(self, message: Fork | Kill, *beside: socket.socket) -> None:
        if self._control is not None:
            with suppress(OSError):  # it died: whoever waits for a child hears the end of its socket
                fds = [sock.fileno() for sock in beside]
                socket.send_fds(self._control, [msgspec.msgpack.encode(message)], fds)

    def _ended(self) -> bool:
        """Returns whether the process closed its end, after recording what it said as it did."""
        try:
            while self._control is not None and (said := self._control.recv(PACKET_BYTES, socket.MSG_DONTWAIT)):
                self._failure = msgspec.msgpack.decode(said, type=TokenizerFailed).reason
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True


class ForkedGrammar:
    """Talks to one grammar process; ``send`` and ``receive`` never block.

    ``kill`` it, or close ``socket`` to let it end.
    """

    def __init__(self, server: ForkServer, number: int, sock: socket.socket) -> None:
        self._server, self._number, self.socket = server, number, sock
        self.begun = False  # it has answered, so it runs within its bounds
        self.exceeded = False  # it has ended of what it did then: its grammar exceeded the bounds
        self._unsent: deque[bytes] = deque()
        self._decoder = msgspec.msgpack.Decoder(FromChild)
        sock.setblocking(False)

    def send(self, message: ToChild) -> None:
        """Queues ``message`` and sends what the socket takes now."""
        self._unsent.append(msgspec.msgpack.encode(message))
        self.flush()

    def flush(self) -> None:
        """Sends queued messages, as far as the socket takes them now."""
        try:
            while self._unsent:
                self.socket.send(self._unsent[0])
                self._unsent.popleft()
        except BlockingIOError:
            pass
        except OSError:  # the reader learns of it as the end
            self._unsent.clear()

    def receive(self) -> FromChild | None:
        """Returns the next answer; None if there is none yet. Raises EOFError if the process has ended."""
        self.flush()
        try:
            packet = self.socket.recv(PACKET_BYTES)
        except BlockingIOError:
            return None
        except ConnectionResetError:  # it left something unread; what it said before comes after this
            packet = self.socket.recv(PACKET_BYTES)
        except OSError:
            packet = b""
        if not packet:
            raise EOFError("the grammar's process has ended")
        message = self._decoder.decode(packet)
        if isinstance(message, ProcessEnded):
            self.exceeded = self.begun and message.by_itself
            raise EOFError("the grammar's process has ended")
        self.begun = True
        return message

    @property
    def gone(self) -> bool:
        """Returns whether the process has ended; only for one that hasn't been sent anything."""
        try:
            while self.receive() is not None:  # it says only that it is ready
                pass
        except EOFError:
            return True
        return False

    def kill(self) -> None:
        """Kills the process at once and closes its socket."""
        self._server.kill(self._number)
        self.socket.close()


_SERVERS: OrderedDict[TokenizerSpec, ForkServer] = OrderedDict()
_SERVERS_LOCK = threading.Lock()
MOST_SERVERS = 4  # of a process; an engine and a router need one


def server_for(tokenizer: TokenizerSpec) -> ForkServer:
    """Returns this process's one server for ``tokenizer``, which ends with this process.

    Beyond MOST_SERVERS the least recently asked for is closed; its holders may go on using it.
    """
    with _SERVERS_LOCK:
        if tokenizer not in _SERVERS:
            _SERVERS[tokenizer] = ForkServer(tokenizer)
            atexit.register(_SERVERS[tokenizer].close)
        _SERVERS.move_to_end(tokenizer)
        if len(_SERVERS) > MOST_SERVERS:
            _, eldest = _SERVERS.popitem(last=False)
            eldest.close()
        return _SERVERS[tokenizer]
