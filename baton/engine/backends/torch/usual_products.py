"""Tries torch's own products on a card with an 8B's matrices in each form of quantized weights; keeps the choice.

Knows nothing of checkpoints. A worker tries its own model's weights at its first start, and their results at each
one: what is kept here is for `baton doctor` to tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from baton.engine.backends.cuda.gpu import Gpu
from baton.engine.backends.cuda.op_trials import Tell
from baton.engine.backends.torch.kept_choices import TriedWay, forget, keep
from baton.engine.backends.torch.product_trials import KIND, ProductChooser
from baton.kernels.linear.packed import PackedWeight, beside, pack_e4m3, quantize
from baton.kernels.linear.panels.layout import PANEL

NAME = "matrices of an 8B"  # the key of the record
SHAPES = ((6144, 4096), (4096, 4096), (28_672, 4096), (4096, 14_336))  # (n, k) of q, k and v; o; gate and up; down
GROUP = 32  # inputs per scale of int4


def try_usual(
    gpu: Gpu, device: str, tell: Tell = lambda _: None, shapes: tuple[tuple[int, int], ...] = SHAPES
) -> tuple[TriedWay, ...]:
    """Returns what multiplies by weights of each form and shape on ``device``, which is kept for ``gpu`` unless
    memory was lacking; earlier records of products are removed, so that workers try again. ``tell`` is called with
    what runs next. Raises RuntimeError if the card isn't usable any more.
    """
    forget(gpu, KIND)
    chooser = ProductChooser(torch.bfloat16, device)
    torch.manual_seed(1)
    for name, weight in _weights(shapes):
        tell(f"torch's product by {name}")
        chooser.way_of(weight)
        if device == "cuda":
            torch.cuda.synchronize()  # raises what a kernel did
            torch.cuda.empty_cache()
    if chooser.lasting:
        keep(gpu, KIND, NAME, chooser.lasting)
    return tuple(chooser.ways.values())


def _weights(shapes: tuple[tuple[int, int], ...]) -> Iterator[tuple[str, PackedWeight]]:
    """Yields random weights with their names: one panel of rows again and again, because rounding takes long."""
    forms: dict[str, Callable[[Tensor], PackedWeight]] = {
        "int8": lambda rows: quantize(rows, 8, 0),
        "fp8": lambda rows: pack_e4m3(rows.to(torch.float8_e4m3fn), torch.rand(len(rows)) + 0.5),
        "int4": lambda rows: quantize(rows, 4, GROUP),
    }
    for form, packed in forms.items():
        for n, k in shapes:
            whole = beside([packed(torch.randn(PANEL, k))] * (n // PANEL))
            assert whole is not None
            yield f"{n} x {k}, {form}", whole
