"""Stores blobs in a folder that several machines may have mounted. Knows nothing of their contents.

A blob is written to a temporary file in the same folder and renamed, so that no reader sees a part. Its
modification time is the time of its last use, which reads update at intervals.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

from baton.kv.tiers.blobs import Entry
from baton.protos.errors import ConfigError

SETTING = "worker.shared_tier"
RENEW_S = 600.0  # seconds between updates of a blob's last use, because each is a write
ABANDONED_S = 3600.0  # seconds after which a temporary file that was never renamed is removed
PART = ".part-"


class FolderStore:
    """Stores blobs as files under ``root``, which is created with mode 0700 if missing. Raises ConfigError if it
    can't be written.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        try:
            root.mkdir(parents=True, exist_ok=True, mode=0o700)
            probe = root / f"{PART}{secrets.token_hex(8)}"
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            text = f"{root} can't be written ({error.strerror}); set another {SETTING}"
            raise ConfigError(text, SETTING) from None

    def get(self, name: str, most: int) -> bytes | None:
        """Returns the first ``most`` bytes of a blob and updates its last use; None if there is none of that name.
        Raises OSError.
        """
        path = self._root / name
        try:
            with path.open("rb") as file:
                blob = file.read(most)
            if time.time() - path.stat().st_mtime > RENEW_S:
                os.utime(path)
        except FileNotFoundError:
            return None
        return blob

    def has(self, name: str) -> bool:
        """Returns whether there is a blob of that name. Raises OSError."""
        try:
            (self._root / name).stat()
        except FileNotFoundError:
            return False
        return True

    def put(self, name: str, blob: bytes) -> None:
        """Stores a blob, whole or not at all. Raises OSError."""
        path = self._root / name
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        part = path.with_name(f"{PART}{secrets.token_hex(8)}")
        try:
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(blob)
            part.replace(path)
        except OSError:
            part.unlink(missing_ok=True)
            raise

    def remove(self, name: str) -> None:
        """Removes a blob; does nothing if there is none of that name. Raises OSError."""
        (self._root / name).unlink(missing_ok=True)

    def entries(self) -> Iterator[Entry]:
        """Yields all files, and removes abandoned temporary ones. Raises OSError."""
        for folder, _, files in os.walk(self._root, onerror=_raise):
            for file in files:
                path = Path(folder, file)
                try:
                    found = path.stat()
                except FileNotFoundError:
                    continue  # another worker removed it
                if not file.startswith(PART):
                    yield Entry(str(path.relative_to(self._root)), found.st_size, found.st_mtime)
                elif time.time() - found.st_mtime > ABANDONED_S:
                    path.unlink(missing_ok=True)


def _raise(error: OSError) -> None:
    raise error
