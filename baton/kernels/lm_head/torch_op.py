"""Defines torch.ops.baton.lm_head: projects to the vocabulary and samples each row's token, without storing logits.

Knows nothing of seeds: each row brings its own uniform random number. Penalties, masks and bans are only in the
native step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from baton.kernels.abi.native import I32, I64, P
from baton.kernels.abi.torch_library import define, dense, require, runs_natively, symbol
from baton.kernels.linear.packed import E4M3
from baton.kernels.linear.torch_op import PACKED, PARTS, by_reference, whole
from baton.kernels.sample.reference import sample
from baton.kernels.step.structs import CHOICE

FIELDS = ("temperature", "top_k", "top_p", "min_p", "uniform")


def _fake(x: Tensor, *rest: Any) -> Tensor:
    require(x.dim() == 2 and x.shape[1] == rest[7], f"lm_head: x is (rows, {rest[7]})")
    for name, values in zip(FIELDS, rest[PARTS:], strict=True):
        require(values.shape == x.shape[:1], f"lm_head: {name} is (rows,)")
    return x.new_empty((x.shape[0],), dtype=torch.int64)


@define(f"lm_head(Tensor x, {PACKED}, {', '.join(f'Tensor {name}' for name in FIELDS)}) -> Tensor", _fake)
def lm_head(x: Tensor, *rest: Any) -> Tensor:
    """Returns tokens (rows,) int64 for x (rows, k), normed; ``rest`` are a packed weight's ``parts`` and FIELDS
    (rows,).

    A row without a finite logit gets -1. Temperature 0 takes the likeliest token, others are drawn as by
    ``sample``.
    """
    call = symbol("lm_head", P, P, I64, I32, P)
    _fake(x, *rest)
    weight, fields = whole(rest[:PARTS]), dict(zip(FIELDS, rest[PARTS:], strict=True))
    if call is None or weight.kind == E4M3 or not runs_natively(x):
        return _by_reference(by_reference(x, weight, None).float(), **fields)
    choices, rows = np.zeros(len(x), CHOICE), dense(x)
    choices["repetition"] = 1.0
    for name, values in fields.items():
        choices[name] = values.numpy()
    call(weight.address, rows.data_ptr(), rows.stride(0), len(rows), choices.ctypes.data)
    return torch.from_numpy(choices["token"].astype(np.int64))


def _by_reference(logits: Tensor, temperature: Tensor, **fields: Tensor) -> Tensor:
    cold = temperature <= 0
    drawn = sample(logits, temperature.masked_fill(cold, 1.0), **fields)
    found = torch.where(cold, logits.argmax(-1), drawn)
    return found.masked_fill(~logits.amax(-1).isfinite(), -1)
