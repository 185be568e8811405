"""Reads and writes K and V in the formats of pages, as float32: the specification of kv.h's formats.

Knows nothing of sequences. A plane is [token 0..15][kv_head][head_dim] elements, then for int8 and fp8 [token
0..15][kv_head] float32 scales.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.kernels.paged_attention.reference import attend_by_parts

PAGE = 16  # tokens of a page
ELEMENTS = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "fp8_e4m3": torch.float8_e4m3fn,
}
SCALED = ("int8", "fp8_e4m3")
TOPS = {"int8": 127.0, "fp8_e4m3": 448.0}  # the largest value that each scaled dtype holds


def read_layer(
    memory: Tensor, pages: Tensor, layer: int, layers: int, kv_heads: int, head_dim: int, dtype: str
) -> tuple[Tensor, Tensor]:
    """Returns K and V of one layer, (16 n, kv_heads, head_dim) float32, of ``pages`` (n,) in ``memory`` (pages,
    page_bytes).
    """
    planes = memory.view(len(memory), layers, 2, -1)[pages.long(), layer]
    keys, values = (_read(planes[:, which], kv_heads, head_dim, dtype) for which in (0, 1))
    return keys, values


def quantized(rows: Tensor, dtype: str) -> Tensor:
    """Returns rows (…, head_dim) float32 as they read back after being stored in ``dtype``."""
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


def write_layer(
    memory: Tensor, at: tuple[Tensor, Tensor], layer: int, layers: int, kv: tuple[Tensor, Tensor], dtype: str
) -> None:
    """Stores K and V, both (n, kv_heads, head_dim) float32, at (pages, slots), both (n,), of layer ``layer``."""
    planes = memory.view(len(memory), layers, 2, -1)
    for which, rows in enumerate(kv):
        _write(planes[:, layer, which], *at, rows, dtype)


def attend_stored(
    q: Tensor,
    kv: tuple[Tensor, Tensor],
    queries: tuple[int, int],
    window: int,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Returns attention outputs of one sequence in the shape of q (n, heads, head_dim).

    ``kv`` are K and V of the keys 0 … start + n - 1; ``queries`` are (start, n); a row sees the keys up to its own
    position, or the last ``window`` of them if that isn't 0.
    """
    start, count = queries
    length, group = start + count, q.shape[1] // kv[0].shape[1]
    at, asked = torch.arange(length), torch.arange(start, length)[:, None]
    seen = (at <= asked) & ((at > asked - window) if window else (at >= 0))
    rows = q.transpose(0, 1)
    if softcap or sinks is not None:
        keys, values = (plane[None, :length].transpose(1, 2) for plane in kv)
        mask = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
        return attend_by_parts(rows[None], keys, values, mask, scale, softcap, sinks)[0].transpose(0, 1)
    keys, values = (plane[:length].transpose(0, 1).repeat_interleave(group, 0) for plane in kv)
    return F.scaled_dot_product_attention(rows, keys, values, attn_mask=seen, scale=scale).transpose(0, 1)


def _write(plane: Tensor, pages: Tensor, slots: Tensor, rows: Tensor, dtype: str) -> None:
    """Stores ``rows`` in ``plane`` (pages, plane bytes) uint8, a view of the pages."""
    count, kv_heads, head_dim = rows.shape
    kind, at = ELEMENTS[dtype], (pages * PAGE + slots).long()
    size = PAGE * kv_heads * head_dim * kind.itemsize
    scaled, scale = rows, None
    if dtype in SCALED:
        most, top = rows.abs().amax(-1, keepdim=True), TOPS[dtype]
        scaled, scale = torch.where(most > 0, rows * (top / most), torch.zeros(())).clamp(-top, top), most / top
    scaled = scaled.round() if dtype == "int8" else scaled
    elements = plane[:, :size].view(len(plane), PAGE, -1)
    elements[at // PAGE, at % PAGE] = scaled.to(kind).view(count, -1).view(torch.uint8)
    if scale is not None:
        plane[:, size:].view(len(plane), PAGE, -1)[at // PAGE, at % PAGE] = (
            scale[..., 0].contiguous().view(torch.uint8)
        )
