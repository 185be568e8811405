"""Ranks of several hosts as threads: each host has memory and pages of its own, and TCP or TLS joins them."""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import threading
from collections.abc import Callable

from baton.engine.backends.ranks.hosts.layout import hosts_of_ranks, ranks_on
from baton.engine.backends.ranks.hosts.links import HostMemory, Links, LinkServer
from baton.engine.backends.ranks.hosts.parts import parts_of_hosts, parts_read
from baton.engine.backends.ranks.hosts.secured import rank_identity
from baton.engine.backends.ranks.link_plan import LinkPlan
from baton.engine.backends.ranks.load import LoadedRank, load_rank
from baton.engine.backends.ranks.memory import HEAR, SharedMemory, SharedSizes, bring_pages, follow, sizes_for
from baton.engine.backends.ranks.notes import PagesNote, read
from baton.engine.backends.ranks.runner import RankRunner
from baton.engine.config import EngineConfig
from baton.engine.plan import ModelSpec
from baton.engine.program.program import Program
from baton.kv.layout.extents import Part, gather, part_bytes, scatter
from baton.protos.nouns import KvLayout

HERE, PATIENCE_S = "127.0.0.1", 60.0


Notes = queue.SimpleQueue[tuple[PagesNote, threading.Event]]


class Host:
    """Stands in for one host's processes: ``ranks`` as threads over memory that ``mapped`` describes."""

    def __init__(self, config: EngineConfig, ranks: list[LoadedRank]) -> None:
        self.config, self.ranks = config, ranks
        self.identity = rank_identity(config.tls, "a port of links")
        self.server = LinkServer(HERE, self.identity)
        self.mapped: HostMemory | None = None
        self._threads: list[threading.Thread] = []
        self._linked = threading.Barrier(len(ranks) + 1)
        self.notes = {rank.native.own.rank.index: Notes() for rank in ranks}

    def map(self, memory: int, pages: int) -> None:
        """Makes the host's own memory of these sizes."""
        maps = [mmap.mmap(-1, size) for size in (memory, pages)]
        at = [ctypes.addressof(ctypes.c_char.from_buffer(each)) for each in maps]
        self.mapped = HostMemory(at[0], memory, at[1], pages, (maps,))

    def start(self, plan: LinkPlan, fd: int) -> None:
        """Runs the ranks, each over its own view of the memory."""
        for rank in self.ranks:
            thread = threading.Thread(target=self._run, args=(rank, plan, fd), daemon=True)
            self._threads.append(thread)
            thread.start()
        self._linked.wait(PATIENCE_S)

    def _run(self, rank: LoadedRank, plan: LinkPlan, fd: int) -> None:
        assert self.mapped is not None
        sizes, own = sizes_for(rank.program, rank.native), rank.native.own
        memory = SharedMemory(os.dup(fd), sizes) if fd >= 0 else AnonymousMemory(self.mapped.memory, sizes)
        struct = memory.struct(rank.native, self.config.rank_bound_s)
        struct.pages = self.mapped.pages
        bound_s = self.config.rank_bound_s
        links = Links(plan, own.rank.index, memory.meeting, self.mapped.pages, bound_s, self.identity)
        struct.group.links = links.address
        self._linked.wait(PATIENCE_S)
        while follow(rank.native.struct, struct) == HEAR:
            note, heard = self.notes[own.rank.index].get(timeout=PATIENCE_S)
            heard.set()
            assert not bring_pages(struct, note, plan)
        links.close()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


class AnonymousMemory(SharedMemory):
    """Another host's memory, which is mapped already."""

    def __init__(self, at: int, sizes: SharedSizes) -> None:
        self.sizes, self.meeting = sizes, at
        self.plan = at + sizes.group
        self.rope_angles = self.plan + sizes.plan
        self.registers = self.rope_angles + sizes.rope_angles
        self.logits = self.registers + sizes.registers
        self.states = self.logits + sizes.logits


