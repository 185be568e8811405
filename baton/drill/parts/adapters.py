"""The files of a simulated cluster's LoRA adapters, and how engines read them.

An adapter's content is a number, and its digest the hash of that. The paced engine's rows begin with the adapter's
id, so an answer on another adapter, or on another content of the same name, is not the oracle's. Knows nothing of
workers.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping

from baton.engine.adapters.packed import PackedAdapter
from baton.engine.adapters.table import ReadAdapter
from baton.protos.adapter_id import DIGEST_DIGITS, adapter_id
from baton.protos.channel import AdapterPlace
from baton.protos.errors import AdapterChanged, AdapterRefused, BatonError
from baton.protos.nouns import AdapterInfo, AdapterLimits

ROOT = "/adapters"  # where every worker sees the files
MOST_RANK, MOST_BYTES = 64, 1 << 20  # of the adapters that a worker holds
LIMITS = AdapterLimits(2, MOST_BYTES, MOST_RANK, ROOT)  # so few that some are evicted
READ_S = 0.3  # seconds that an adapter is read at most


def id_of(name: str, content: int) -> str:
    """Returns the id of adapter ``name`` with content number ``content``."""
    return adapter_id(name, digest_of(content))


def digest_of(content: int) -> str:
    """Returns the digest of content number ``content``, in hex."""
    return hashlib.sha256(f"content {content}".encode()).hexdigest()[:DIGEST_DIGITS]


class SimulatedFiles:
    """The files that all workers read: ``contents`` holds content numbers by path.

    ``of_request`` is the ledger's: the id of the adapter that each request was asked on, by the request's number.
    """

    def __init__(self, now: Callable[[], float], rng: random.Random, of_request: Mapping[int, str]) -> None:
        self.contents: dict[str, int] = {}
        self.of_request = of_request
        self._now, self._rng = now, rng

    def start(self, source: AdapterPlace) -> SimulatedReading:
        """Returns the reading of ``source``, which ends after at most READ_S seconds."""
        return SimulatedReading(self, source, self._now, self._now() + self._rng.uniform(0.0, READ_S))


class SimulatedReading:
    """The reading of one adapter: what its files hold when it ends is what was read."""

    def __init__(self, files: SimulatedFiles, source: AdapterPlace, now: Callable[[], float], ends: float) -> None:
        self._files, self._source, self._now, self._ends = files, source, now, ends

    def result(self) -> ReadAdapter | BatonError | None:
        """Returns the adapter or the error; None while it is being read."""
        if self._now() < self._ends:
            return None
        source = self._source
        content = self._files.contents.get(source.path)
        if content is None:
            return AdapterRefused(f"adapter {source.path!r} is not there", "lora_path")
        if source.digest and source.digest != digest_of(content):
            return AdapterChanged(f"adapter {source.path!r} has other files now", "digest")
        info = AdapterInfo(id_of(source.name, content), source.path, 1, 64, ("q_proj",))
        return ReadAdapter(info, PackedAdapter((), memoryview(b"")))

    def close(self) -> None:
        """Does nothing, because nothing is open."""
