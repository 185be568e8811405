"""The bytes for a worker's KV pages if its configuration names neither bytes nor pages.

Knows nothing of pages or models. A GPU's pages are mirrored in pinned host memory, so both the GPU and the host
must have room for them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from baton.engine.backends.cuda.gpu import ROOM_BYTES, Probe, probe
from baton.kernels.cuda.library import on_shim
from baton.process.memory import available_bytes
from baton.protos.errors import ConfigError
from baton.worker.spec import CacheSpec

log = logging.getLogger("baton.engine")

ON_A_CPU = 512 << 20  # bytes, because a laptop has other work to do
HOST_SHARE = 0.8  # of the memory available, as the rest is for weights that are read and for other processes


def kv_bytes(
    cache: CacheSpec,
    device: str,
    weight_bytes: int,
    ask: Probe = probe,
    available: Callable[[], int] = available_bytes,
) -> int:
    """Returns the bytes for KV pages of a worker on ``device`` whose weights take ``weight_bytes``.

    On a GPU this is the worker's part of ``kv_memory_share`` of the memory, less the weights and what runs them,
    and at most its part of the host's memory. Raises ConfigError if none is left.
    """
    if cache.kv_memory_bytes:
        return cache.kv_memory_bytes
    if device != "cuda" or on_shim():
        return ON_A_CPU
    gpu = ask()
    part = int(gpu.memory_bytes * cache.kv_memory_share) // cache.kv_sharers
    left, host = part - weight_bytes - ROOM_BYTES, int(available() * HOST_SHARE) // cache.kv_sharers
    if left <= 0:
        text = (
            f"of {gpu.name}'s {_gib(gpu.memory_bytes)} this worker may take {_gib(part)}, and weights and what "
            f"runs them need {_gib(weight_bytes + ROOM_BYTES)}; raise worker.kv_memory_share, put fewer "
            "workers on the card, or take a smaller model"
        )
        raise ConfigError(text, "worker.kv_memory_share")
    if host < left:
        log.warning("KV takes %s: the card has room for %s, the host's memory for no more", _gib(host), _gib(left))
    return min(left, host)


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"
