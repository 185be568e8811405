"""K and V as they lie in pages, read back as float32: the spec of kv.h's formats. Knows nothing of sequences.

plane = [token 0..15][kv_head][head_dim] elements, then for int8 and fp8 [token 0..15][kv_head] float32 scales
"""

from __future__ import annotations

import torch
from torch import Tensor

PAGE = 16
ELEMENTS = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "fp8_e4m3": torch.float8_e4m3fn,
}
SCALED = ("int8", "fp8_e4m3")
TOPS = {"int8": 127.0, "fp8_e4m3": 448.0}


def read_layer(
    memory: Tensor, pages: Tensor, layer: int, layers: int, kv_heads: int, head_dim: int, dtype: str
) -> tuple[Tensor, Tensor]:
    """memory (pages, page_bytes) uint8, pages (n,) -> ``layer``'s K and V, (16 n, kv_heads, head_dim) float32."""
    planes = memory.view(len(memory), layers, 2, -1)[pages.long(), layer]
    keys, values = (_read(planes[:, which], kv_heads, head_dim, dtype) for which in (0, 1))
    return keys, values


def quantized(rows: Tensor, dtype: str) -> Tensor:
    """rows (…, head_dim) float32 as they read back after being stored."""
    if dtype not in SCALED:
        return rows.to(ELEMENTS[dtype]).float()
    top = TOPS[dtype]
    most = rows.abs().amax(-1, keepdim=True)
    scaled = torch.where(most > 0, rows * (top / most), torch.zeros(())).clamp(-top, top)
    whole = scaled.round() if dtype == "int8" else scaled.to(ELEMENTS[dtype]).float()
    return whole * (most / top)


def _read(plane: Tensor, kv_heads: int, head_dim: int, dtype: str) -> Tensor:
    kind = ELEMENTS[dtype]
    size = PAGE * kv_heads * head_dim * kind.itemsize
    rows = plane[:, :size].contiguous().view(kind).view(-1, kv_heads, head_dim).float()
    if dtype in SCALED:
        rows = rows * plane[:, size:].contiguous().view(torch.float32).view(-1, kv_heads, 1)
    return rows
