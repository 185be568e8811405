"""Serves a host's cores to workers whose leads are elsewhere: what ``baton ranks`` runs.

Knows nothing of models. Each lead that has the key gets a process of its own (``session.py``), which ends with the
lead's connection; those that run end with this one.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import msgspec

from baton.engine.backends.ranks.hosts.control import (
    MOST_PORT,
    NONCE,
    SAID,
    answer_to_lead,
    read_key,
    refusal,
    require_key,
)
from baton.engine.backends.ranks.hosts.greeting import GreetedPeer, Greeter
from baton.engine.backends.ranks.hosts.messages import SessionSpec
from baton.engine.backends.ranks.hosts.secured import rank_identity
from baton.protos.errors import ConfigError
from baton.tls.identity import TlsFiles

log = logging.getLogger("baton.engine")

LOOK_S = 1.0  # seconds between two looks at sessions that have ended
SESSION = "baton.engine.backends.ranks.hosts.session"


class RankAgent:
    """Takes leads' connections at ``listen`` (host:port, port 0 for any); ``address`` is where. Raises ConfigError.

    ``environment`` is that of sessions; None: this process's. With ``tls`` leads and other hosts' ranks must show a
    worker's certificate. Call ``serve`` from a thread that lives as long as this process, because sessions end with
    the thread that started them.
    """

    def __init__(
        self,
        listen: str,
        key_file: str = "",
        environment: dict[str, str] | None = None,
        tls: TlsFiles | None = None,
    ) -> None:
        self._key, self._environment = read_key(key_file), environment
        self._tls, self._identity = tls, rank_identity(tls, f"the port of `baton ranks` at {listen}")
        host, _, port = listen.rpartition(":")
        if not host or not port.isdecimal() or int(port) > MOST_PORT:
            raise ConfigError(f"--listen {listen}: use host:port", "listen")
        host = host.strip("[]")
        try:
            if tls is None:
                require_key(self._key, socket.gethostbyname(host) if ":" not in host else host)
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.create_server((host, int(port)), family=family)
        except (OSError, ValueError) as error:  # ValueError: neither a name nor an address
            why = error.strerror if isinstance(error, OSError) else None
            raise ConfigError(f"--listen {listen}: {why or error}", "listen") from None
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self._sessions: list[subprocess.Popen[bytes]] = []

    def serve(self, going: Callable[[], bool], grace_s: float = 0.0) -> None:
        """Starts a session for each lead as long as ``going()``; then ends those that are left after ``grace_s``
        seconds, in which their leads may drain.
        """
        try:
            ask = partial(os.urandom, NONCE)
            with Greeter(self._listener, SAID, ask, identity=self._identity) as greeter:
                while going():
                    self._sessions = [session for session in self._sessions if session.poll() is None]
                    for greeted in greeter.poll(LOOK_S):
                        if going():
                            self._answer(greeted)
                        else:
                            greeted.sock.close()
            self._await_sessions(grace_s)
        finally:
            for session in self._sessions:
                session.kill()
                session.wait()

    def _await_sessions(self, grace_s: float) -> None:
        until = time.monotonic() + grace_s
        for session in self._sessions:
            with suppress(subprocess.TimeoutExpired):
                session.wait(max(0.0, until - time.monotonic()))

    def _answer(self, greeted: GreetedPeer) -> None:
        """Starts a session for a lead that has the key."""
        answer = answer_to_lead(self._key, greeted.asked, greeted.said)
        with greeted.sock as sock:
            if answer is None:
                log.warning("refused %s at %s: it %s", greeted.peer, self.address, refusal(greeted.said))
                return
            try:
                sock.sendall(answer)
                self._begin(sock, SessionSpec(greeted.here, greeted.peer, self._tls))
            except OSError as error:  # it is gone, or no process is to be had
                log.warning("no ranks for the lead at %s: %s", greeted.peer, error)
                return
            log.info("ranks for the lead at %s start", greeted.peer)

    def _begin(self, sock: socket.socket, spec: SessionSpec) -> None:
        command = [sys.executable, "-m", SESSION, "--parent", str(os.getpid()), "--fd", str(sock.fileno())]
        command += ["--spec", msgspec.json.encode(spec).decode()]
        self._sessions.append(
            subprocess.Popen(command, pass_fds=[sock.fileno()], stdin=subprocess.DEVNULL, env=self._environment)
        )
