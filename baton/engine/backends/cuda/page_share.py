"""Shares the GPU's pages with the I/O process, which opens them by a CUDA IPC handle. Torch-free.

Knows nothing of handoffs. The engine is told what other processes write there (``opened``, ``landed``) and records
it in its ``PageResidency`` or ``DemandPages``. If there is no driver, or the driver refuses, nothing is shared:
handoffs read and write the host's pages, and the log says why.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from baton.engine.backends.cuda.demand_pages import DemandPages
from baton.engine.backends.residency import PageResidency
from baton.kv.memory.cuda_driver import Driver, driver
from baton.protos.errors import ConfigError
from baton.protos.measurements import SharedPages

log = logging.getLogger("baton.engine")


class PageShare:
    """Owns ``size`` bytes of GPU memory at address ``at``; ``shared`` is the handle by which another process opens
    them. With ``mirrored`` whoever writes them writes the host's pages as well.
    """

    def __init__(
        self, cuda: Driver, size: int, resident: PageResidency | DemandPages, mirrored: bool = True
    ) -> None:
        self._cuda, self._resident = cuda, resident
        self.at = cuda.allocate(size)
        try:
            self.shared: SharedPages | None = SharedPages(cuda.card, cuda.share(self.at), size, mirrored)
        except BaseException:
            cuda.free(self.at)
            raise

    @classmethod
    def made(cls, size: int, resident: PageResidency | DemandPages, mirrored: bool = True) -> PageShare | None:
        """Returns a share of ``size`` bytes; None if they can't be allocated or shared, with the reason in the
        log.
        """
        try:
            return cls(driver(), size, resident, mirrored)
        except ConfigError as error:
            log.warning("the device's pages are not shared, KV leaves by the host's: %s", error.message)
            return None

    def opened(self, pages: Sequence[int]) -> None:
        """Records that a handoff may write ``pages`` from now on."""
        self._resident.opened(pages)

    def landed(self, seq: int, table: Sequence[int], blocks: Sequence[int]) -> None:
        """Records that a handoff has written the blocks of sequence ``seq`` with indices ``blocks`` to their pages
        of ``table``, verified.
        """
        self._resident.landed(seq, table, blocks)

    def taken(self, pages: Sequence[int]) -> None:
        """Does nothing, because a copy on the device counts for one sequence alone."""

    def make_whole(self, pages: Sequence[int]) -> None:
        """Does nothing, because every step writes its KV to the host's pages."""

    def lend(self, pages: Sequence[int]) -> None:
        """Does nothing, because no card has ranks on other hosts."""

    def let_go(self, pages: Sequence[int]) -> None:
        """Does nothing, because the host keeps every page."""

    def close(self) -> None:
        """Frees the GPU memory, which other processes must have closed. The I/O process closes it before it tells
        the engine to end.
        """
        self._cuda.free(self.at)