class Hosts:
    """Stands in for ``Followers`` and ``LeadHosts`` at once: all ranks but the lead, as threads."""

    senders = receivers = ()

    def __init__(self, config: EngineConfig, ranks: list[LoadedRank]) -> None:
        self._config = config
        dealt = [ranks_on(config.widths.count, config.hosts, host) for host in range(config.hosts)]
        self.all = [Host(config, [ranks[index] for index in own if index]) for own in dealt]
        self._memory = self._told = -1
        self._links: Links | None = None

    def share(self, fd: int, size: int) -> None:
        if self._memory < 0:
            self._memory = fd

    def connect(self, mapped: HostMemory, followers: Hosts, program: object, layout: object) -> Links:
        assert followers is self
        addresses = tuple(host.server.address for host in self.all)
        plan = LinkPlan(os.urandom(32), addresses, hosts_of_ranks(self._config.widths.count, self._config.hosts))
        self.all[0].mapped = mapped
        for number, host in enumerate(self.all):
            if number:
                host.map(mapped.memory_bytes, mapped.page_bytes)
            assert host.mapped is not None
            host.server.start(plan, number, host.mapped)
        bound_s, identity = self._config.rank_bound_s, self.all[0].identity
        self._links = Links(plan, 0, mapped.memory, mapped.pages, bound_s, identity)
        for number, host in enumerate(self.all):
            host.start(plan, -1 if number else self._memory)
        for host in self.all:
            host.server.await_all()
        return self._links

    def tell(self, fd: int, size: int, patience_s: float) -> None:
        """Passes a note about pages to all ranks, once: the runner tells followers and other hosts."""
        if self._told != fd:
            self._told = fd
            note, _ = read(os.dup(fd), size)
            assert isinstance(note, PagesNote)
            waits = []
            for host in self.all:
                for notes in host.notes.values():
                    waits.append(threading.Event())
                    notes.put((note, waits[-1]))
            assert all(heard.wait(PATIENCE_S) for heard in waits)
        else:
            self._told = -1

    def parts_read(self, program: Program, layout: KvLayout) -> tuple[Part, ...]:
        return parts_read(program, self._config.widths, self._config.hosts, layout)

    def pids(self) -> list[int]:
        return []

    def leave(self, tell: Callable[[], None] | None = None) -> None:
        if tell is not None:
            tell()
            return
        for host in self.all:
            host.join()
        if self._links is not None:
            self._links.close()
        for host in self.all:
            host.server.join(PATIENCE_S)
            host.server.close()


def require_own_parts(runner: RankRunner) -> None:
    """Asserts that the part of each page that a host would send has the bytes of the lead's page; not where some
    have states, which are lent for a handoff alone.
    """
    hosts, layout = runner._hosts, runner.spec.layout
    if layout.states:
        return
    assert isinstance(hosts, Hosts)
    config, held = hosts._config, [pages_of(host.mapped) for host in hosts.all]
    parts = parts_of_hosts(runner._undivided, config.widths, config.hosts, layout)
    for theirs, part in zip(held, parts, strict=bool(parts)):
        for at in range(0, len(theirs), layout.page_bytes):
            page, whole = (each[at : at + layout.page_bytes] for each in (theirs, held[0]))
            assert gather(page, part) == gather(whole, part), at // layout.page_bytes


def require_only_own_parts(runner: RankRunner) -> None:
    """Asserts that another host has nothing of the lead's pages but what its ranks read."""
    hosts, layout = runner._hosts, runner.spec.layout
    assert isinstance(hosts, Hosts)
    for host, part in list(zip(hosts.all, hosts.parts_read(runner._undivided, layout), strict=True))[1:]:
        held = pages_of(host.mapped)
        for at in range(0, len(held), layout.page_bytes):
            page = bytearray(held[at : at + layout.page_bytes])
            scatter(memoryview(bytes(part_bytes(part))), memoryview(page), part)
            assert not any(page), at // layout.page_bytes


def divide(runner: RankRunner, whole: memoryview) -> None:
    """Writes to each host's pages what its ranks read of ``whole``, the pages of one rank, and to all else of the
    other hosts' pages, and of the lead's, what is wrong.
    """
    hosts, layout = runner._hosts, runner.spec.layout
    assert isinstance(hosts, Hosts)
    for host, part in zip(hosts.all, hosts.parts_read(runner._undivided, layout), strict=True):
        held = pages_of(host.mapped)
        held[:] = bytes([171]) * len(held)
        for at in range(0, len(held), layout.page_bytes):
            page, wanted = (each[at : at + layout.page_bytes] for each in (held, whole))
            scatter(gather(wanted, part), page, part)


def pages_of(mapped: HostMemory | None) -> memoryview:
    """The pages of a host."""
    assert mapped is not None
    return memoryview((ctypes.c_uint8 * mapped.page_bytes).from_address(mapped.pages)).cast("B")


def on_hosts(spec: ModelSpec, config: EngineConfig) -> RankRunner:
    """Returns the lead of ``config``'s ranks, the others as threads of this host and others."""
    ranks = [load_rank(config, index) for index in range(config.widths.count)]
    hosts = Hosts(config, ranks)
    return RankRunner(spec, ranks[0], hosts, config.rank_bound_s, hosts=hosts)  # type: ignore[arg-type]
