"""Copies and checksums blocks on the GPU (kernels/kv_copy: XXH3-64), on its own CUDA stream. Torch-free.

Knows nothing of pages, frames or rings: addresses in, checksums out. One launch copies all blocks of a call, all
layers of each. The addresses, and the checksums that come back, are in pinned host memory that the kernel reads and
writes itself, so that no further copies are needed. The stream runs concurrently with the engine's. A thread sleeps
until a launch is done; the event loop waits only in ``settle``.
"""

from __future__ import annotations

import asyncio
import ctypes
from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

from baton.kernels.abi.build import BuildError
from baton.kernels.cuda.library import CudaLibrary, device
from baton.kernels.kv_copy.cpu import LEAST_BYTES
from baton.kv.memory.cuda_driver import Driver, driver
from baton.protos.errors import ConfigError

MOST_BLOCKS = 1024  # blocks of one launch, because a frame has as many at most
WORD = 8  # bytes of an address or a checksum
P, I64 = ctypes.c_void_p, ctypes.c_int64


class Copier:
    """Launches copies of blocks on the GPU. There is one per process."""

    def __init__(self, cuda: Driver, kernels: CudaLibrary) -> None:
        self._cuda, self._stream = cuda, cuda.stream()
        self._copy = kernels.library.baton_kv_copy
        self._copy.argtypes, self._copy.restype = [P, P, I64, I64, P, P], ctypes.c_int
        self._kernels = kernels
        self._free: list[LaunchTables] = []
        self._waiting = ThreadPoolExecutor(1, "baton-kv-copies", initializer=cuda.enter)

    def start(
        self, to: Sequence[int], source: Sequence[int], size: int, home: Sequence[tuple[int, int, int]] = ()
    ) -> asyncio.Future[list[int]]:
        """Starts to copy blocks of ``size`` bytes from GPU addresses ``source`` to ``to``, then each of ``home``
        (host address, GPU address, bytes) to the host.

        Returns a future of the XXH3-64 of each stored block. This call and the future may raise ConfigError; raises
        ValueError if ``size`` or the number of blocks is out of range.
        """
        if size < LEAST_BYTES or not 0 < len(to) <= MOST_BLOCKS:
            raise ValueError(f"{len(to)} blocks of {size} bytes are no work for the card")
        slot = self._free.pop() if self._free else LaunchTables(self._cuda)
        slot.fill(to, source)
        if status := self._copy(slot.to, slot.source, len(to), size, slot.sums, self._stream):
            said = (self._kernels.library.baton_device_error(status) or b"").decode(errors="replace")
            raise ConfigError(
                f"the card can't copy KV: {said or 'failed'} (status {status})", "worker.kv_transport"
            )
        try:
            for host, address, length in home:
                self._cuda.bring(host, address, length, self._stream)
            self._cuda.record(slot.event, self._stream)
        except ConfigError:
            self.settle()  # nobody will wait for what was launched
            raise
        loop = asyncio.get_running_loop()
        done: asyncio.Future[list[int]] = loop.create_future()
        waited = loop.run_in_executor(self._waiting, self._cuda.wait_for, slot.event)
        waited.add_done_callback(lambda _: self._over(waited, slot, len(to), done))
        return done

    def settle(self) -> None:
        """Waits, blocking the thread, until every started copy has ended; for streams that are closed early."""
        self._cuda.settle(self._stream)

    def _over(
        self, waited: asyncio.Future[None], slot: LaunchTables, count: int, done: asyncio.Future[list[int]]
    ) -> None:
        error = None if waited.cancelled() else waited.exception()
        if done.done():  # nobody wants to know any more
            pass
        elif waited.cancelled() or error is not None:
            done.set_exception(error or ConfigError("the card's copies were given up", "worker.kv_transport"))
            done.exception()  # whoever waits for it hears of it; nobody needs to
        else:
            done.set_result(slot.checksums(count))
        if error is None and not waited.cancelled():
            self._free.append(slot)


class LaunchTables:
    """The tables of one launch, in pinned memory: destinations, sources and checksums."""

    def __init__(self, cuda: Driver) -> None:
        row = MOST_BLOCKS * WORD
        self.to = cuda.pinned(3 * row)
        self.source, self.sums = self.to + row, self.to + 2 * row
        self.event = cuda.event()

    def fill(self, to: Sequence[int], source: Sequence[int]) -> None:
        """Writes the destination and source addresses of the next launch."""
        for at, addresses in ((self.to, to), (self.source, source)):
            ctypes.memmove(at, array("Q", addresses).tobytes(), len(addresses) * WORD)

    def checksums(self, count: int) -> list[int]:
        """Returns the checksums of the first ``count`` blocks of the launch, which must be complete."""
        return list(array("Q", ctypes.string_at(self.sums, count * WORD)))


def copier() -> Copier:
    """Returns this process's ``Copier``. Raises ConfigError if there is no GPU, or no library with its kernels."""
    return _made(driver())


@cache
def _made(cuda: Driver) -> Copier:
    try:
        return Copier(cuda, device())
    except (BuildError, AttributeError) as error:
        raise ConfigError(f"the CUDA kernels that copy KV are not here: {error}", "worker.kv_transport") from None
