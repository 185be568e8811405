"""Runs speculative_accept natively, for one sequence or a batch. Knows nothing of who drafted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from baton.kernels.abi import native
from baton.kernels.abi.native import I32, I64, NativeFunction, P
from baton.kernels.speculative_accept import reference
from baton.kernels.speculative_accept.reference import Rejection

ARGUMENTS = (P, I32, I64)
# accept.h: Draft
DRAFT = np.dtype(
    [
        *((name, "<u8") for name in ("tokens", "chosen", "target", "proposed", "accept", "draw", "emitted")),
        *((name, "<i8") for name in ("chosen_stride", "target_stride", "proposed_stride")),
        *(("temperature", "<f4"), ("count", "<i4"), ("accepted", "<i4")),
    ],
    align=True,
)


def speculative_accept(tokens: Tensor, by: Tensor | Rejection) -> tuple[int, int]:
    """Returns the number of accepted draft tokens of one sequence and the token after them, -1 without a finite
    logit.

    It is the reference's function in float32.
    """
    if native.library() is None:
        return reference.speculative_accept(tokens, by)
    emitted, accepted = run(native.function("speculative_accept", *ARGUMENTS), [(tokens, by)])[0]
    return accepted, int(emitted[accepted])


def run(
    function: NativeFunction, sequences: Sequence[tuple[Tensor, Tensor | Rejection]]
) -> list[tuple[Tensor, int]]:
    """Calls ``function``, a library's baton_speculative_accept, once for all sequences.

    Returns for each the emitted tokens and the number of accepted drafts.
    """
    drafts, kept, found = np.zeros(len(sequences), DRAFT), [], []

    def point(draft: np.void, field: str, value: Tensor, dtype: torch.dtype) -> Tensor:
        kept.append(value.to(dtype) if value.stride()[-1:] in ((), (1,)) else value.to(dtype).contiguous())
        draft[field] = kept[-1].data_ptr()
        return kept[-1]

    vocab = 1
    for draft, (tokens, by) in zip(drafts, sequences, strict=True):
        point(draft, "tokens", tokens, torch.int32)
        draft["count"] = len(tokens)
        found.append(point(draft, "emitted", torch.zeros(len(tokens) + 1), torch.int32))
        if isinstance(by, Tensor):
            chosen = point(draft, "chosen", by, torch.int32)
            draft["chosen_stride"] = chosen.stride(0) * 4
            continue
        vocab = by.target.shape[1]
        draft["target_stride"] = point(draft, "target", by.target, torch.float32).stride(0)
        if by.proposed is not None:
            draft["proposed_stride"] = point(draft, "proposed", by.proposed, torch.float32).stride(0)
        point(draft, "accept", by.accept, torch.float64)
        point(draft, "draw", by.draw, torch.float64)
        draft["temperature"] = by.temperature
    function(drafts.ctypes.data, len(drafts), vocab)
    return [(emitted, int(draft["accepted"])) for emitted, draft in zip(found, drafts, strict=True)]
