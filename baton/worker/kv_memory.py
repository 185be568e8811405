"""The bytes for a worker's KV pages if its configuration names neither bytes nor pages.

Knows nothing of pages or models. A GPU's pages are mirrored in pinned host memory, so both the GPU and the host
must have room for them; unless its runner can copy pages to the host on demand (``CacheSpec.kv_mirror``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from baton.engine.backends.cuda.gpu import ROOM_BYTES, Gpu, Probe, probe
from baton.kernels.cuda.library import on_shim
from baton.process.memory import available_bytes
from baton.protos.errors import ConfigError
from baton.worker.spec import CacheSpec

log = logging.getLogger("baton.engine")

ON_A_CPU = 512 << 20  # bytes, because a laptop has other work to do


class KvRoom(msgspec.Struct, frozen=True):
    """Says how many bytes of KV pages the card of one worker has room for, and its host for their copies."""

    card: int
    host: int

    whole: bool = True  # whether the host must have a copy of every page

    @property
    def bytes(self) -> int:
        """Returns how many bytes KV may take."""
        return min(self.card, self.host) if self.whole else self.card

    @property
    def told(self) -> str:
        """Returns both, and which one bounds KV, in words."""
        small = self.host < self.card
        bound = "the host's bounds it" if small and self.whole else "the card's bounds it"
        bound += ", and copies are made on demand" if small and not self.whole else ""
        return f"the card has room for {_gib(self.card)} of KV, the host for copies of {_gib(self.host)}: {bound}"


def copies_bytes(cache: CacheSpec, available: int) -> int:
    """Returns how many bytes of copies of its card's pages a worker may keep on a host with ``available`` bytes."""
    return int(available * cache.kv_host_share) // cache.kv_sharers


def copied_on_demand(cache: CacheSpec, device: str, available: int) -> int | None:
    """Returns how many bytes of copies that nobody reads may stay on the host if the configuration has KV pages on
    a GPU copied there on demand; None if the host has a copy of each.
    """
    return None if device != "cuda" or cache.kv_mirror == "whole" else copies_bytes(cache, available)


def kv_room(
    cache: CacheSpec, gpu: Gpu, weight_bytes: int, available: int, held: float = 1.0, whole: bool = True
) -> KvRoom:
    """Returns the room of one of ``card_sharers`` workers on ``gpu`` whose weights take ``weight_bytes``, and of
    ``kv_sharers`` on the host, which has ``available`` bytes. The card's is negative where the weights alone don't
    fit.

    A card holds the share ``held`` of each page, its rank's heads; the bytes returned are of whole pages. The host
    must have a copy of every page if its runner needs ``whole`` ones or the configuration asks for them.
    """
    part = int(gpu.memory_bytes * cache.kv_memory_share) // cache.card_sharers
    on_card = int((part - weight_bytes - ROOM_BYTES) / held)
    return KvRoom(on_card, copies_bytes(cache, available), whole or cache.kv_mirror == "whole")


def kv_bytes(
    cache: CacheSpec,
    device: str,
    weight_bytes: int,
    ask: Probe = probe,
    available: Callable[[], int] = available_bytes,
    held: float = 1.0,
    whole: bool = True,
) -> int:
    """Returns the bytes for KV pages of a worker on ``device`` whose weights take ``weight_bytes``; its cards hold
    the share ``held`` of each page, and the host a copy of every page if its runner needs ``whole`` ones.

    On a GPU this is the worker's part of ``kv_memory_share`` of the memory, less the weights and what runs them;
    with a copy of every page at most its part of the host's memory. Raises ConfigError if none is left.
    """
    if cache.kv_memory_bytes:
        return cache.kv_memory_bytes
    if device != "cuda" or on_shim():
        return ON_A_CPU
    gpu = ask()
    room = kv_room(cache, gpu, weight_bytes, available(), held, whole)
    if room.card <= 0:
        part = int(room.card * held) + weight_bytes + ROOM_BYTES
        text = (
            f"of {gpu.name}'s {_gib(gpu.memory_bytes)} this worker may take {_gib(part)}, and weights and what "
            f"runs them need {_gib(weight_bytes + ROOM_BYTES)}; raise worker.kv_memory_share, put fewer "
            "workers on the card, or take a smaller model"
        )
        raise ConfigError(text, "worker.kv_memory_share")
    if room.bytes < room.card:
        log.warning("%s; worker.kv_host_share (%g) says how much of it", room.told, cache.kv_host_share)
    else:
        log.info("%s; worker.kv_memory_share (%g) says how much of it", room.told, cache.kv_memory_share)
    return room.bytes


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"
