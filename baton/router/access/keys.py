"""API keys: made once and shown once, kept as hashes in a file, looked up in constant time.

Knows nothing of HTTP or quotas' counting. A key is ``bt-ID-SECRET`` with 256 random bits of secret, so that a plain
SHA-256 is a safe hash at rest (there is nothing to guess); ID finds the entry without comparing secrets.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import logging
import os
import re
import secrets
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from baton.protos.adapter_id import require_name
from baton.protos.errors import AdapterRefused, ConfigError, Unauthenticated
from baton.protos.nouns import TENANT_SALT_BYTES

_KEY = re.compile(r"bt-([0-9a-f]{12})-[A-Za-z0-9_-]{43}")
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_NO_HASH = "0" * 64  # is compared for an unknown key, so that it takes as long as for a known one
LEAST_WEIGHT, MOST_WEIGHT = 1e-3, 1e6  # JSON has no infinite one; a tiny one would never be served
MOST_RATE = 2**53  # buckets count in floats
WARN_EVERY_S = 60.0  # seconds between two warnings that it can't be read
LOOK_EVERY_S = 1.0  # seconds between two looks whether the file of keys changed
log = logging.getLogger(__name__)


class ApiKey(msgspec.Struct, frozen=True):
    """Describes one API key as its file keeps it; the file holds a hash, never the key's text.

    ``hash`` is hex SHA-256, ``created`` Unix seconds. Rates are per minute, 0: no limit. ``weight`` is the tenant's
    share when the queue is full. ``priority`` is the most urgent that its requests can have (lower is sooner).
    ``models`` (ids of models, or adapters on them) and ``adapters`` are what it may use; empty allows all.
    ``adapter`` is used for requests that name a base model or nothing. ``admin`` may see everybody's requests.
    """

    id: str
    tenant: str
    hash: str
    name: str = ""
    created: float = 0.0
    revoked: bool = False
    requests_per_min: int = 0
    tokens_per_min: int = 0
    weight: float = 1.0
    priority: int = 0
    models: tuple[str, ...] = ()
    admin: bool = False
    adapters: tuple[str, ...] = ()
    adapter: str = ""

    def allows(self, model_id: str, adapter: str = "") -> bool:
        """Returns whether the key may use model ``model_id``, or ``adapter`` on it if one is given."""
        if self.models and model_id not in self.models and adapter not in self.models:
            return False
        return not (adapter and self.adapters) or adapter in self.adapters or adapter == self.adapter

    @property
    def salt(self) -> bytes:
        """Returns the TENANT_SALT_BYTES bytes that keep the tenant's cached blocks apart from other tenants'; every
        router derives the same ones.
        """
        return hashlib.sha256(b"baton tenant salt\0" + self.tenant.encode()).digest()[:TENANT_SALT_BYTES]


class _File(msgspec.Struct):
    keys: list[ApiKey] = []


def read_keys(path: Path) -> list[ApiKey]:
    """Reads every key of the file at ``path``, revoked ones too.

    Raises ConfigError if it is missing or malformed.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=_File).keys
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: no such file; make it with `baton keys add TENANT`", "router.keys_file"
        ) from None
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path}: {error}", "router.keys_file") from None


def write_keys(path: Path, keys: list[ApiKey]) -> None:
    """Atomically replaces the file of keys at ``path``; makes missing directories. A new file is readable by its
    owner alone; one that is replaced keeps its owner and mode, so that a router of another user goes on reading it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    except OSError as error:
        raise ConfigError(f"{path.parent}: no file can be made there: {error}", "router.keys_file") from None
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(_File(keys)), indent=2) + b"\n")
            if path.exists():
                before = path.stat()
                os.fchown(file.fileno(), before.st_uid, before.st_gid)
                os.fchmod(file.fileno(), before.st_mode & 0o777)
        os.replace(name, path)
    except OSError as error:
        Path(name).unlink(missing_ok=True)
        raise ConfigError(
            f"{path} can't be replaced by a file of the same owner: {error}", "router.keys_file"
        ) from None


@contextmanager
def _changing(path: Path) -> Iterator[None]:
    """Lets one process at a time read, change and write the file of keys at ``path``: its folder is locked, which
    every user can who may read it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def add_key(path: Path, tenant: str, now: float, **fields: object) -> str:
    """Adds a key of ``tenant`` to the file at ``path`` and returns its text, of which the file keeps only a hash.

    ``now`` is Unix seconds; ``fields`` are further fields of ApiKey. Raises ConfigError for a value out of range.
    """
    if not _TENANT.fullmatch(tenant):
        raise ConfigError(f"tenant {tenant!r}: use 1 to 64 letters, digits, '.', '_' or '-'", "tenant")
    key_id = secrets.token_hex(6)
    text = f"bt-{key_id}-{secrets.token_urlsafe(32)}"
    entry = msgspec.convert(
        {"id": key_id, "tenant": tenant, "hash": hash_of(text), "created": now, **fields}, ApiKey
    )
    if not LEAST_WEIGHT <= entry.weight <= MOST_WEIGHT:
        raise ConfigError(f"a weight is a number from {LEAST_WEIGHT:g} to {MOST_WEIGHT:g}", "weight")
    for name in ("requests_per_min", "tokens_per_min"):
        if not 0 <= getattr(entry, name) <= MOST_RATE:
            raise ConfigError(f"{name} is 0 (no limit) to {MOST_RATE}", name)
    if not -(2**31) <= entry.priority < 2**31:
        raise ConfigError(f"priority {entry.priority} has to fit 32 bits", "priority")
    _require_names(entry)
    with _changing(path):
        write_keys(path, [*(read_keys(path) if path.exists() else []), entry])
    return text


