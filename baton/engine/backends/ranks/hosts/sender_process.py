"""Starts the process by which a host of a worker's ranks sends KV out of its own pages.

Knows nothing of handoffs: the process is ``baton.worker.rank_sender``, which the engine doesn't import. It ends
with the process that started it.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import msgspec

from baton.protos.errors import StartupError
from baton.tls.identity import TlsFiles

MODULE = "baton.worker.rank_sender"
PORT = 4  # bytes of the port, in which the process reports that it is ready
TOKEN_BYTES = 64  # bytes of a token at most
START_S = 60.0  # seconds for it to be ready


class SenderSpec(msgspec.Struct, frozen=True):
    """Holds the IP address at which a KV sender listens, and the host's own TLS files."""

    here: str
    tls: TlsFiles | None = None


class SenderProcess:
    """Runs a KV sender over the pages in the memory file ``fd``; ``port`` is its own once it is ready.

    It obeys whoever has ``token``, of at most TOKEN_BYTES bytes, which no command line shows.
    """

    def __init__(self, spec: SenderSpec, token: bytes, fd: int) -> None:
        self.port = 0
        self._socket, theirs = socket.socketpair()
        command = [sys.executable, "-m", MODULE, "--parent", str(os.getpid()), "--fd", str(theirs.fileno())]
        command += ["--spec", msgspec.json.encode(spec).decode()]
        with theirs:
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        self.pidfd = os.pidfd_open(self.process.pid)
        socket.send_fds(self._socket, [token], [fd])

    def await_ready(self) -> None:
        """Waits until the sender listens. Raises StartupError."""
        self._socket.settimeout(START_S)
        try:
            said = self._socket.recv(PORT)
        except OSError:
            said = b""
        if len(said) < PORT:
            raise StartupError("the KV sender of another host of ranks didn't start; see the log of `baton ranks`")
        self.port = int.from_bytes(said, "little")

    def kill(self) -> None:
        """Ends the process at once."""
        self.process.kill()
        self.process.wait()
        os.close(self.pidfd)
        self._socket.close()
