"""A card that isn't one: the driver's stand-in and the shim's kv_copy, and engines' pages on it.

With $BATON_CUDA_ON_GPU=1 (bench/gpu.py) it is one, for the tests that have each end in a process of its own.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import random
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from baton.kernels.cuda import build, on_gpu
from baton.kv.memory import cuda_driver, device_copy, device_pages
from baton.kv.memory.cuda_driver import Driver
from baton.kv.memory.device_pages import DevicePages
from baton.kv.memory.host_pages import PageMemory
from baton.protos.channel import BlocksReceived, ShipBlock
from baton.protos.measurements import SharedPages
from baton.protos.nouns import KvLayout
from tests.kernels.compilers import needs_compiler
from tests.kv.transport.rigs import required_driver, stand_in_driver
from tests.kv.transport.test_handoffs import BLOCKS, FIRST, LAYOUT, Pair


def known() -> int:
    """Pieces of the card's memory that this process has."""
    return int(ctypes.CDLL(stand_in_driver()).stand_in_known())


@functools.cache
def kernels() -> Any:
    """Returns what ``library.device()`` gives, with kv_copy alone."""
    library = ctypes.CDLL(str(build.simt(["kv_copy"])))
    library.baton_device_error = lambda status: b"an illegal address"  # type: ignore[assignment]
    return SimpleNamespace(library=library)


def take_card(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Gives this process the stand-in card, with kernels, for the rest of the test; skips without a compiler."""
    if on_gpu.asked():
        return cuda_driver.driver()
    monkeypatch.setattr(cuda_driver, "LIBRARY", required_driver())
    with needs_compiler():
        kernels()
    monkeypatch.setattr(device_copy, "device", kernels)
    device_copy._made.cache_clear()
    return cuda_driver.driver()


class Shared:
    """Holds an engine's GPU memory for the pages of ``memory``, and its I/O process's view of it, also in
    ``memory``.
    """

    def __init__(self, cuda: Driver, memory: PageMemory) -> None:
        self.size, self._cuda = len(memory.view()), cuda
        self.at = cuda.allocate(self.size)
        self._page_bytes = memory.page_bytes
        for page in range(memory.pages):
            self.write(page, b"\xee" * memory.page_bytes)
        if on_gpu.asked():  # where nobody can open what is his own
            cuda.pin(memory.view())
            self.pages = DevicePages(cuda, device_copy.copier(), self.at, memory.view())
        else:
            self.pages = device_pages.open_pages(
                SharedPages(cuda.card, cuda.share(self.at), self.size), memory.view()
            )
        memory.device = self.pages

    def page(self, index: int) -> bytes:
        data = bytearray(self._page_bytes)
        self._cuda.download(memoryview(data), self.at + index * self._page_bytes)
        return bytes(data)

    def write(self, index: int, data: bytes) -> None:
        self._cuda.upload(self.at + index * self._page_bytes, memoryview(data))
        self._cuda.wait()

    def close(self) -> None:
        self.pages.copier.settle()
        if not on_gpu.asked():
            self.pages.close()
        self._cuda.free(self.at)


class Cards(Pair):
    """Both engines' pages are on the card. The sender's host pages hold none of the bytes that its card's do."""

    def __init__(self, card: Driver, layout: KvLayout = LAYOUT) -> None:
        super().__init__(layout=layout)
        self.ours, self.theirs = Shared(card, self.source), Shared(card, self.memory)
        for page in range(BLOCKS):
            self.ours.write(page, random.Random(1000 + page).randbytes(LAYOUT.page_bytes))
        self.resident = set(range(BLOCKS))

    def ship(self, *indices: int) -> list[ShipBlock]:
        return [ShipBlock(i, self.order[i], self.hashes[i], 16, i in self.resident) for i in indices]

    def sent(self) -> list[bytes]:
        """Frames of blocks that aren't all resident leave from the host, which has other bytes here."""
        return [self.ours.page(page) for page in self.order]

    def landed(self) -> list[bytes]:
        return [self.theirs.page(page) for page in self.lease.pages]

    def said_resident(self) -> set[int]:
        return {block for said in self.told if isinstance(said, BlocksReceived) for block in said.resident}

    async def handed(self) -> None:
        handoff = self.handoff()
        handoff.ship(self.ship(*range(BLOCKS)))
        handoff.commit(FIRST, 0)
        await asyncio.wait_for(handoff.run(), 30)


class LateCopies:
    """Launches of a copier that run when somebody waits for them, and waits that last until ``let``."""

    def __init__(self, cuda: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launched: list[tuple[Any, ...]] = []
        self.ran = self.waited = 0
        self._let, self._lock = threading.Event(), threading.Lock()
        self._settle, self._wait_for = cuda.settle, cuda.wait_for
        made = device_copy.copier()
        self._copy: Callable[..., int] = made._copy
        monkeypatch.setattr(made, "_copy", lambda *a: self.launched.append(self._kept(a)) or 0)
        monkeypatch.setattr(cuda, "settle", self.settle)
        monkeypatch.setattr(cuda, "wait_for", self.wait_for)

    def let(self) -> None:
        self._let.set()

    def settle(self, stream: int) -> None:
        self._run()
        self._settle(stream)

    def wait_for(self, event: int) -> None:
        assert self._let.wait(30)
        self._run()
        self._wait_for(event)
        self.waited += 1

    def _kept(self, arguments: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(arguments)

    def _run(self) -> None:
        with self._lock:
            launched, self.launched[:] = list(self.launched), []
            for arguments in launched:
                assert self._copy(*arguments) == 0
                self.ran += 1
