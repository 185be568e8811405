"""Decides whether KV can go from card to card, and says why it does or does not.

Knows nothing of streams; cards are known by their names.
"""

from __future__ import annotations

from baton.kv.memory.device_pages import DevicePages
from baton.kv.wire.channels import HALF_BYTES
from baton.protos.nouns import WorkerInfo


def by_card(ours: DevicePages | None, info: WorkerInfo, host_id: str, page_bytes: int) -> tuple[str, ...]:
    """Returns the transports by which blocks can go from card to card to the worker of ``info``; none where they
    can't.

    Both engines must share their pages on a card, and a block must fit: ``page_bytes`` is the size of ours.
    """
    if ours is None or _is_too_large(info, page_bytes):
        return ()
    if _card(info) == ours.card and host_id == info.host_id:
        return ("cuda_ipc",)
    return ("nccl",) if "nccl" in info.data_addresses else ()


def why(ours: DevicePages, info: WorkerInfo, best: str, page_bytes: int) -> str:
    """Returns in words why a worker that shares its pages on a card ships to the worker of ``info`` by
    ``best``.
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
    """A block for it is more than either way has room for, which is a page of ours, or more."""
    return info.layout.page_bytes > max(HALF_BYTES, page_bytes)


def _card(info: WorkerInfo) -> str:
    """Where its engine shares pages; empty where it doesn't."""
    return info.data_addresses.get("cuda_ipc", "").rpartition("#")[2]
