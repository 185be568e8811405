"""Calls FlashInfer's kernels (https://docs.flashinfer.ai): decodes' attention over pages, and filters of a draw.

Knows nothing of plans, or of whether its kernels are right and faster here (``card_ops.py`` tries them). The
library is optional, the extra [gpu]. Its own draws are not used: their randomness isn't keyed by sequence and
position, so an answer would depend on its batch and change with a handoff.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Protocol, cast

import msgspec
import torch
from torch import Tensor

from baton.engine.backends.torch.decode_tables import DecodeTables
from baton.engine.program.ops import PagedAttention
from baton.engine.program.program import Program
from baton.kernels.sample.reference import by_inverse, keep_min_p
from baton.protos.nouns import BLOCK_TOKENS

NAME = "flashinfer"
LAYOUT = "NHD"  # of a page: token, head, dim
WORKSPACE_BYTES = 128 << 20  # as its documentation recommends
TENSOR_CORES_FROM = 4  # query heads per KV head: with fewer, most of an instruction's rows would be empty


class PagedDecode(Protocol):
    """FlashInfer's BatchDecodeWithPagedKVCacheWrapper, as far as it is called."""

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
        window_left: int,
        logits_soft_cap: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        sm_scale: float,
    ) -> None:
        """Prepares calls of ``run`` for these tables; ``window_left`` is -1 for no window."""

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        """Returns attention outputs in the shape of q, (sequences, heads, head_dim)."""


class Filters(Protocol):
    """FlashInfer's module ``sampling``, as far as it is called; probabilities are (rows, vocab) float32."""

    def top_k_renorm_probs(self, probs: Tensor, top_k: Tensor) -> Tensor:
        """Returns each row's ``top_k`` largest probabilities, renormalized, the others 0."""

    def top_p_renorm_probs(self, probs: Tensor, top_p: Tensor) -> Tensor:
        """Returns each row's largest probabilities whose sum reaches ``top_p``, renormalized, the others 0."""


class FlashInfer(Protocol):
    """The library, as far as it is called."""

    sampling: Filters

    def BatchDecodeWithPagedKVCacheWrapper(
        self, float_workspace_buffer: Tensor, kv_layout: str, *, use_tensor_cores: bool
    ) -> PagedDecode:
        """Returns what attends decodes, with memory for its partial results."""


def imported() -> FlashInfer | None:
    """Returns the library; None if it isn't installed. Raises whatever its import raises else."""
    try:
        found = import_module(NAME)
    except ModuleNotFoundError as error:
        if error.name != NAME:
            raise
        return None
    import_module(f"{NAME}.sampling")
    return cast(FlashInfer, found)


class AttentionShape(msgspec.Struct, frozen=True):
    """The heads of a program, its KV's dtype, and its forms of attention: window and softcap, 0 for none."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: str  # torch's name
    scale: float
    forms: tuple[tuple[int, float], ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        """Returns the dtype of queries, keys and values."""
        found = getattr(torch, self.dtype)
        assert isinstance(found, torch.dtype)
        return found


def shape_of(program: Program, dtype: torch.dtype) -> AttentionShape | None:
    """Returns the attention of ``program`` over KV of ``dtype``; None if FlashInfer has no form for some of it."""
    found = [op for op in program.ops if isinstance(op, PagedAttention)]
    if not found or any(op.sinks for op in found) or dtype not in (torch.bfloat16, torch.float16):
        return None
    forms = tuple(sorted({(op.window, op.softcap) for op in found}))
    name = str(dtype).removeprefix("torch.")
    return AttentionShape(program.heads, program.kv_heads, program.head_dim, name, program.scale, forms)


class FlashInferDecode:
    """Implements ``DecodeAttention`` by FlashInfer, for a program of ``shape`` on ``device``."""

    def __init__(self, library: FlashInfer, shape: AttentionShape, device: str) -> None:
        self._shape = shape
        room = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)  # of one call at a time
        by_matrices = shape.heads // shape.kv_heads >= TENSOR_CORES_FROM
        make = library.BatchDecodeWithPagedKVCacheWrapper
        self._calls = {form: make(room, LAYOUT, use_tensor_cores=by_matrices) for form in shape.forms}

    def plan(self, tables: dict[int, DecodeTables]) -> None:
        """Prepares a step's layers; ``tables`` are by window."""
        shape, dtype = self._shape, self._shape.torch_dtype
        for (window, softcap), call in self._calls.items():
            call.plan(
                *tables[window],
                shape.heads,
                shape.kv_heads,
                shape.head_dim,
                BLOCK_TOKENS,
                window_left=window - 1,  # tokens before its own; -1: all
                logits_soft_cap=softcap,
                q_data_type=dtype,
                kv_data_type=dtype,
                sm_scale=shape.scale,
            )

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, window: int, softcap: float) -> Tensor:
        """Returns attention outputs (sequences, heads, head_dim); keys and values are a layer's pages."""
        return self._calls[window, softcap].run(q.contiguous(), (keys, values))


class FlashInferDraw:
    """Draws tokens as ``kernels.sample`` does, by each row's own number, with FlashInfer's filters of top_k and
    top_p.
    """

    def __init__(self, filters: Filters) -> None:
        self._filters = filters

    def __call__(
        self, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor
    ) -> Tensor:
        """Returns token ids (rows,) int64; the arguments are those of ``kernels.sample``."""
        return by_inverse(self.kept(logits, temperature, top_k, top_p, min_p), uniform)

    def kept(self, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
        """Returns the probabilities (rows, vocab) that the filters keep, those of a row not always of sum 1."""
        probs = torch.softmax(logits / temperature[:, None], -1)
        some = (top_k > 0) & (top_k < logits.shape[1])
        probs = _where(some, probs, top_k.to(torch.int32), self._filters.top_k_renorm_probs)
        probs = _where(top_p < 1, probs, top_p, self._filters.top_p_renorm_probs)
        return keep_min_p(probs, min_p)


def _where(asked: Tensor, probs: Tensor, bound: Tensor, kept: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Returns ``probs`` with the rows that have asked for it filtered."""
    if not bool(asked.any()):
        return probs
    rows = asked.nonzero().squeeze(1)
    return probs.index_copy(0, rows, kept(probs[rows].contiguous(), bound[rows].contiguous()))
