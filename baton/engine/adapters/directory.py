"""Opens an adapter's files: by an operator's path, or, if an API call names them, strictly beneath a root.

Knows nothing of files' contents. Beneath a root no link, no ".." and no absolute path is followed; each directory
is opened relative to the one before, so that none can be exchanged meanwhile.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath

from baton.protos.errors import AdapterRefused

PARAM = "lora_path"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC


def parts_beneath(path: str) -> tuple[str, ...]:
    """Returns the parts of relative path ``path``. Raises AdapterRefused if it is absolute or contains ".."."""
    parts = PurePosixPath(path).parts
    if not parts or "\0" in path or PurePosixPath(path).is_absolute() or ".." in parts:
        text = "name a directory beneath adapters.root, without a leading slash and without .."
        raise AdapterRefused(f"adapter path {path!r}: {text}", PARAM)
    return parts


class AdapterFiles:
    """Reads files of one directory, open as ``descriptor``; ``links`` says whether they may be symbolic links."""

    def __init__(self, descriptor: int, path: str, links: bool) -> None:
        self.path = path
        self._descriptor, self._flags = descriptor, _FILE if links else _FILE | os.O_NOFOLLOW

    @contextmanager
    def open(self, name: str) -> Iterator[tuple[int, int]]:
        """Opens file ``name`` for reading; the context's value is (descriptor, size in bytes). Raises
        AdapterRefused.
        """
        try:
            found = os.open(name, self._flags, dir_fd=self._descriptor)
        except OSError as error:
            raise AdapterRefused(f"{self.path}/{name} can't be opened: {error.strerror}", PARAM) from None
        try:
            status = os.fstat(found)
            if not stat.S_ISREG(status.st_mode):
                raise AdapterRefused(f"{self.path}/{name} is no regular file", PARAM)
            yield found, status.st_size
        finally:
            os.close(found)


@contextmanager
def opened(path: str, root: str = "") -> Iterator[AdapterFiles]:
    """Opens directory ``path`` for reading; if ``root`` is given, ``path`` must lie beneath it. Raises
    AdapterRefused.
    """
    descriptor = _beneath(root, path) if root else _open(os.path.expanduser(path), None, path)
    try:
        yield AdapterFiles(descriptor, path, links=not root)
    finally:
        os.close(descriptor)


def _beneath(root: str, path: str) -> int:
    parts, at = parts_beneath(path), _open(os.path.expanduser(root), None, root)
    for part in parts:
        try:
            inner = _open(part, at, path, os.O_NOFOLLOW)
        finally:
            os.close(at)
        at = inner
    return at


def _open(name: str, within: int | None, path: str, more: int = 0) -> int:
    try:
        return os.open(name, _DIRECTORY | more, dir_fd=within)
    except (OSError, ValueError) as error:
        text = getattr(error, "strerror", None) or str(error)
        refused = more & os.O_NOFOLLOW and getattr(error, "errno", 0) in (errno.ELOOP, errno.ENOTDIR)
        links = "; links aren't followed there" if refused else ""
        raise AdapterRefused(f"adapter path {path!r}: {text}{links}", PARAM) from None
