"""Hashes the bytes of large checkpoint files, every one of them, and caches the hashes by the files' identity.

Knows nothing of what the bytes mean: it is asked for named ranges of a file. A range's hash is xxh3-128 over its
pieces' xxh3-128, so that cores share one range. Bytes are read into buffers, not mapped: hashing a file doesn't add
to this process's memory. The cache holds one small JSON per file. What it says counts only while the file's volume,
inode, size and times of change are those that were hashed; the system sets the time of a file's last change itself,
so no program can put other bytes there and keep it. A volume is known by the file system's own identity, which a
remount keeps, not by the device's number, which may be another after it. A file that changed within ``SETTLED_S``
before it was read is hashed again at the next start, because two changes within a clock's tick look like one.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path

import msgspec
import xxhash

from baton.engine.checkpoints.file_lock import locked
from baton.places import cache_dir
from baton.protos.errors import CheckpointError

log = logging.getLogger("baton.engine")

VERSION = 1  # of the hash's definition: another PIECE_BYTES or digest is another version
PIECE_BYTES = 64 << 20  # bytes of a range that one thread hashes; part of the hash's definition
READ_BYTES = 1 << 20  # bytes read at once, because they stay in a core's cache between reading and hashing
MOST_THREADS = 8  # threads that hash, because so many read as fast as memory does
SETTLED_S = 2.0  # seconds since a file's last change after which its hashes are cached; clocks tick every 10 ms

Span = tuple[int, int]  # of a file: offset of the first byte, number of bytes


class FileIdentity(msgspec.Struct, frozen=True):
    """Tells a file's content from any other that it had or will have, without reading it."""

    volume: int  # the file system's identity (f_fsid of statvfs(3)), or its device's number where it has none
    inode: int
    size: int  # bytes
    modified_ns: int
    changed_ns: int  # of content or inode, set by the system alone


class FileHashes(msgspec.Struct, frozen=True):
    """Is the cached record of one file."""

    path: str
    identity: FileIdentity
    hashes: dict[str, str]  # hex xxh3-128 by range's name
    version: int = 0  # of what a hash is over; one of another version is made again


def content_hashes(path: Path, spans: Mapping[str, Span], directory: str = "") -> dict[str, str]:
    """Returns the hash of every byte of each range of ``spans``, by name, from the cache or by reading the file.

    ``directory`` is the cache's, empty for the default. Processes that start together wait for one that reads. If
    the cache can't be written, each reads. Raises CheckpointError if the file changes meanwhile or is cut off.
    """
    path = path.resolve()
    record = _folder(directory) / f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:32]}.json"
    known = _known(record, path, spans)
    if known is not None:
        return known
    with _alone(record, path):
        return _known(record, path, spans) or _read(record, path, spans)


def _folder(directory: str) -> Path:
    return Path(directory or cache_dir()) / "fingerprints"


def _known(record: Path, path: Path, spans: Mapping[str, Span]) -> dict[str, str] | None:
    """Returns the hashes of a record that is of this file as it is, and of these ranges."""
    known = _read_or_none(record)
    fits = known is not None and known.version == VERSION and known.identity == identity(path)
    return known.hashes if known is not None and fits and known.hashes.keys() == spans.keys() else None


@contextmanager
def _alone(record: Path, path: Path) -> Iterator[None]:
    """Holds the record's lock, or none where it can't be made."""
    with ExitStack() as held:
        try:
            record.parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(locked(record.with_suffix(".lock"), f"hashes of {path}"))
        except OSError as error:
            log.warning("hashes of %s can't be locked: %s", path, error)
        yield


def _read(record: Path, path: Path, spans: Mapping[str, Span]) -> dict[str, str]:
    """Returns the hashes of the file's bytes, and writes the record unless the file has just changed."""
    began = time.time_ns()
    log.info("hashing %.1f GB of %s", sum(size for _, size in spans.values()) / 1e9, path)
    hashes, found = _hashed(path, spans)
    if began - max(found.changed_ns, found.modified_ns) > SETTLED_S * 1e9:
        try:
            _write(record, FileHashes(str(path), found, hashes, VERSION))
        except OSError as error:
            log.warning("hashes of %s are not cached: %s", path, error)
    return hashes


def identity(path: Path) -> FileIdentity:
    """Returns the identity of what is at ``path`` now. Raises OSError."""
    found = path.stat()
    try:
        volume = os.statvfs(path).f_fsid or found.st_dev
    except OSError:  # a file system in user space may not answer that
        volume = found.st_dev
    return FileIdentity(volume, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def _hashed(path: Path, spans: Mapping[str, Span]) -> tuple[dict[str, str], FileIdentity]:
    before = identity(path)
    pieces = [piece for first, size in spans.values() for piece in _pieces(first, size)]
    threads = min(MOST_THREADS, len(os.sched_getaffinity(0)), max(1, len(pieces)))
    own = threading.local()
    file = os.open(path, os.O_RDONLY)
    try:
        with ThreadPoolExecutor(threads, "hash") as pool:
            digests = iter(list(pool.map(lambda piece: _piece_digest(file, piece, own), pieces)))
    except EOFError as error:
        raise CheckpointError(f"{path} ({before.size} bytes) is truncated: {error}", "model") from error
    finally:
        os.close(file)
    if identity(path) != before:
        raise CheckpointError(f"{path} changed while it was read; start again once it is whole", "model")
    return {name: _joined(digests, len(_pieces(first, size))) for name, (first, size) in spans.items()}, before


def _pieces(first: int, size: int) -> list[Span]:
    end = first + size
    return [(at, min(PIECE_BYTES, end - at)) for at in range(first, end, PIECE_BYTES)]


def _piece_digest(file: int, piece: Span, own: threading.local) -> bytes:
    """Returns the digest of one piece of ``file``, read into this thread's buffer. Raises EOFError."""
    if not hasattr(own, "buffer"):
        own.buffer = memoryview(bytearray(READ_BYTES))
    at, left = piece
    digest = xxhash.xxh3_128()
    while left:
        count = os.preadv(file, [own.buffer[: min(left, READ_BYTES)]], at)
        if not count:
            raise EOFError(f"it ends at byte {at}, and {left} more are named in its header")
        digest.update(own.buffer[:count])
        at, left = at + count, left - count
    return digest.digest()


def _joined(digests: Iterator[bytes], count: int) -> str:
    return xxhash.xxh3_128_hexdigest(b"".join(islice(digests, count)))


def _read_or_none(record: Path) -> FileHashes | None:
    try:
        return msgspec.json.decode(record.read_bytes(), type=FileHashes)
    except OSError:
        return None
    except msgspec.MsgspecError as error:
        log.warning("%s is made again: %s", record, error)
        return None


def _write(record: Path, found: FileHashes) -> None:
    handle, temporary = tempfile.mkstemp(dir=record.parent, suffix=record.suffix)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(msgspec.json.encode(found))
        Path(temporary).replace(record)
    finally:
        Path(temporary).unlink(missing_ok=True)