def _require_names(key: ApiKey) -> None:
    """Raises ConfigError for an adapter of the key whose name none can have, so that the key could use nothing."""
    for option, names in (("adapter", key.adapters), ("bound", (key.adapter,) if key.adapter else ())):
        for name in names:
            try:
                require_name(name)
            except AdapterRefused as error:
                raise ConfigError(f"--{option}: {error.message}", option) from None


def revoke_key(path: Path, key_id: str) -> ApiKey:
    """Marks the key with id ``key_id`` revoked and returns its entry; routers follow within a second.

    Raises ConfigError for an unknown id.
    """
    with _changing(path):
        keys = read_keys(path)
        found = next((k for k in keys if k.id == key_id), None)
        if found is None:
            raise ConfigError(f"no key {key_id!r} in {path}; `baton keys list` shows them", "id")
        write_keys(path, [msgspec.structs.replace(k, revoked=True) if k is found else k for k in keys])
    return found


def hash_of(text: str) -> str:
    """Returns the hex SHA-256 of ``text``."""
    return hashlib.sha256(text.encode()).hexdigest()


def noted(key: ApiKey) -> ApiKey:
    """Returns ``key`` with the hash of its hash: enough for ``KeyRing.renewed`` to know it again, and the file's
    own hash stays in the file.
    """
    return msgspec.structs.replace(key, hash=hash_of(key.hash))


class KeyRing:
    """Looks up API keys of a file, and reads the file again when it changes.

    While the changed file can't be read, the keys stay as they were, and each look tries again.
    """

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        self._path, self._clock = path, clock
        self._stamp = _stamp(path)  # before it is read: a change in between is read at the next look
        self._keys = {k.id: k for k in read_keys(path)}
        self._looked, self._warned = clock(), float("-inf")

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, text: str) -> ApiKey:
        """Returns the entry of the API key whose full text is ``text``, compared in constant time.

        Raises Unauthenticated for one that is malformed, unknown, wrong or revoked.
        """
        self._look()
        match = _KEY.fullmatch(text)
        entry = self._keys.get(match[1]) if match else None
        matches = hmac.compare_digest(hash_of(text), entry.hash if entry else _NO_HASH)
        if entry is None or not matches or entry.revoked:
            raise Unauthenticated("the API key is not valid; `baton keys add TENANT` makes one", "authorization")
        return entry

    def renewed(self, key: ApiKey) -> ApiKey:
        """Returns the current entry of ``key``, an entry found earlier, as ``noted`` writes it down.

        Raises Unauthenticated if it was removed or revoked, or if another key has its id now.
        """
        return self._still(key.id, lambda entry: noted(entry).hash == key.hash)

    def current(self, key: ApiKey) -> ApiKey:
        """Returns the current entry of ``key``, an entry that ``find`` or this returned earlier.

        Raises Unauthenticated as ``renewed`` does.
        """
        return self._still(key.id, lambda entry: entry.hash == key.hash)

    def _still(self, key_id: str, is_same: Callable[[ApiKey], bool]) -> ApiKey:
        self._look()
        entry = self._keys.get(key_id)
        if entry is None or entry.revoked or not is_same(entry):
            raise Unauthenticated("the API key is not valid any more; `baton keys add TENANT` makes one")
        return entry

    def _look(self) -> None:
        if self._clock() - self._looked < LOOK_EVERY_S:
            return
        self._looked, stamp = self._clock(), _stamp(self._path)
        if stamp == self._stamp:
            return
        try:
            self._keys = {k.id: k for k in read_keys(self._path)}
        except ConfigError as error:
            if self._looked - self._warned >= WARN_EVERY_S:
                log.warning("API keys stay as they were, and a revoked one stays valid: %s", error.message)
                self._warned = self._looked
            return
        self._stamp, self._warned = stamp, float("-inf")


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        found = path.stat()
    except OSError:
        return (0, 0, 0)
    return (found.st_mtime_ns, found.st_size, found.st_ino)
