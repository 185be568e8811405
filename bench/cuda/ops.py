"""The ops' C symbols called on torch's tensors of a GPU. Knows nothing of what is measured or with what.

Every function returns a call without arguments, which launches on the stream that is current when it is called.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from baton.kernels.abi.native import I32, I64, F, P
from baton.kernels.cuda.library import CudaLibrary
from baton.kernels.linear.packed import PackedMatrixStruct, PackedWeight
from baton.kernels.moe.native import Experts
from baton.kernels.paged_attention.native import page_bytes
from baton.kernels.speculative_accept.cpu import DRAFT
from baton.kernels.step.structs import CHOICE, ITEM, KV_TYPES, PagedKv
from bench.cuda.clock import Call, stream
from bench.cuda.extent import used

GROUP = np.dtype([("first", "<i4"), ("count", "<i4"), ("keys", "<i4")])  # cascade.h: PrefixGroup


PROMPT_QUERIES = 64  # rows of an item from which on ``Ops.prompt`` computes it (prompt_attention/prompt.h)


class Ops:
    """Makes timed calls of a loaded CUDA library's ops."""

    def __init__(self, device: CudaLibrary) -> None:
        self.device, self._library, self.rehearsal = device, device.library, device.rehearsal

    def call(self, name: str, kinds: Sequence[Any], *arguments: Any, alive: object = ()) -> Call:
        """``baton_name`` with a stream behind; raises where it is refused. ``alive`` lives as long as the call."""
        function: Callable[..., int] = ctypes.CFUNCTYPE(I32, *kinds, P)((f"baton_{name}", self._library))

        def run(kept: object = alive) -> None:
            if status := function(*arguments, stream()):
                raise RuntimeError(f"baton_{name}: status {status}")

        return run

    def rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, out: Tensor) -> Call:
        """Returns a call that computes x += delta, then out = norm(x) times weight."""
        at = x.data_ptr(), delta.data_ptr(), weight.data_ptr(), 1e-5, *x.shape, out.data_ptr()
        return self.call("rms_norm", (P, P, P, F, I64, I64, P), *at, alive=(x, delta, weight, out))

    def swiglu(self, gate_up: Tensor, out: Tensor) -> Call:
        """out = silu(gate) x up."""
        at = gate_up.data_ptr(), *out.shape, out.data_ptr()
        return self.call("swiglu", (P, I64, I64, P), *at, alive=(gate_up, out))

    def rounded_norm(
        self, x: Tensor, delta: Tensor, weight: Tensor, rounding: int, out: Tensor, scales: Tensor
    ) -> Call:
        """Returns a call that computes x += delta, then norm(x) times weight into ``out``: as int8 (``rounding``
        1) or e4m3 (2), both with ``scales``, or as bf16 (3).
        """
        at = x.data_ptr(), delta.data_ptr(), weight.data_ptr(), 1e-5, *x.shape, rounding, out.data_ptr()
        kinds, kept = (P, P, P, F, I64, I64, I32, P, P), (x, delta, weight, out, scales)
        return self.call("rms_norm_quantized", kinds, *at, scales.data_ptr(), alive=kept)

    def embedding(self, tokens: Tensor, table: Tensor, out: Tensor) -> Call:
        """Rows of a bf16 table, widened."""
        at = tokens.data_ptr(), len(tokens), table.data_ptr(), 1, table.shape[1], out.data_ptr()
        return self.call("embedding", (P, I64, P, I32, I64, P), *at, alive=(tokens, table, out))

    def linear(self, weight: DeviceWeight, x: Tensor, out: Tensor, gated: bool = False) -> Call:
        """out = x · weightᵀ, float32 or bf16 on both sides; ``gated``: silu of the first half x the second."""
        codes = {torch.float32: 0, torch.bfloat16: 1}
        at = weight.address, x.data_ptr(), codes[x.dtype], x.stride(0), len(x), None
        rest = out.data_ptr(), codes[out.dtype], out.stride(0)
        name = "linear_swiglu" if gated else "linear"
        return self.call(name, (P, P, I32, I64, I64, P, P, I32, I64), *at, *rest, alive=(weight, x, out))

    def moe(self, experts: Experts, x: Tensor, logits: Tensor, out: Tensor) -> Call:
        """Rows through their experts."""
        struct = experts.struct
        at = ctypes.addressof(struct), x.data_ptr(), x.stride(0), logits.data_ptr(), len(x), out.data_ptr()
        kept = (struct, experts, x, logits, out)
        return self.call("moe", (P, P, I64, P, I64, P, I64), *at, out.stride(0), alive=kept)

    def accept(self, drafts: Tensor, vocab: int, kept: object) -> Call:
        """Returns a call that counts the drafted tokens that are accepted; ``drafts`` are as ``draft_table`` makes
        them.
        """
        at = drafts.data_ptr(), len(drafts) // DRAFT.itemsize, vocab
        return self.call("speculative_accept", (P, I32, I64), *at, alive=(drafts, kept))

    def dense(self, weight: DeviceWeight, x: Tensor, out: Tensor) -> Call:
        """out = x · weightᵀ, float rows."""
        at = weight.address, x.data_ptr(), x.stride(0), len(x), None, out.data_ptr(), out.stride(0)
        return self.call("dense", (P, P, I64, I64, P, P, I64), *at, alive=(weight, x, out))

    def attention(self, kv: KvPool, q: Tensor, items: Tensor, out: Tensor) -> Call:
        """q (rows, heads, head_dim); items as ``item_table`` makes them."""
        return self._attention("paged_attention", kv, q, items, out)

    def prompt(self, kv: KvPool, q: Tensor, items: Tensor, out: Tensor) -> Call:
        """Does the same for items of PROMPT_QUERIES rows or more alone, by the kernel of long chunks."""
        return self._attention("prompt_attention", kv, q, items, out)

    def prompt_by_mma(self, call: Call) -> Call:
        """Returns ``call`` of ``prompt`` by mma.sync, whatever form the library would choose for it."""
        choose = self.call("prompt_warp_groups", (I32,), 0), self.call("prompt_warp_groups", (I32,), 1)

        def run() -> None:
            choose[0]()
            try:
                call()
            finally:
                choose[1]()

        return run

    def _attention(self, name: str, kv: KvPool, q: Tensor, items: Tensor, out: Tensor) -> Call:
        count, scale = len(items) // ITEM.itemsize, kv.head_dim**-0.5
        at = kv.address, items.data_ptr(), count, q.shape[1], 0, scale, q.data_ptr(), q.stride(0)
        kinds = (P, P, I32, I32, I32, F, P, I64, P, I64)
        return self.call(name, kinds, *at, out.data_ptr(), out.stride(0), alive=(kv, q, items, out))

    def cascade(self, kv: KvPool, q: Tensor, items: Tensor, groups: Tensor, out: Tensor) -> Call:
        """Does the same with groups (int32: first, count, keys) whose items begin with the same pages."""
        count, scale = len(items) // ITEM.itemsize, kv.head_dim**-0.5
        kinds = (P, P, I32, P, I32, I32, F, P, I64, I64, P, I64)
        at = kv.address, items.data_ptr(), count, groups.data_ptr(), groups.numel() // 3, q.shape[1], scale
        rest = q.data_ptr(), q.stride(0), len(q), out.data_ptr(), out.stride(0)
        return self.call("cascade_attention", kinds, *at, *rest, alive=(kv, q, items, groups, out))

    def append(self, kv: KvPool, qkv: Tensor, items: Tensor, angles: Tensor) -> Call:
        """qkv (rows, heads + 2 kv_heads, head_dim), rotated and stored."""
        heads, count = qkv.shape[1] - 2 * kv.kv_heads, len(items) // ITEM.itemsize
        at = kv.address, items.data_ptr(), count, heads, angles.data_ptr(), angles.stride(0), None, None, 1e-5
        kinds = (P, P, I32, I32, P, I64, P, P, F, P)
        return self.call("rope_append", kinds, *at, qkv.data_ptr(), alive=(kv, qkv, items, angles))

    def head(self, weight: DeviceWeight, x: Tensor, choices: Tensor) -> Call:
        """The choice of each row's token; choices as ``greedy`` or ``drawn`` make them."""
        at = weight.address, x.data_ptr(), x.stride(0), len(x), choices.data_ptr()
        return self.call("lm_head", (P, P, I64, I32, P), *at, alive=(weight, x, choices))

    def kv_copy(self, to: Tensor, source: Tensor, size: int, sums: Tensor) -> Call:
        """Blocks of ``size`` bytes at the addresses in ``source`` to those in ``to``, hashed on the way."""
        at = to.data_ptr(), source.data_ptr(), len(source), size, sums.data_ptr()
        return self.call("kv_copy", (P, P, I64, I64, P), *at, alive=(to, source, sums))


