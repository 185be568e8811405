"""Defines torch.ops.baton.embedding, which looks token ids up in an embedding table.

Knows nothing of vocabularies' meaning.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton.kernels.abi.native import I32, I64, P
from baton.kernels.abi.torch_library import define, require, symbol
from baton.kernels.embedding import reference

CODES = {torch.float32: 0, torch.bfloat16: 1}  # common.h: Dtype


def _fake(tokens: Tensor, table: Tensor) -> Tensor:
    require(tokens.dim() == 1 and table.dim() == 2, "embedding takes tokens (rows,) and a table (vocab, hidden)")
    return table.new_empty((tokens.shape[0], table.shape[1]), dtype=torch.float32)


@define("embedding(Tensor tokens, Tensor table) -> Tensor", _fake)
def embedding(tokens: Tensor, table: Tensor) -> Tensor:
    """Returns the rows of ``table`` (vocab, hidden) for ``tokens`` (rows,), as (rows, hidden) float32.

    Raises ValueError for an id outside the table.
    """
    call, out = symbol("embedding", P, I64, P, I32, I64, P), _fake(tokens, table)
    outside = bool(len(tokens)) and not (int(tokens.min()) >= 0 and int(tokens.max()) < len(table))
    require(not outside, f"embedding: tokens are 0 to {len(table) - 1}")
    if call is None or table.device.type != "cpu" or table.dtype not in CODES or not table.is_contiguous():
        return reference.embedding(tokens.long(), table).float()
    ids = tokens.to(torch.int32).contiguous()
    call(ids.data_ptr(), len(ids), table.data_ptr(), CODES[table.dtype], table.shape[1], out.data_ptr())
    return out
