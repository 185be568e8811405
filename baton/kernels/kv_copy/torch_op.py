"""Defines torch.ops.baton.kv_pack and kv_unpack: scattered pages to one tensor and back, with each page's XXH3-64.

Knows nothing of frames or leases. Checksums are uint64 values whose bits are stored as int64.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from baton.kernels.abi.torch_library import define, require
from baton.kernels.kv_copy.cpu import kv_copy


def _packed(memory: Tensor, pages: Tensor) -> tuple[Tensor, Tensor]:
    require(memory.dim() == 2 and memory.dtype == torch.uint8, "kv_pack: memory is (pages, page_bytes) uint8")
    require(pages.dim() == 1, "kv_pack: pages are (count,)")
    count = pages.shape[0]
    return memory.new_empty((count, memory.shape[1])), memory.new_empty((count,), dtype=torch.int64)


def _sums(memory: Tensor, pages: Tensor, packed: Tensor) -> Tensor:
    _, sums = _packed(memory, pages)
    require(packed.dtype == torch.uint8, "kv_unpack: packed is uint8")
    require(packed.shape == (pages.shape[0], memory.shape[1]), "kv_unpack: packed is (count, page_bytes)")
    return sums


@define("kv_pack(Tensor memory, Tensor pages) -> (Tensor, Tensor)", _packed)
def kv_pack(memory: Tensor, pages: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the pages numbered ``pages`` (count,) of ``memory`` (pages, page_bytes) uint8, and their checksums
    (count,).
    """
    packed, _ = _packed(memory, pages)
    return packed, _copied(_rows(packed), _pages(memory, pages), memory.shape[1])


@define("kv_unpack(Tensor(a!) memory, Tensor pages, Tensor packed) -> Tensor", _sums)
def kv_unpack(memory: Tensor, pages: Tensor, packed: Tensor) -> Tensor:
    """Writes ``packed`` (count, page_bytes) to the pages of ``memory``; returns the checksums of what was written,
    (count,).
    """
    _sums(memory, pages, packed)
    kept = packed.contiguous()
    return _copied(_pages(memory, pages), _rows(kept), memory.shape[1])


def _copied(to: list[int], source: list[int], size: int) -> Tensor:
    return torch.from_numpy(np.array(kv_copy(to, source, size), np.uint64).view(np.int64))


def _pages(memory: Tensor, pages: Tensor) -> list[int]:
    require(
        memory.device.type == "cpu" and memory.stride(1) == 1, "kv_pack: memory lies in host memory, row by row"
    )
    asked = pages.tolist()
    require(all(0 <= page < len(memory) for page in asked), f"kv_pack: pages are 0 to {len(memory) - 1}")
    return [memory.data_ptr() + page * memory.stride(0) for page in asked]


def _rows(tensor: Tensor) -> list[int]:
    return [tensor.data_ptr() + row * tensor.shape[1] for row in range(len(tensor))]
