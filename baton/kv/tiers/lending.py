"""Lends pages to a thread that may hang, for as long as their owner likes.

Knows nothing of tiers or disks. The thread touches the pages only inside ``touching``, where it copies memory and
never waits for a device. So its borrower can have them back within one page's copy, whatever the thread hangs in.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from baton.protos.outlasting import outlasted


class TakenBack(Exception):
    """Says that the pages are their owner's again, so that the thread gives up what it was doing."""


class Loan:
    """Allows a thread to touch pages until ``take_back`` has returned."""

    def __init__(self) -> None:
        self._copying = threading.Lock()
        self._over = False

    @contextmanager
    def touching(self) -> Iterator[None]:
        """Holds the pages for one copy, on the borrowing thread. Raises TakenBack."""
        with self._copying:
            if self._over:
                raise TakenBack
            yield

    async def take_back(self) -> None:
        """Forbids every further copy and waits for the one in progress, through any number of cancellations."""
        self._over = True
        if self._copying.acquire(blocking=False):
            self._copying.release()
        else:
            await outlasted(asyncio.get_running_loop().run_in_executor(None, self._settle))

    def _settle(self) -> None:
        with self._copying:
            return
