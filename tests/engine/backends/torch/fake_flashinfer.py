"""FlashInfer's calls, with its signatures (0.6), computed by torch wherever the tensors are."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


class BatchDecodeWithPagedKVCacheWrapper:
    """Attends one query per sequence, page by page, in float32."""

    made = 0

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
    ) -> None:
        assert kv_layout == "NHD"
        assert float_workspace_buffer.dtype == torch.uint8
        type(self).made += 1

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        sm_scale: float | None = None,
    ) -> None:
        assert indptr.dtype == indices.dtype == last_page_len.dtype == torch.int32
        assert len(indptr) == len(last_page_len) + 1
        assert indptr[-1] == len(indices)
        self.pages = [indices[a:b].long() for a, b in pairwise(indptr.tolist())]
        self.lengths = [(len(p) - 1) * page_size + int(n) for p, n in zip(self.pages, last_page_len, strict=True)]
        self.shape, self.dtypes = (num_qo_heads, num_kv_heads, head_dim, page_size), (q_data_type, kv_data_type)
        self.window, self.softcap, self.scale = window_left, logits_soft_cap or 0.0, sm_scale or head_dim**-0.5

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        heads, kv_heads, head_dim, page_size = self.shape
        assert q.shape == (len(self.pages), heads, head_dim)
        assert (q.dtype, paged_kv_cache[0].dtype) == self.dtypes
        assert all(cache.shape[1:] == (page_size, kv_heads, head_dim) for cache in paged_kv_cache)
        assert paged_kv_cache[0].stride() == paged_kv_cache[1].stride()
        found = [self._one(q[at], *paged_kv_cache, at) for at in range(len(q))]
        return torch.stack(found).to(q.dtype)

    def _one(self, q: Tensor, keys: Tensor, values: Tensor, at: int) -> Tensor:
        heads, kv_heads, *_ = self.shape
        length = self.lengths[at]
        k, v = (plane[self.pages[at]].flatten(0, 1)[:length].float() for plane in (keys, values))
        k, v = (plane.repeat_interleave(heads // kv_heads, 1) for plane in (k, v))
        scores = torch.einsum("hd,thd->ht", q.float(), k) * self.scale
        if self.softcap:
            scores = self.softcap * (scores / self.softcap).tanh()
        if self.window >= 0:
            scores[:, : max(0, length - 1 - self.window)] = -torch.inf
        return torch.einsum("ht,thd->hd", scores.softmax(-1), v)


def top_k_renorm_probs(probs: Tensor, top_k: Tensor) -> Tensor:
    assert top_k.dtype == torch.int32
    least = torch.stack([row.topk(int(k)).values[-1] for row, k in zip(probs, top_k, strict=True)])
    return _renormalized(probs, least)


def top_p_renorm_probs(probs: Tensor, top_p: Tensor) -> Tensor:
    least = []
    for row, share in zip(probs, top_p, strict=True):
        falling = row.sort(descending=True).values
        least.append(falling[int((falling.cumsum(0) - falling < share * row.sum()).sum()) - 1])
    return _renormalized(probs, torch.stack(least))


def _renormalized(probs: Tensor, least: Tensor) -> Tensor:
    kept = probs.masked_fill(probs < least[:, None], 0.0)
    return kept / kept.sum(-1, keepdim=True)


sampling = SimpleNamespace(top_k_renorm_probs=top_k_renorm_probs, top_p_renorm_probs=top_p_renorm_probs)
