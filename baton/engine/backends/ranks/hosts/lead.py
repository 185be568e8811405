"""Leads the ranks of a worker that run on other hosts: starts them, passes notes on, hears of those that are lost.

Knows nothing of models or steps. A host that goes away is a lost rank, its first one.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, Queue

import msgspec

from baton.engine.backends.ranks.followers import Followers
from baton.engine.backends.ranks.hosts.control import dial, read_key
from baton.engine.backends.ranks.hosts.layout import FIELD, hosts_of_ranks, ranks_on
from baton.engine.backends.ranks.hosts.links import TOKEN, HostMemory, Links, LinkServer
from baton.engine.backends.ranks.hosts.messages import (
    FROM_HOST,
    FromHost,
    HostDone,
    HostFailed,
    HostLoaded,
    HostLost,
    HostNote,
    HostShare,
    HostStart,
)
from baton.engine.backends.ranks.hosts.parts import parts_of_hosts, parts_read, parts_received
from baton.engine.backends.ranks.hosts.secured import rank_identity
from baton.engine.backends.ranks.link_plan import LinkPlan
from baton.engine.config import EngineConfig
from baton.engine.program.program import Program
from baton.kernels.abi.build import sources_key
from baton.kernels.collective.native import lose
from baton.kv.layout.extents import Part
from baton.protos.channel import HostSender
from baton.protos.errors import RankLost, StartupError, from_info
from baton.protos.nouns import KvLayout
from baton.protos.version import product_version
from baton.tls.identity import Identity

# Seconds in which another host must have loaded its ranks' weights once the lead has its own: 1 TB at 0.6 GB/s. Its
# machine may stand still with its connection open, as where a network file system does, and nobody would know.
LOADED_S = 1800.0
DONE_S = 300.0  # seconds in which it must have mapped its memory and started what it was told to
LEAVE_S = 2.0  # seconds for other hosts' ranks to leave when told to


class RemoteHost:
    """Is one other host, ``number``, at ``address``, with the ranks ``ranks``."""

    def __init__(
        self, config: EngineConfig, number: int, address: str, key: bytes, identity: Identity | None = None
    ) -> None:
        self.number, self.address, self.ranks = number, address, ranks_on(config.widths.count, config.hosts, number)
        self.control = dial(address, key, FIELD, config.rank_wait_s, identity)
        own = msgspec.structs.replace(config, rank_key_file="", tls=None)  # these files are of this host
        try:
            build = sources_key(), product_version()
            self.tell(HostStart(own, number, self.ranks.start, self.ranks.stop, *build))
        except StartupError:
            self.control.close()
            raise

    def tell(self, said: HostStart | HostShare) -> None:
        """Sends ``said`` to the host. Raises StartupError if it is gone."""
        try:
            self.control.send(said)
        except OSError as error:
            raise self._gone(error) from None

    def await_loaded(self) -> HostLoaded:
        """Returns the host's report that its ranks have loaded their weights. Raises their error."""
        found = self._said(LOADED_S, "to load its ranks' weights")
        assert isinstance(found, HostLoaded), found
        return found

    def await_done(self) -> int:
        """Returns, when the host has done what it was told, the port of its KV sender, 0 for none. Raises its
        error.
        """
        found = self._said(DONE_S, "to map its memory")
        assert isinstance(found, HostDone), found
        return found.port

    def _said(self, limit_s: float, do: str) -> HostLoaded | HostDone:
        """Returns what the host says next, within ``limit_s`` seconds. Raises its error, and StartupError."""
        self.control.sock.settimeout(limit_s)
        try:
            found = self.control.receive(FROM_HOST)
        except OSError as error:
            if isinstance(error, TimeoutError) and error.errno is None:  # else of a peer that is gone
                raise self._silent(limit_s, do) from None
            raise self._gone(error) from None
        finally:
            with suppress(OSError):  # closed meanwhile
                self.control.sock.settimeout(None)
        if isinstance(found, HostFailed):
            text = f"{FIELD} {self.address}: {found.error.message}"
            raise from_info(msgspec.structs.replace(found.error, message=text))
        if isinstance(found, HostLost):
            raise self._gone(found.how)
        return found

    def _silent(self, limit_s: float, do: str) -> StartupError:
        text = f"{FIELD}: the ranks at {self.address} took longer than {limit_s:g} s {do}"
        text = f"{text}; see the log of `baton ranks` there, and whether its machine or its files stand still"
        return StartupError(text, FIELD)

    def _gone(self, why: object) -> StartupError:
        return StartupError(f"{FIELD}: the ranks at {self.address} are gone: {why}", FIELD)


