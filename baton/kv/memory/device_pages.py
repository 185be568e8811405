"""Opens an engine's pages on its card in the I/O process: the mirror of the host's pages. Torch-free.

Knows nothing of who may write which page. Byte i of the host's pages has its twin at byte i here. The host's are
what everybody else reads: whoever writes here brings the same bytes there before he counts them.

A page may be *read* here once the engine said so of it (``ShipBlock.resident``). It says so after the step that
wrote the page's last rows, or brought the page over, has returned. A step returns when its stream has run dry, and
a launch that has ended has its writes where any later launch on that card finds them, whichever process it is of.
Nobody writes the page until SendClosed: it is pinned. A page may be *written* here where a lease's may be on the
host.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from baton.kernels.kv_copy.cpu import LEAST_BYTES
from baton.kv.memory import copying
from baton.kv.memory.cuda_driver import Driver, driver
from baton.kv.memory.device_copy import Copier, copier
from baton.protos.errors import ConfigError
from baton.protos.nouns import SharedPages

log = logging.getLogger("baton.kv")


class DevicePages:
    """Mirrors the pages of ``host`` on the card, at ``at``; ``copier`` copies to and from them."""

    def __init__(self, cuda: Driver, made: Copier, at: int, host: memoryview) -> None:
        self.cuda, self.copier, self.at, self.card = cuda, made, at, cuda.card
        self._host, self._size = copying.address(host), len(host)

    def twin(self, place: memoryview) -> int | None:
        """Returns the card's address of a piece of the host's pages; None for any other memory."""
        at = copying.address(place) - self._host
        return self.at + at if 0 <= at <= self._size - len(place) else None

    def twins(self, places: Sequence[memoryview]) -> list[int]:
        """Returns the card's address of each of ``places``; nothing unless they are all in the host's pages."""
        found = [at for place in places if (at := self.twin(place)) is not None]
        return found if len(found) == len(places) else []

    def homes(self, places: Sequence[memoryview], twins: Sequence[int]) -> list[tuple[int, int, int]]:
        """Returns the copies (to, from, bytes) that bring ``places`` up to their twins; neighbours are copied
        as one.
        """
        joined: list[tuple[int, int, int]] = []
        for place, source in zip(places, twins, strict=True):
            to, size = copying.address(place), len(place)
            if joined and (joined[-1][0] + joined[-1][2], joined[-1][1] + joined[-1][2]) == (to, source):
                joined[-1] = (joined[-1][0], joined[-1][1], joined[-1][2] + size)
            else:
                joined.append((to, source, size))
        return joined

    def takes(self, size: int) -> bool:
        """Returns whether kernels can copy blocks of ``size`` bytes."""
        return size >= LEAST_BYTES

    def close(self) -> None:
        """Closes the mirror, once nobody copies from or to it any more."""
        self.copier.settle()
        self.cuda.close(self.at)


def open_pages(shared: SharedPages, host: memoryview) -> DevicePages:
    """Opens what the engine shares of ``host``. Raises ConfigError naming what keeps this process from it."""
    cuda = driver()
    if shared.card != cuda.card:
        raise ConfigError(f"the engine is on card {shared.card}, this process sees {cuda.card}", "worker.device")
    if shared.size != len(host):
        raise ConfigError(
            f"the engine shares {shared.size} bytes of its card for pages of {len(host)}", "device_pages"
        )
    made = copier()
    at = cuda.open(shared.handle)
    try:
        cuda.pin(host)
    except ConfigError as error:
        log.warning("the pages are not pinned, copies from the card wait for the host: %s", error.message)
    return DevicePages(cuda, made, at, host)


def opened_or_none(shared: SharedPages | None, host: memoryview) -> DevicePages | None:
    """Opens what the engine shares; None where nothing is shared, or where it can't be opened, which the log
    says.
    """
    if shared is None:
        return None
    try:
        return open_pages(shared, host)
    except ConfigError as error:
        log.warning("KV leaves by the host's pages, not from the card: %s", error.message)
        return None
