"""bench/gpu.py without a GPU: every call once, at sizes that the SIMT shim manages. No figure of it means anything.

What it finds are wrong shapes, buffers and arguments, so that a lent GPU's minutes don't go to a TypeError.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from baton.kernels.cuda import build
from baton.kernels.cuda.library import CudaLibrary
from bench.cuda import cases, clock, prompts, shapes, small, step
from bench.cuda.ops import Ops
from bench.cuda.rows import Ceilings, Row

TOP = Ceilings(3e12, 2.8e12, 8e14)  # anything: nothing is measured
MODEL = {"HIDDEN": 64, "INNER": 96, "VOCAB": 130, "HEADS": 4, "KV_HEADS": 2, "HEAD_DIM": 16, "LAYERS": 1}
OPS = {
    "rows": (3,),
    "decodes": ((2, 48),),
    "cascade": (3, 32, 16),
    "m": (1, 3),
    "tokens": 64,
    "ceilings": (1 << 16, 32),
    "flex": (2, 48),
}
SMALL = {
    "rows": (3,),
    "experts": {"tiny": (4, 2, 64, 48)},
    "expert_rows": (1, 3),
    "drafts": (2, 2, 48),
}
PROMPTS = {"m": (70, 520), "lengths": (48,)}
SHAPES = {
    "m": (1, 9, 70),
    "products": {"square": (80, 64), "N 520": (520, 64)},
    "groups": (2,),
    "decodes": ((1, 1), (3, 40)),
    "chunks": ((17, 0), (9, 30)),
}
STEP = {"hidden": 128, "inner": 128, "heads": 4, "kv_heads": 2, "head_dim": 32, "vocab": 130, "layers": 1}


@contextmanager
def tiny() -> Iterator[CudaLibrary]:
    """All parts at tiny sizes, on the CPU, over the shim; torch.compile left out. Raises BuildError."""
    changes: list[tuple[Any, dict[str, Any]]] = [
        (clock, {"DEVICE": "cpu", "PAST_L2": 1}),
        (cases, {**MODEL, "SIZES": OPS}),
        (small, {"SIZES": SMALL}),
        (prompts, {"SIZES": PROMPTS}),
        (shapes, {"SIZES": SHAPES}),
        (step, {"SHAPE": STEP, "LENGTH": 20, "CHUNK": 16, "SAMPLES": 2, "BATCHES": (1, 2)}),
        (torch, {"compile": lambda function, **_: function}),
    ]
    with ExitStack() as stack:
        for module, values in changes:
            stack.enter_context(mock.patch.multiple(module, **values))
        yield CudaLibrary(build.simt())


def parts(device: CudaLibrary) -> Iterator[Row]:
    """Every part that measures an op or a step, in ``tiny``."""
    ops = Ops(device)
    yield from cases.ceilings()[1]
    for part in (*cases.PARTS.values(), *small.PARTS.values(), *prompts.PARTS.values()):
        yield from part(ops, TOP)
    for _, make in shapes.parts(ops):
        yield from make()
    yield from step.steps(device, TOP)