class DeviceWeight:
    """A packed weight on the GPU: its struct on the host."""

    def __init__(self, weight: PackedWeight) -> None:
        tensors = (weight.data, weight.scales, weight.mins, weight.row_scale)
        self._kept = [None if tensor is None else tensor.to(used().device) for tensor in tensors]
        places = (None if tensor is None else tensor.data_ptr() for tensor in self._kept)
        self._struct = PackedMatrixStruct(weight.kind, weight.group, weight.n, weight.k, *places)
        self.address, self.nbytes = ctypes.addressof(self._struct), weight.nbytes


class KvPool:
    """Pages of one layer, random bits in them that are numbers."""

    def __init__(self, pages: int, dtype: str, kv_heads: int, head_dim: int) -> None:
        size = page_bytes(dtype, kv_heads, head_dim)
        # Bytes below 0x40 are small finite numbers in every format: bf16, int8, e4m3 and the float32 of scales.
        self.memory = torch.randint(0, 0x40, (pages, size), dtype=torch.uint8, device=used().device)
        self.dtype, self.kv_heads, self.head_dim, self.page_bytes = dtype, kv_heads, head_dim, size
        self._struct = PagedKv(self.memory.data_ptr(), size, 0, KV_TYPES[dtype], kv_heads, head_dim)
        self.address = ctypes.addressof(self._struct)


