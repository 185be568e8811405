"""Pairs of the ops that sequences have: attention over pages, the choice of tokens, adapters. Each beside torch's.

Knows nothing of models. What a kernel reads by address lies on the device, as in a step.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from functools import cached_property, partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.backends.cuda.device_ops import Call, DeviceOps, Pair
from baton.kernels.abi.native import I32, I64, P
from baton.kernels.abi.native import F as Float
from baton.kernels.linear.packed import PackedWeight, pack_bf16, quantize
from baton.kernels.lora.structs import MOST_SITE_RANKS, PANEL, LoraGroup, LoraPart, LoraSite
from baton.kernels.paged_attention.stored import PAGE
from baton.kernels.step.structs import CHOICE, ITEM, KV_TYPES, PagedKv

RANK, SCALE = 16, 2.0  # of the adapter that is tried
LORA_TILE = 8  # rows of an adapter that are computed together (rows.cuh)


class SequenceOps(DeviceOps):
    """Pairs of the ops that take sequences.

    The largest number of rows is a prompt's chunk of one sequence, any other a batch of decodes.
    """

    def pairs(self, rows: int) -> Iterator[Pair]:
        """Yields every op for ``rows`` rows, each beside torch's."""
        yield self._chunk(rows) if rows == max(self.sizes.rows) else self._decodes(rows)
        for kind, weight in self._heads.items():
            yield self._head(rows, kind, weight)
        yield self._adapter(rows)

    @cached_property
    def _heads(self) -> dict[str, PackedWeight]:
        """The head's weights, packed once: that takes a CPU seconds."""
        plain = torch.randn(self.sizes.vocab, self.sizes.hidden) * self.sizes.hidden**-0.5
        return {"bf16": pack_bf16(plain.bfloat16()), "int8": quantize(plain, 8, 0)}

    def _decodes(self, rows: int) -> Pair:
        """One query behind ``keys`` keys of a sequence each."""
        heads, _, head_dim = self.sizes.heads
        keys, values, own, out, q = self._attention(rows, self.sizes.keys, 1)
        asked = q.view(rows, heads, 1, head_dim)
        wanted = _attended(asked, keys, values, causal=False).view_as(out)
        peer = partial(_attended, asked.bfloat16(), keys.bfloat16(), values.bfloat16(), causal=False)
        return Pair(f"attention, {rows} decodes of {self.sizes.keys} keys", own, peer, out, wanted)

    def _chunk(self, rows: int) -> Pair:
        """The first ``rows`` tokens of a prompt."""
        keys, values, own, out, q = self._attention(1, rows, rows)
        asked = q.transpose(0, 1)[None]
        wanted = _attended(asked, keys, values, causal=True)[0].transpose(0, 1)
        peer = partial(_attended, asked.bfloat16(), keys.bfloat16(), values.bfloat16(), causal=True)
        return Pair(f"attention, a prompt's {rows} rows", own, peer, out, wanted)

    def _attention(self, sequences: int, keys: int, queries: int) -> tuple[Tensor, Tensor, Call, Tensor, Tensor]:
        """Returns keys and values (sequences, KV heads, keys, head_dim) float32, the call over bf16 pages that hold
        them in mixed order, and its result and its q, both (rows, heads, head_dim).
        """
        heads, kv_heads, head_dim = self.sizes.heads
        each = -(-keys // PAGE)
        pages = self.normal(sequences * each, 2, PAGE, kv_heads, head_dim).bfloat16()
        tables = torch.randperm(sequences * each, device=self.device).int().view(sequences, each)
        planes = pages[tables.long()].transpose(1, 2).reshape(sequences, 2, each * PAGE, kv_heads, head_dim)
        k, v = planes[:, :, :keys].float().transpose(2, 3).unbind(1)
        q = self.normal(sequences * queries, heads, head_dim)
        out, items = torch.empty_like(q), self._items(tables, keys - queries, queries)
        size = pages[0].numel() * pages.element_size()
        kv = PagedKv(pages.data_ptr(), size, 0, KV_TYPES["bfloat16"], kv_heads, head_dim)
        at = ctypes.addressof(kv), items.data_ptr(), sequences, heads, 0, head_dim**-0.5
        rest = q.data_ptr(), q.stride(0), out.data_ptr(), out.stride(0)
        kinds = (P, P, I32, I32, I32, Float, P, I64, P, I64)
        own = self.call("paged_attention", kinds, *at, *rest, alive=(kv, pages, tables, items, q))
        return k, v, own, out, q

    def _items(self, tables: Tensor, start: int, queries: int) -> Tensor:
        """Returns the structs of sequences of ``queries`` rows each behind ``start`` keys."""
        found = np.zeros(len(tables), ITEM)
        found["first"], found["queries"], found["start"] = np.arange(len(tables)) * queries, queries, start
        found["pages"] = tables.data_ptr() + np.arange(len(tables)) * tables.stride(0) * tables.element_size()
        return torch.from_numpy(found.view(np.uint8)).to(self.device)

    def _head(self, rows: int, kind: str, weight: PackedWeight) -> Pair:
        """The likeliest token of each row, compared by its logit."""
        x, wide = self.normal(rows, weight.k), weight.wide.to(self.device)
        choices = np.zeros(rows, CHOICE)
        choices["repetition"] = choices["top_p"] = 1.0
        out, logits = torch.from_numpy(choices.view(np.uint8)).to(self.device), F.linear(x, wide)
        struct, held = self.packed(weight)
        at = ctypes.addressof(struct), x.data_ptr(), x.stride(0), rows, out.data_ptr()
        own = self.call("lm_head", (P, P, I64, I32, P), *at, alive=(struct, held, x))
        half, wanted = wide.bfloat16(), logits.amax(-1)
        return Pair(
            f"head {kind}, {rows} rows",
            own,
            lambda: F.linear(x.bfloat16(), half).argmax(-1),
            out,
            wanted,
            partial(_logits_of, out, logits),
        )

    def _adapter(self, rows: int) -> Pair:
        """Represents what one adapter adds to all rows of a square layer."""
        n, x = self.sizes.hidden, self.normal(rows, self.sizes.hidden)
        a, b = (self.normal(*shape).bfloat16() * n**-0.5 for shape in ((RANK, n), (n, RANK)))
        panels = b.view(n // PANEL, PANEL, RANK).transpose(1, 2).contiguous()
        numbers, out = torch.arange(rows, dtype=torch.int32, device=self.device), torch.zeros_like(x)
        parts = self._put([LoraPart(a.data_ptr(), panels.data_ptr(), n, 0, n, RANK, 1, SCALE, 0)])
        sites = self._put([LoraSite(parts.data_ptr(), 1)])
        groups = self._put([LoraGroup(sites.data_ptr(), numbers.data_ptr(), rows)])
        tiles = 1 + rows // LORA_TILE
        sums = torch.empty(tiles * LORA_TILE * MOST_SITE_RANKS, device=self.device)
        at = groups.data_ptr(), 1, rows, 0, x.data_ptr(), x.stride(0), None, out.data_ptr(), out.stride(0)
        kinds, kept = (P, I64, I64, I64, P, I64, P, P, I64, P), (a, panels, numbers, parts, sites, groups, sums, x)
        own = self.call("lora_rows", kinds, *at, sums.data_ptr(), alive=kept)
        wanted = F.linear(F.linear(x, a.float()), b.float()) * SCALE
        peer = partial(_beside, x, a, b)
        return Pair(f"adapter of rank {RANK}, {rows} rows", own, peer, out, wanted, out.clone)

    def _put(self, structs: Sequence[ctypes.Structure]) -> Tensor:
        """Returns the bytes of ``structs`` on the device."""
        data = bytearray(b"".join(map(bytes, structs)))
        return torch.frombuffer(data, dtype=torch.uint8).to(self.device)


def _attended(q: Tensor, keys: Tensor, values: Tensor, causal: bool) -> Tensor:
    return F.scaled_dot_product_attention(q, keys, values, is_causal=causal, enable_gqa=True)


def _logits_of(choices: Tensor, logits: Tensor) -> Tensor:
    """Returns the logit of each row's chosen token; NaN where none was chosen."""
    at = CHOICE.fields["token"][1] if CHOICE.fields else 0
    tokens = choices.view(len(logits), CHOICE.itemsize)[:, at : at + 4].contiguous().view(torch.int32)[:, 0].long()
    found = logits.gather(1, tokens.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
    return found.where((tokens >= 0) & (tokens < logits.shape[1]), torch.nan)


def _beside(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return F.linear(F.linear(x.bfloat16(), a), b)
