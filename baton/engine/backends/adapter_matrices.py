"""Reads a packed adapter's matrices as torch tensors, for the reference kernel ``lora``. Knows nothing of files."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from baton.engine.adapters.packed import Array, PackedAdapter, PackedPart
from baton.kernels.lora.reference import LoraMatrices
from baton.protos.errors import AdapterNotLoaded

Matrices = dict[int, tuple[LoraMatrices, ...]]  # by site


def require_held(adapter: str, held: Iterable[str]) -> None:
    """Raises AdapterNotLoaded unless ``adapter`` is empty or among ``held``."""
    if adapter and adapter not in held:
        raise AdapterNotLoaded(f"adapter {adapter!r} is not loaded here", "adapter_id")


def matrices_of(packed: PackedAdapter) -> Matrices:
    """Returns an adapter's matrices by site number; matrices A are views of its memory."""
    found: Matrices = {}
    for part in packed.parts:
        found[part.site.number] = (*found.get(part.site.number, ()), part_matrices(packed, part))
    return found


def part_matrices(packed: PackedAdapter, part: PackedPart) -> LoraMatrices:
    """Returns the matrices of one part of an adapter; matrix A is a view of its memory."""
    a, b = _tensor(packed.first(part)), _tensor(packed.plain_second(part))
    return LoraMatrices(a, b, part.scale, part.site.first, part.site.looked_up)


def _tensor(values: Array) -> Tensor:
    if values.dtype.itemsize == 4:
        return torch.from_numpy(values)
    return torch.from_numpy(values.view("int16")).view(torch.bfloat16)
