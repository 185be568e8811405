"""The memory by which the workers of one machine lend one another cores. Knows nothing of who may lend."""

from __future__ import annotations

import os

from baton.kernels.abi.cores import new_page


class CoresPage:
    """Holds the memory, in no file system, from the first ``path`` on until ``close``.

    Processes of this user open it meanwhile; those that have it go on after.
    """

    def __init__(self) -> None:
        self._fd: int | None = None

    @property
    def path(self) -> str:
        """Returns where the memory is opened. Raises OSError."""
        if self._fd is None:
            self._fd = new_page()
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def close(self) -> None:
        """Lets no further process open it."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
