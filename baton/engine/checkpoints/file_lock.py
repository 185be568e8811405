"""Holds a lock file, so that of processes that start together one does the work and the others wait for it."""

from __future__ import annotations

import fcntl
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger("baton.engine")


@contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """Holds an exclusive lock on ``path``, which is made if it is missing, and logs that it waits for another
    process to finish ``what``. Raises OSError if the lock can't be had.
    """
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("%s: waits for another process, which holds %s", what, path)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
