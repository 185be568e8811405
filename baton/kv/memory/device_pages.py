"""Opens an engine's pages on its GPU, a mirror of the host's pages, in the I/O process. Torch-free.

Knows nothing of who may write which page. Byte i of the host's pages corresponds to byte i of the mirror. Everyone
else reads the host's pages: a block written to the mirror counts only after it was copied to the host's pages,
unless the engine itself copies pages there when somebody is about to read them (``SharedPages.mirrored``).

A page of the mirror may be *read* once the engine has said so (``ShipBlock.resident``), after the step that wrote
the page's last rows, or copied the page to the GPU, has returned. A step returns when its CUDA stream is empty, and
writes of a launch that has ended are visible to any later launch on that GPU, of whichever process. Nobody writes
the page until SendClosed: it is pinned. A page of the mirror may be *written* whenever that lease's page may be
written on the host.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from baton.kernels.kv_copy.cpu import LEAST_BYTES
from baton.kv.memory import copying
from baton.kv.memory.cuda_driver import Driver, driver
from baton.kv.memory.device_copy import Copier, copier
from baton.protos.errors import ConfigError
from baton.protos.measurements import SharedPages

log = logging.getLogger("baton.kv")


class DevicePages:
    """The mirror, at GPU address ``at``, of the host pages ``host``; ``copier`` copies to and from it.

    Without ``mirrored`` what is written there is not copied to the host's pages.
    """

    def __init__(self, cuda: Driver, made: Copier, at: int, host: memoryview, mirrored: bool = True) -> None:
        self.cuda, self.copier, self.at, self.card = cuda, made, at, cuda.card
        self._mirrored = mirrored
        self._host, self._size = copying.address(host), len(host)

    def twin(self, place: memoryview) -> int | None:
        """Returns the GPU address that corresponds to ``place``, a piece of the host's pages; None if it is other
        memory.
        """
        at = copying.address(place) - self._host
        return self.at + at if 0 <= at <= self._size - len(place) else None

    def twins(self, places: Sequence[memoryview]) -> list[int]:
        """Returns the GPU address that corresponds to each of ``places``; an empty list unless all lie in the
        host's pages.
        """
        found = [at for place in places if (at := self.twin(place)) is not None]
        return found if len(found) == len(places) else []

    def homes(self, places: Sequence[memoryview], twins: Sequence[int]) -> list[tuple[int, int, int]]:
        """Returns the copies (host address, GPU address, bytes) from ``twins`` to ``places``, with adjacent ones
        merged; none if the host's pages get them on demand.
        """
        if not self._mirrored:
            return []
        joined: list[tuple[int, int, int]] = []
        for place, source in zip(places, twins, strict=True):
            to, size = copying.address(place), len(place)
            if joined and (joined[-1][0] + joined[-1][2], joined[-1][1] + joined[-1][2]) == (to, source):
                joined[-1] = (joined[-1][0], joined[-1][1], joined[-1][2] + size)
            else:
                joined.append((to, source, size))
        return joined

    def takes(self, size: int) -> bool:
        """Returns whether the GPU kernel can copy blocks of ``size`` bytes: it needs LEAST_BYTES or more."""
        return size >= LEAST_BYTES

    def close(self) -> None:
        """Unmaps the mirror, after waiting for copies in progress."""
        self.copier.settle()
        self.cuda.close(self.at)


def open_pages(shared: SharedPages, host: memoryview) -> DevicePages:
    """Opens the mirror that an engine shares of the host pages ``host``. Raises ConfigError naming the reason if it
    can't be opened.
    """
    cuda = driver()
    if shared.card != cuda.card:
        raise ConfigError(f"the engine is on card {shared.card}, this process sees {cuda.card}", "worker.device")
    if shared.size != len(host):
        raise ConfigError(
            f"the engine shares {shared.size} bytes of its card for pages of {len(host)}", "device_pages"
        )
    made = copier()
    at = cuda.open(shared.handle)
    if shared.mirrored:
        _pin(cuda, host)
    return DevicePages(cuda, made, at, host, shared.mirrored)


def _pin(cuda: Driver, host: memoryview) -> None:
    try:
        cuda.pin(host)
    except ConfigError as error:
        log.warning("the pages are not pinned, copies from the card wait for the host: %s", error.message)


def opened_or_none(shared: SharedPages | None, host: memoryview) -> DevicePages | None:
    """Opens the mirror that an engine shares; returns None if ``shared`` is None, or it can't be opened, which is
    logged.
    """
    if shared is None:
        return None
    try:
        return open_pages(shared, host)
    except ConfigError as error:
        log.warning("KV leaves by the host's pages, not from the card: %s", error.message)
        return None
