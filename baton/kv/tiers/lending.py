"""Lends pages to a thread that may hang, in such a way that the owner can take them back at any time.

Knows nothing of tiers or disks. The thread touches the pages only inside ``touching``, where it copies memory and
never waits for a device. So the owner gets them back within the time of one page's copy, even if the thread hangs.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from baton.tasks.outlasting import outlasted


class AccessRevoked(Exception):
    """Raised on the borrowing thread once the pages were taken back, so that it abandons its work."""


class PageAccess:
    """Allows a thread to access pages until ``revoke`` has returned."""

    def __init__(self) -> None:
        self._copying = threading.Lock()
        self._over = False

    @contextmanager
    def touching(self) -> Iterator[None]:
        """Returns a context in which a thread may access the pages for one copy. Raises AccessRevoked."""
        with self._copying:
            if self._over:
                raise AccessRevoked
            yield

    async def revoke(self) -> None:
        """Forbids further access and waits for the copy in progress, even if cancelled any number of times."""
        self._over = True
        if self._copying.acquire(blocking=False):
            self._copying.release()
        else:
            await outlasted(asyncio.get_running_loop().run_in_executor(None, self._settle))

    def _settle(self) -> None:
        with self._copying:
            return