def item_table(tables: Tensor, starts: Sequence[int], queries: int = 1) -> Tensor:
    """Items of ``queries`` rows each behind starts tokens; tables (items, pages) int32, kept by the caller."""
    found = np.empty(len(starts), ITEM)
    found["first"], found["queries"] = np.arange(len(starts)) * queries, queries
    found["start"] = starts
    found["pages"] = tables.data_ptr() + np.arange(len(starts)) * tables.stride(0) * 4
    return torch.from_numpy(found.view(np.uint8)).to(used().device)


def greedy(rows: int, temperature: float = 0.0) -> Tensor:
    """Choices of the likeliest token, or drawn ones."""
    found = np.zeros(rows, CHOICE)
    found["repetition"] = found["top_p"] = 1.0
    found["temperature"], found["uniform"] = temperature, np.linspace(0.1, 0.9, rows)
    return torch.from_numpy(found.view(np.uint8)).to(used().device)


def draft_table(rows: dict[str, Tensor], temperature: float = 1.0) -> Tensor:
    """Drafts of one batch: ``tokens`` (batch, count), ``emitted`` (batch, count + 1) int32. Then ``chosen``, as
    emitted, or float32 ``target`` (batch, count + 1, vocab) and ``proposed`` (batch, count, vocab), float64
    ``accept`` and ``draw``.
    """
    batch, count = rows["tokens"].shape
    found = np.zeros(batch, DRAFT)
    for name, tensor in rows.items():
        found[name] = tensor.data_ptr() + np.arange(batch) * tensor.stride(0) * tensor.element_size()
    for name in ("target", "proposed"):
        if name in rows:
            found[f"{name}_stride"] = rows[name].stride(1)
    found["chosen_stride"], found["count"], found["temperature"] = 4, count, temperature
    return torch.from_numpy(found.view(np.uint8)).to(used().device)
