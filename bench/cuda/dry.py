"""bench/gpu.py without a GPU: every call once, at sizes that the SIMT shim manages. No figure of it means anything.

What it finds are wrong shapes, buffers and arguments, so that a lent GPU's minutes don't go to a TypeError.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from baton.engine.backends.cuda.product_choice import Matrix
from baton.kernels.cuda import build
from baton.kernels.cuda.library import CudaLibrary
from bench.cuda import cases, products, prompts, shapes, small, step
from bench.cuda.extent import (
    Extent,
    FormSizes,
    MatrixSizes,
    OpSizes,
    PromptSizes,
    Shape,
    SmallSizes,
    StepSizes,
    using,
)
from bench.cuda.ops import Ops
from bench.cuda.rows import Ceilings, Row

TOP = Ceilings(3e12, 2.8e12, 8e14)  # anything: nothing is measured
TINY = Extent(
    device="cpu",
    past_l2=1,
    compile=lambda function: function,
    shape=Shape(hidden=64, inner=96, vocab=130, heads=4, kv_heads=2, head_dim=16, layers=1),
    ops=OpSizes(
        rows=(3,),
        decodes=((2, 48),),
        cascade=(3, 32, 16),
        m=(1, 3),
        tokens=64,
        ceilings=(1 << 16, 32),
        flex=(2, 48),
    ),
    small=SmallSizes(rows=(3,), experts={"tiny": (4, 2, 64, 48)}, expert_rows=(1, 3), drafts=(2, 2, 48)),
    prompts=PromptSizes(m=(70, 520), lengths=(80,)),
    forms=FormSizes(
        m=(1, 9, 70),
        products={"square": (80, 64), "N 520": (520, 64)},
        groups=(2,),
        decodes=((1, 1), (3, 40)),
        chunks=((17, 0), (66, 30)),
    ),
    matrices=MatrixSizes(of=(Matrix(64, 64, False), Matrix(64, 64, True)), rows=(8, 70)),
    step=StepSizes(
        shape=Shape(hidden=128, inner=128, vocab=130, heads=4, kv_heads=2, head_dim=32, layers=1),
        length=20,
        chunk=16,
        samples=2,
        batches=(1, 2),
    ),
)


@contextmanager
def tiny() -> Iterator[CudaLibrary]:
    """Makes all parts measure at tiny sizes on the CPU, over the shim, without compiling. Raises BuildError."""
    with using(TINY):
        yield CudaLibrary(build.simt())


def parts(device: CudaLibrary) -> Iterator[Row]:
    """Every part that measures an op or a step, in ``tiny``."""
    ops = Ops(device)
    yield from cases.ceilings()[1]
    for part in (*cases.PARTS.values(), *small.PARTS.values(), *prompts.PARTS.values(), *products.PARTS.values()):
        yield from part(ops, TOP)
    for _, make in shapes.parts(ops):
        yield from make()
    yield from step.steps(device, TOP)
