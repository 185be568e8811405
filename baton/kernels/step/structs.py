"""The structs of the native step, and how its function is called. Torch-free.

Knows nothing of programs or plans. They mirror step.h, lm_head.h, attention.h and kv.h field by field.
"""

from __future__ import annotations

import ctypes
from functools import cache

import numpy as np

from baton.kernels.abi import native
from baton.kernels.abi.native import I32, I64, F, NativeFunction, P

EMBED, RMS_NORM, LINEAR, ROPE_APPEND, ATTENTION, SWIGLU, LM_HEAD, MOE = range(8)  # step.h: OpKind
FOREIGN = -1  # the kind of an op that the native step doesn't run
# forms.h: FormKind
EMBED_SCALED, ADD, NORM_PART, ROPE_PART, ATTENTION_FORM, GEGLU, BIASED_MOE, LM_HEAD_CAPPED = range(64, 72)
LINEAR_F32 = 100  # the kind of float32 weights: dense.h's
LINEAR_F16 = 101  # of float16 ones: narrow_forms.h's
PANEL = 64  # rows of a panel of weights
KV_TYPES = {"float32": 0, "bfloat16": 1, "int8": 2, "fp8_e4m3": 3, "float16": 4}  # kv.h: KvType

# attention.h: AttentionItem
ITEM = np.dtype([("first", "<i8"), ("pages", "<u8"), ("queries", "<i4"), ("start", "<i4")], align=True)
# lm_head.h: Choice
CHOICE = np.dtype(
    [
        *((name, "<u8") if name != "uniform" else (name, "<f8") for name in ("logits", "uniform", "history")),
        *((name, "<u8") for name in ("bias_ids", "bias", "allowed", "banned")),
        *((name, "<i4") for name in ("history_count", "prompt_count", "bias_count", "banned_count")),
        *((name, "<f4") for name in ("temperature", "repetition", "frequency", "presence")),
        ("top_k", "<i4"),
        ("top_p", "<f4"),
        ("min_p", "<f4"),
        ("token", "<i4"),
    ],
    align=True,
)


class Op(ctypes.Structure):
    """Mirrors Op of step.h."""

    _fields_ = [
        *((name, I32) for name in ("kind", "input", "delta", "output", "layer", "window", "table_dtype")),
        ("eps", F),
        *((name, P) for name in ("table", "weight", "norm", "bias", "q_norm", "k_norm")),
    ]


class AttentionForm(ctypes.Structure):
    """Mirrors AttentionForm of paged_attention/form.h."""

    _fields_ = [("softcap", F), ("sinks", P)]


class Model(ctypes.Structure):
    """Mirrors Model of step.h."""

    _fields_ = [
        ("ops", P),
        ("widths", P),
        *((name, I32) for name in ("registers", "heads", "kv_heads", "head_dim")),
        ("hidden", I64),
        ("scale", F),
    ]


class Step(ctypes.Structure):
    """Mirrors Step of step.h."""

    _fields_ = [
        *((name, P) for name in ("tokens", "items", "sampled", "choices", "angles", "pages", "arena")),
        *((name, I64) for name in ("rows", "page_bytes", "layer_bytes", "angles_stride")),
        *((name, I32) for name in ("item_count", "sampled_count", "kv_type", "group_count")),
        ("groups", P),
    ]


class PagedKv(ctypes.Structure):
    """Mirrors PagedKv of kv.h."""

    _fields_ = [
        ("pages", P),
        ("page_bytes", I64),
        ("layer_offset", I64),
        *((name, I32) for name in ("type", "kv_heads", "head_dim")),
    ]


@cache
def run_step() -> NativeFunction:
    """Returns baton_step(model, step, from, to). Raises RuntimeError if there is no native library."""
    return native.function("step", P, P, I32, I32)
