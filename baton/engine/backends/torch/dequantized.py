"""Converts packed weights to what torch's ops take, on a GPU without the engine's kernels: plain tensors, the forms
of torch's own products where these are chosen, or packed ones where a card lacks room.

Knows nothing of checkpoints. Activations are not quantized before plain weights, so results differ from those of
the packed forms by that rounding; they need the memory of the plain dtype.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor

from baton.engine.backends.torch.card_room import Packed, WeightSize, plan_packed
from baton.engine.backends.torch.packed_products import HeldExperts, PackedProduct
from baton.engine.backends.torch.product_trials import ProductChooser, form_bytes
from baton.engine.checkpoints.weights import Weights
from baton.engine.program.ops import Linear, LmHead
from baton.engine.program.program import Program
from baton.kernels.linear.packed import PackedWeight, one_of


def for_torch(
    program: Program,
    weights: Weights,
    dtype: torch.dtype,
    device: str,
    chooser: ProductChooser | None = None,
    packed: frozenset[str] = frozenset(),
) -> Weights:
    """Returns ``weights`` on ``device``: packed ones as ``chooser`` has them, else dequantized to ``dtype``, the
    experts of a layer concatenated again. Those named in ``packed`` take no more memory than they do: torch's own
    product has them if it is right, however slow, or they are dequantized for each product.
    """
    shapes, made = _Shapes.of(program), Weights()
    for name, weight in weights.items():
        if isinstance(weight, Tensor):
            made[name] = weight.to(device)
            continue
        held = chooser.held(weight, name in packed) if chooser is not None and name in shapes.multiplied else None
        count = shapes.experts.get(name, 1)
        each = shapes.rows[name] // count
        # no tensors, but what the runner on torch's ops takes in their place
        if held is not None:
            made[name] = cast(Tensor, held)
        elif name in packed and count > 1:
            made[name] = cast(Tensor, HeldExperts(weight, count, each, dtype, device))
        elif name in packed and name in shapes.multiplied:
            made[name] = cast(Tensor, PackedProduct(weight, dtype, device))
        else:
            made[name] = _rows(weight, count, each, dtype).to(device)
    return made


def packed_on(program: Program, weights: Weights, dtype: torch.dtype, chooser: ProductChooser, room: int) -> Packed:
    """Returns which of ``weights`` are to stay packed on a card where all may take ``room`` bytes. Those that
    torch's own products have are never among them.
    """
    shapes, beside, sizes = _Shapes.of(program), 0, list[WeightSize]()
    for name, weight in weights.items():
        if isinstance(weight, Tensor):
            beside += weight.nbytes
            continue
        own = chooser.bytes_of(weight) if name in shapes.multiplied else None
        wide = shapes.rows[name] * weight.k * dtype.itemsize
        if own is not None:
            beside += own
        elif name in shapes.multiplied or name in shapes.experts:
            sizes.append(WeightSize(name, max(weight.nbytes, form_bytes(weight)), wide))
        else:
            beside += wide
    return plan_packed(sizes, beside, room)


class _Shapes(NamedTuple):
    """Holds what a program says of its weights by name."""

    multiplied: frozenset[str]  # by a product alone
    experts: dict[str, int]  # in a layer's weight
    rows: dict[str, int]

    @classmethod
    def of(cls, program: Program) -> _Shapes:
        return cls(
            frozenset(op.weight for op in program.ops if isinstance(op, Linear | LmHead)),
            {name: op.experts for op in program.experts for name in (op.gate_up, op.down)},
            {weight.name: sum(shape[0] for shape in weight.shapes) for weight in program.weights},
        )


def _rows(whole: PackedWeight, count: int, n: int, dtype: torch.dtype) -> Tensor:
    """Returns all rows of a matrix, or of all experts one after the other, without the padding of panels."""
    if count == 1:
        return whole.dequantized(dtype)
    return torch.cat([one_of(whole, expert, count, n).dequantized(dtype) for expert in range(count)])
