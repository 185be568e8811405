"""Ranks as threads of one process: the native step of each, without the seconds that a process takes to start."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Queue

from baton.engine.abilities import Ranks, ranks_of
from baton.engine.adapters.base import AdapterBase
from baton.engine.backends.ranks.load import LoadedRank, RankNotes, load_rank, numbers_of
from baton.engine.backends.ranks.memory import HEAR, SharedMemory, follow, sizes_for
from baton.engine.backends.ranks.runner import RankRunner
from baton.engine.config import EngineConfig
from baton.engine.plan import ModelSpec, Runner
from baton.kv.memory.host_pages import PageMemory
from baton.protos.errors import RankLost
from tests.conformance.drive import Driver


class ThreadFollowers:
    """Stands in for ``Followers``: same memory, same native code, threads in place of processes."""

    def __init__(self, ranks: list[LoadedRank], config: EngineConfig) -> None:
        self._ranks, self._config = ranks, config
        self._notes = [Queue[tuple[int, int]]() for _ in ranks]
        self._memories: list[SharedMemory] = []
        self._threads: list[threading.Thread] = []
        self.codes: list[int] = []

    def share(self, fd: int, size: int) -> None:
        if not self._memories:
            of = [(rank, SharedMemory(os.dup(fd), sizes_for(rank.program, rank.native))) for rank in self._ranks]
            self._memories = [memory for _, memory in of]
            return
        pages = mmap.mmap(fd, size, mmap.MAP_SHARED)
        for rank, memory, notes in zip(self._ranks, self._memories, self._notes, strict=True):
            thread = threading.Thread(target=self._run, args=(rank, memory, pages, notes), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _run(self, rank: LoadedRank, memory: SharedMemory, pages: mmap.mmap, notes: Queue[tuple[int, int]]) -> None:
        struct = memory.struct(rank.native, self._config.rank_bound_s)
        struct.pages = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        told = RankNotes(rank, self._config)
        struct.adapters = told.adapters.table
        while (code := follow(rank.native.struct, struct)) == HEAR:
            try:
                told.take(*notes.get(timeout=30))
            finally:
                notes.task_done()
        self.codes.append(code)

    def tell(self, fd: int, size: int, patience_s: float) -> None:
        for notes in self._notes:
            notes.put((os.dup(fd), size))
            notes.join()

    def watch(self, meeting: int, lost: Callable[[RankLost], None]) -> None:
        """Threads don't end by themselves."""

    def pids(self) -> list[int]:
        return []

    def leave(self, tell: Callable[[], None]) -> None:
        tell()
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive()


def on_ranks(spec: ModelSpec, config: EngineConfig, base: AdapterBase | None = None) -> RankRunner:
    """Returns the lead of ``config``'s ranks, the others as threads; call ``leave`` at last."""
    ranks = [load_rank(config, index) for index in range(config.widths.count)]
    followers = ThreadFollowers(ranks[1:], config)
    most = {"adapters": base, "most_adapters": numbers_of(config)} if base else {}
    return RankRunner(spec, ranks[0], followers, config.rank_bound_s, **most)  # type: ignore[arg-type]


class SharedDriver(Driver):
    """Drives a runner over pages that other ranks can map."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.memory = PageMemory.create(self.pages, self.runner.spec.layout.page_bytes)
        bind(self.runner, self.memory)


@contextmanager
def ending(lead: Ranks) -> Iterator[None]:
    """Ends the other ranks' processes after the block, and checks that none is left."""
    pids = lead.pids()
    try:
        yield
    finally:
        lead.leave()
    assert not any(Path("/proc", str(pid)).exists() for pid in pids), "a rank is left over"


def bind(runner: Runner, memory: PageMemory) -> None:
    runner.bind(memory.view(), memory.pages)
    if (ranks := ranks_of(runner)) is not None:
        ranks.open_pages(memory.fd, memory.bytes)
