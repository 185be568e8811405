"""The shared memory by which the workers of one machine lend one another cores.

Knows nothing of who may lend.
"""

from __future__ import annotations

import os

from baton.kernels.abi.cores import new_page


class CoresPage:
    """Holds anonymous shared memory from the first use of ``path`` until ``close``.

    Meanwhile processes of this user can open it; those that have opened it keep it afterwards.
    """

    def __init__(self) -> None:
        self._fd: int | None = None

    @property
    def path(self) -> str:
        """Returns the path at which other processes open the memory, creating it the first time. Raises OSError."""
        if self._fd is None:
            self._fd = new_page()
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def close(self) -> None:
        """Closes the memory here, after which no further process can open it."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
