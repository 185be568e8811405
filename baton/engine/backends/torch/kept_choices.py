"""Keeps what was measured of two ways to compute something on a card that torch serves, for `baton doctor`.

Knows nothing of what is computed. A record is of one card, driver and torch; the newest of each kind is told.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from baton.engine.backends.cuda.gpu import Gpu
from baton.engine.backends.cuda.op_trials import OpTrial
from baton.kernels.abi.build import cache_dir

log = logging.getLogger("baton.engine")


class TriedWay(msgspec.Struct, frozen=True):
    """Says that ``op`` is computed by ``way`` and not by ``other``, and why; what was measured of ``tried``, one of
    the two, is a trial's own.
    """

    op: str
    way: str
    other: str
    tried: str
    why: str = ""
    trials: tuple[OpTrial, ...] = ()

    @property
    def told(self) -> str:
        """Returns the choice in words, with the microseconds of all trials together."""
        peer = self.other if self.tried == self.way else self.way
        own_us, peer_us = (sum(getattr(trial, name) for trial in self.trials) for name in ("own_us", "torch_us"))
        figures = f" ({self.tried} {own_us:.0f} us, {peer} {peer_us:.0f} us)" if own_us else ""
        return f"{self.op}: {self.way}{figures}" + (f", because {self.why}" if self.why else "")


class KeptWays(msgspec.Struct, frozen=True):
    """Holds what was chosen at Unix seconds ``at``."""

    at: float
    ways: tuple[TriedWay, ...]


def keep(gpu: Gpu, kind: str, key: str, ways: Sequence[TriedWay]) -> bool:
    """Writes the record of ``kind`` and ``key`` for ``gpu``; returns whether it is written, with a warning in the
    log if not.
    """
    path = _folder(gpu, kind) / f"{_hash(key)}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(KeptWays(time.time(), tuple(ways)))))
    except OSError as error:
        log.warning("what was tried on the card is not kept: %s", error)
        return False
    return True


def kept(gpu: Gpu, kind: str, key: str) -> tuple[TriedWay, ...]:
    """Returns what was chosen for ``key``; empty if nothing was kept in this environment."""
    found = _read(_folder(gpu, kind) / f"{_hash(key)}.json")
    return () if found is None else found.ways


def newest(gpu: Gpu, kind: str) -> tuple[TriedWay, ...]:
    """Returns the newest record of ``kind``, of any key; empty if there is none."""
    found = [record for path in _folder(gpu, kind).glob("*.json") if (record := _read(path)) is not None]
    return max(found, key=lambda record: record.at).ways if found else ()


def forget(gpu: Gpu, kind: str) -> None:
    """Removes all records of ``kind`` in this environment."""
    for path in _folder(gpu, kind).glob("*.json"):
        path.unlink(missing_ok=True)


def _folder(gpu: Gpu, kind: str) -> Path:
    """Returns the folder of this card, driver, torch and these sources."""
    sources = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    of = gpu.name, gpu.capability, gpu.driver, torch.__version__, hashlib.sha256(sources).hexdigest()
    return cache_dir() / "cuda" / "choices" / kind / _hash(repr(of))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _read(path: Path) -> KeptWays | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=KeptWays)
    except (OSError, msgspec.MsgspecError):
        return None
