"""The process that has a worker's ranks on another host than its lead: starts them, and ends with the lead.

Knows nothing of models or steps. It owns the host's shared memory and KV pages, and takes what ranks of other hosts
write to them. Its ranks are its children; the lead hears of one that is lost.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import select
import socket
import sys
import threading
from collections.abc import Callable

import msgspec

from baton.engine.backends.ranks.followers import Follower, Followers, ending
from baton.engine.backends.ranks.hosts.control import Control
from baton.engine.backends.ranks.hosts.links import HostMemory, LinkServer
from baton.engine.backends.ranks.hosts.messages import (
    FROM_LEAD,
    LEAD_BUILD,
    START,
    FromLead,
    HostDone,
    HostFailed,
    HostLoaded,
    HostLost,
    HostNote,
    HostShare,
    HostStart,
    LeadBuild,
    SessionSpec,
)
from baton.engine.backends.ranks.hosts.secured import rank_identity
from baton.engine.backends.ranks.hosts.sender_process import SenderProcess, SenderSpec
from baton.engine.child import child_arguments
from baton.kernels.abi.build import sources_key
from baton.kernels.collective.native import RankIsLost
from baton.protos.errors import RankLost, StartupError, to_info
from baton.protos.version import product_version
from baton.tls.identity import TlsFiles

LEFT_S = 2.0  # seconds for the lead to read why this host ends


def main() -> int:
    """Runs the ranks of one worker; returns exit status 0 when the lead has ended the connection, else 1."""
    arguments = child_arguments("baton.engine.backends.ranks.hosts.session", "SessionSpec")
    spec = msgspec.json.decode(arguments.spec, type=SessionSpec)
    control = Control(socket.socket(fileno=arguments.fd), spec.here, spec.there)
    end_with_lead(control.sock)
    try:
        said = control.receive_bytes()
        require_same_build(LEAD_BUILD.decode(said))
        start = START.decode(said)
        session = HostSession(start, control, spec.tls)
    except ConnectionError:
        return 0
    except Exception as error:
        control.send(HostFailed(to_info(error)))
        return 1
    try:
        return session.run()
    finally:
        session.close()


def end_with_lead(sock: socket.socket) -> None:
    """Ends this process, and with it its ranks, as soon as the lead ends the connection ``sock``: also while ranks
    load and nobody reads from it.
    """
    threading.Thread(target=_await_end, args=(sock.fileno(),), name="lead", daemon=True).start()


def _await_end(fd: int) -> None:
    poller = select.poll()
    poller.register(fd, select.POLLRDHUP)
    poller.poll()
    os._exit(0)


class HostSession:
    """Runs the ranks that ``start`` names for the lead behind ``control``; ``tls`` is of this host. Raises
    what they can't start for.
    """

    def __init__(self, start: HostStart, control: Control, tls: TlsFiles | None = None) -> None:
        self._start, self._control = start, control
        self._meeting, self._tls = 0, tls
        self._sender: SenderProcess | None = None
        self._server = LinkServer(control.here, rank_identity(tls, "the port of ranks"))
        config = msgspec.structs.replace(start.config, tls=tls)
        self._followers = Followers(config, range(start.first, start.end), hosted=True)
        try:
            fingerprint = self._followers.agreed_fingerprint()
        except BaseException:
            self.close()
            raise
        control.send(HostLoaded(fingerprint, self._server.address[1]))

    def run(self) -> int:
        """Does what the lead says until it ends the connection, or a rank is lost; returns the exit status."""
        poller, of = select.poll(), {follower.pidfd: follower for follower in self._followers.all}
        poller.register(self._control.sock, select.POLLIN)
        for fd in of:
            poller.register(fd, select.POLLIN)
        while True:
            for fd, _ in poller.poll():
                if self._sender is not None and fd == self._sender.pidfd:
                    self._tell_of_sender(self._sender)
                    return 1
                if fd not in of:
                    if not self._hears():
                        return 0
                    if self._sender is not None:
                        poller.register(self._sender.pidfd, select.POLLIN)
                elif of[fd].process.wait() == 0:
                    poller.unregister(fd)  # the lead has told it to leave
                else:
                    self._tell_of(of[fd])
                    return 1

    def close(self) -> None:
        """Ends the ranks and all connections."""
        self._followers.kill()
        if self._sender is not None:
            self._sender.kill()
        self._server.close()

    def _hears(self) -> bool:
        """Does the lead's next message; returns False if there is none any more."""
        try:
            said = self._control.receive(FROM_LEAD)
        except ConnectionError:
            return False
        return self._tried(lambda: self._share(said) if isinstance(said, HostShare) else self._note(said))

    def _tried(self, work: Callable[[], None]) -> bool:
        try:
            work()
            self._control.send(HostDone(0 if self._sender is None else self._sender.port))
        except ConnectionError:
            return False
        except RankLost as error:
            self._control.send(HostLost(error.rank, error.message))
            return False
        except (StartupError, OSError) as error:  # OSError: no memory of that size
            self._control.send(HostFailed(to_info(error)))
            return False
        return True

    def _share(self, said: HostShare) -> None:
        files = [_memory("baton-ranks", said.memory), _memory("baton-kv", said.pages)]
        maps = [mmap.mmap(fd, size, mmap.MAP_SHARED) for fd, size in zip(files, said_sizes(said), strict=True)]
        self._meeting, pages = (ctypes.addressof(ctypes.c_char.from_buffer(each)) for each in maps)
        mapped = HostMemory(self._meeting, said.memory, pages, said.pages, (maps,))
        self._server.start(said.links, self._start.host, mapped)
        for fd, size in zip(files, said_sizes(said), strict=True):
            self._followers.share(fd, size)
        if said.sends:
            spec = SenderSpec(self._control.here, self._tls)
            self._sender = SenderProcess(spec, said.links.token, files[1])
        self._followers.link(said.links)
        self._server.await_all()
        if self._sender is not None:
            self._sender.await_ready()

    def _note(self, said: FromLead) -> None:
        assert isinstance(said, HostNote), "the lead begins once"
        note = self._control.receive_bytes()
        fd = _memory("baton-adapter", len(note))
        try:
            with open(fd, "wb", closefd=False) as file:
                file.write(note)
            self._followers.tell(fd, len(note), self._start.config.rank_bound_s)
        finally:
            os.close(fd)

    def _tell_of_sender(self, gone: SenderProcess) -> None:
        """Says that the host's KV sender has ended, with which the worker ends as with a rank."""
        first = self._start.first
        how = f"the KV sender of rank {first}'s host ended by itself ({ending(gone.process.wait())})"
        self._say_last(HostLost(first, how))

    def _tell_of(self, gone: Follower) -> None:
        """Names the rank that is lost: the one that another one waited for in vain, or else the one that ended."""
        code = ctypes.c_uint32.from_address(self._meeting).value if self._meeting else 0
        lost = RankIsLost(code) if code else None
        how = f"rank {gone.rank} ended by itself ({ending(gone.process.wait())})" if lost is None else str(lost)
        self._say_last(HostLost(gone.rank if lost is None else lost.rank, how))

    def _say_last(self, said: HostLost) -> None:
        try:
            self._control.send(said)
            self._control.sock.shutdown(socket.SHUT_WR)
            select.select([self._control.sock], [], [], LEFT_S)
        except OSError:
            pass  # the lead is gone, too


def require_same_build(lead: LeadBuild) -> None:
    """Checks that the lead's build and its kernels' sources are this host's, because ranks write into one another's
    memory. Raises StartupError.
    """
    ours, theirs = product_version(), lead.version or "of an older version"
    if lead.version == ours and lead.kernels == sources_key():
        return
    what = f"its lead is baton {theirs}"
    if lead.version == ours:
        ours, what = f"{ours} with kernels {sources_key()[:12]}", f"{what} with kernels {lead.kernels[:12]}"
    text = f"the ranks of this host are of another version of Baton than their lead: they are baton {ours}, {what}"
    raise StartupError(f"{text}; install the same build on all hosts of a worker")


def said_sizes(said: HostShare) -> tuple[int, int]:
    """Returns the sizes of the shared memory and of the KV pages, in bytes."""
    return said.memory, said.pages


def _memory(name: str, size: int) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)  # receivers of KV on this host map only such memory
    return fd


if __name__ == "__main__":
    sys.exit(main())