class LeadHosts:
    """Is all other hosts of a worker. Starts their ranks at once; raises ConfigError and StartupError."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._links: Links | None = None
        self._server: LinkServer | None = None
        self._leaving = False
        self._lost: Callable[[RankLost], None] | None = None
        self._found: RankLost | None = None
        self.senders: tuple[HostSender, ...] = ()  # which host sends what of a KV page; () if the lead's sends all
        self.receivers: tuple[HostSender, ...] = ()  # which host receives what; () if the lead's receives all
        self._lock = threading.Lock()
        self._done = Queue[RemoteHost]()
        self._meeting = 0
        self._all: list[RemoteHost] = []
        key = read_key(config.rank_key_file)
        self._identity = rank_identity(config.tls, "the port of ranks")
        try:
            for number, address in enumerate(config.rank_hosts, 1):
                self._all.append(RemoteHost(config, number, address, key, self._identity))
        except BaseException:
            self.leave()
            raise

    def await_ready(self, fingerprint: str) -> None:
        """Returns when all ranks have loaded their weights. Raises StartupError unless they are ``fingerprint``'s,
        the lead's.
        """
        self._ports = [host.await_loaded() for host in self._all]
        for host, said in zip(self._all, self._ports, strict=True):
            if said.fingerprint != fingerprint:
                text = f"the ranks at {host.address} read another checkpoint ({said.fingerprint[:12]})"
                raise StartupError(f"{text}; put the same files there")

    def connect(
        self, mapped: HostMemory, followers: Followers, program: Program, layout: KvLayout | None = None
    ) -> Links:
        """Has all hosts make memory like ``mapped``, the lead's, and connects all ranks, ``followers`` on this host
        among them; returns the lead's connections. Raises StartupError.

        Hosts that have a part of their own of each page of ``layout``, or read one, get a process that sends it, or
        receives it: ``senders`` and ``receivers``.
        """
        self._meeting = mapped.memory
        self._server = server = LinkServer(self._all[0].control.here, self._identity)
        plan, config = self._plan(server), self._config
        parts = () if layout is None else parts_of_hosts(program, config.widths, config.hosts, layout)
        reads = () if layout is None else parts_received(program, config.widths, config.hosts, layout)
        server.start(plan, 0, mapped)
        for host in self._all:
            ships = bool(parts and parts[host.number]) or bool(reads)
            host.tell(HostShare(mapped.memory_bytes, mapped.page_bytes, plan, ships))
        memory = mapped.memory, mapped.pages
        links = self._links = Links(plan, 0, *memory, config.rank_bound_s, self._identity)
        followers.link(plan)
        ports = [host.await_done() for host in self._all]
        self.senders, self.receivers = (self._shipping(each, ports, plan.token) for each in (parts, reads))
        server.await_all()
        for host in self._all:
            threading.Thread(target=self._hear, args=(host,), name="rank host", daemon=True).start()
        return links

    def _shipping(self, parts: Sequence[Part], ports: Sequence[int], token: bytes) -> tuple[HostSender, ...]:
        """Returns the hosts that send or receive ``parts``, the lead's first; () if there are none."""
        others = zip(self._all, ports, parts[1:], strict=bool(parts))
        far = [HostSender(_address(host, port), token, part, host.address) for host, port, part in others if part]
        return (HostSender("", b"", parts[0]), *far) if parts else ()

    def parts_read(self, program: Program, layout: KvLayout) -> tuple[Part, ...]:
        """Returns the part of a page of ``layout`` that each host's ranks read, the lead's host first."""
        return parts_read(program, self._config.widths, self._config.hosts, layout)

    def _plan(self, server: LinkServer) -> LinkPlan:
        theirs = [(host.control.there, said.port) for host, said in zip(self._all, self._ports, strict=True)]
        places = hosts_of_ranks(self._config.widths.count, self._config.hosts)
        return LinkPlan(os.urandom(TOKEN), (server.address, *theirs), places)

    def tell(self, fd: int, size: int, patience_s: float) -> None:
        """Passes a note of ``size`` bytes in the memory file ``fd`` to all hosts, whose ranks must be listening;
        returns when they have used it. Raises RankLost, also after ``patience_s`` seconds (0: no limit).
        """
        try:
            note = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ)
        except OSError as error:
            text = f"ranks of another host can't be told what they wait for: {error}"
            raise RankLost(text, rank=self._first) from error
        with note, memoryview(note) as said:
            for host in self._all:
                with suppress(OSError):  # whoever is gone is heard of
                    host.control.send(HostNote())
                    host.control.send_bytes(said)
        for _ in self._all:
            try:
                self._done.get(timeout=patience_s or None)
            except Empty:
                raise RankLost("ranks of another host don't take what they are told", rank=self._first) from None
            if self._found is not None:
                raise self._found

    @property
    def _first(self) -> int:
        return self._all[0].ranks.start

    def watch(self, lost: Callable[[RankLost], None]) -> None:
        """Has ``lost`` called, from a thread of its own, if a rank of another host or the host itself is lost."""
        with self._lock:
            self._lost, found = lost, self._found
        if found is not None:
            lost(found)

    def leave(self) -> None:
        """Ends the connections to all hosts, and with them their ranks; none counts as lost."""
        self._leaving = True
        for host in self._all:
            host.control.close()
        if self._server is not None:
            self._server.join(LEAVE_S)
            self._server.close()
        if self._links is not None:
            self._links.close()

    def _hear(self, host: RemoteHost) -> None:
        """Reads what a host says until it says that a rank is lost, or ends."""
        while True:
            said: FromHost
            try:
                said = host.control.receive(FROM_HOST)
            except OSError:
                said = HostLost(host.ranks.start, f"the host {host.address} of rank {host.ranks.start} is gone")
            if isinstance(said, HostFailed):  # it couldn't take a note, and ends
                said = HostLost(host.ranks.start, f"the host {host.address} failed: {said.error.message}")
            if isinstance(said, HostLost):
                return self._report(said)
            self._done.put(host)

    def _report(self, said: HostLost) -> None:
        if self._leaving:
            return
        lose(self._meeting, said.rank)
        with self._lock:
            if self._found is None:
                self._found = RankLost(f"{said.how}, of {self._config.widths.count} ranks", rank=said.rank)
            lost = self._lost
        for host in self._all:
            self._done.put(host)  # whoever waits for an answer
        if lost is not None:
            lost(self._found)


def _address(host: RemoteHost, port: int) -> str:
    """Returns where the KV sender of ``host`` listens."""
    assert port, "a host that is to send has a sender, or has failed"
    at = host.control.there
    return f"[{at}]:{port}" if ":" in at else f"{at}:{port}"
