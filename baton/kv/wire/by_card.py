"""Decides whether KV can be sent from GPU to GPU, and explains why it is or is not.

Knows nothing of streams; GPUs are identified by id.
"""

from __future__ import annotations

from baton.kv.memory.device_pages import DevicePages
from baton.kv.wire.channels import HALF_BYTES
from baton.protos.nouns import WorkerInfo


def by_card(ours: DevicePages | None, info: WorkerInfo, host_id: str, page_bytes: int) -> tuple[str, ...]:
    """Returns the transports by which blocks can be sent from GPU memory to GPU memory of the worker of ``info``;
    none if there are none.

    Both engines must share their pages on a GPU (``ours``; None if ours doesn't), and a block must fit;
    ``page_bytes`` is the size of our pages.
    """
    if ours is None or _is_too_large(info, page_bytes):
        return ()
    if _card(info) == ours.card and host_id == info.host_id:
        return ("cuda_ipc",)
    return ("nccl",) if "nccl" in info.data_addresses else ()


def why(ours: DevicePages, info: WorkerInfo, best: str, page_bytes: int) -> str:
    """Returns an explanation of why a worker whose pages ``ours`` are shared on a GPU sends to the worker of
    ``info`` by transport ``best``.
    """
    theirs = _card(info)
    if best == "cuda_ipc":
        return f"both engines share their pages on card {ours.card[:8]}"
    if best == "nccl":
        return f"both engines share their pages, ours on card {ours.card[:8]}, theirs on {theirs[:8] or 'another'}"
    if _is_too_large(info, page_bytes):
        return f"from the host's pages, because a block of its {info.layout.page_bytes} bytes doesn't go at once"
    if not theirs:
        return "from the host's pages, because its engine shares none on a card (no cuda_ipc in data_addresses)"
    return f"from the host's pages, because ours are on card {ours.card[:8]} and theirs on {theirs[:8]}"


def _is_too_large(info: WorkerInfo, page_bytes: int) -> bool:
    """Returns whether a block for the worker is too large for either transport, which have room for a page of ours
    or more.
    """
    return info.layout.page_bytes > max(HALF_BYTES, page_bytes)


def _card(info: WorkerInfo) -> str:
    """Returns the id of the GPU on which the worker's engine shares its pages; empty if it shares none."""
    return info.data_addresses.get("cuda_ipc", "").rpartition("#")[2]
