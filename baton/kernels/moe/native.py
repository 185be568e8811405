"""Calls the native moe directly, for tests and measurements. Knows nothing of models."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.kernels.abi.native import BF16, F32, I64, P, declare
from baton.kernels.linear.packed import PackedWeight, beside, one_of
from baton.kernels.linear.packed_floats import pack_floats, unpack_f32
from baton.kernels.moe.reference import ExpertGate, Matrices
from baton.kernels.step.structs import LINEAR_F16, LINEAR_F32

PACKED = 100  # packed.h: MOE_PACKED
OP_MOE_ADAPTED = 98  # adapted.h: of a native step


class ExpertsStruct(ctypes.Structure):
    """Mirrors Moe of moe.h."""

    _fields_ = (
        *(("gate_up", ctypes.c_void_p), ("down", ctypes.c_void_p)),
        *(("hidden", ctypes.c_int64), ("inner", ctypes.c_int64)),
        *((name, ctypes.c_int32) for name in ("experts", "chosen", "renormalise", "dtype")),
    )


class BiasedMoeStruct(ctypes.Structure):
    """Mirrors BiasedMoe of form.h."""

    _fields_ = (
        ("moe", ExpertsStruct),
        *(("gate_up_bias", ctypes.c_void_p), ("down_bias", ctypes.c_void_p)),
        *(("alpha", ctypes.c_float), ("limit", ctypes.c_float)),
    )


class AdaptedMoeStruct(ctypes.Structure):
    """Mirrors AdaptedMoe of adapted.h."""

    _fields_ = (*((name, ctypes.c_void_p) for name in ("moe", "biased", "lora")), ("gate_up", I64), ("down", I64))


class ExpertAdaptersStruct(ctypes.Structure):
    """Mirrors ExpertAdapters of adapted.h."""

    _fields_ = (("groups", ctypes.c_void_p), *((name, I64) for name in ("count", "gate_up", "down")))


@dataclass(frozen=True)
class Experts:
    """A layer of experts with plain weights, bfloat16 or float32."""

    gate_up: Tensor  # (experts, 2 x inner, hidden), gate first
    down: Tensor  # (experts, hidden, inner)
    chosen: int  # experts per row
    renormalise: bool = True  # whether the chosen experts' weights are scaled to add up to 1

    @property
    def struct(self) -> ExpertsStruct:
        """Returns the struct that the library takes; valid as long as the weights live."""
        experts, hidden, inner = self.down.shape
        pointers = self.gate_up.data_ptr(), self.down.data_ptr()
        dtype = BF16 if self.down.dtype == torch.bfloat16 else F32
        return ExpertsStruct(*pointers, hidden, inner, experts, self.chosen, int(self.renormalise), dtype)

    def singly(self) -> tuple[Matrices, Matrices]:
        """Returns gate_up and down, indexed by expert, as the reference takes them."""
        return self.gate_up, self.down


@dataclass(frozen=True)
class PackedExperts:
    """A layer of ``experts`` experts with packed weights (``linear.packed.beside``), only for CPUs."""

    gate_up: PackedWeight
    down: PackedWeight
    chosen: int
    renormalise: bool
    experts: int

    @property
    def struct(self) -> ExpertsStruct:
        """Returns the struct that the library takes; valid as long as the weights live."""
        pointers, sizes = (self.gate_up.address, self.down.address), (self.gate_up.k, self.down.k)
        return ExpertsStruct(*pointers, *sizes, self.experts, self.chosen, int(self.renormalise), PACKED)

    def singly(self) -> tuple[Matrices, Matrices]:
        """Returns gate_up and down as lists by expert, as the reference takes them."""
        gate_up = [_single(one_of(self.gate_up, e, self.experts, 2 * self.down.k)) for e in range(self.experts)]
        return gate_up, [_single(one_of(self.down, e, self.experts, self.gate_up.k)) for e in range(self.experts)]


AnyExperts = Experts | PackedExperts


def experts_of(
    gate_up: Tensor | PackedWeight, down: Tensor | PackedWeight, experts: int, chosen: int, renormalise: bool
) -> AnyExperts:
    """Returns a layer of experts with these weights, stacked by expert; both are packed if one is packed or
    float16.
    """
    if any(isinstance(weight, PackedWeight) or weight.dtype == torch.float16 for weight in (gate_up, down)):
        return PackedExperts(_packed(gate_up, experts), _packed(down, experts), chosen, renormalise, experts)
    assert isinstance(gate_up, Tensor)
    assert isinstance(down, Tensor)
    shape = experts, -1
    layers = gate_up.unflatten(0, shape).contiguous(), down.unflatten(0, shape).contiguous()
    return Experts(*layers, chosen, renormalise)


def _packed(weight: Tensor | PackedWeight, experts: int) -> PackedWeight:
    if isinstance(weight, PackedWeight):
        return weight
    found = beside([pack_floats(own) for own in weight.chunk(experts)])
    assert found is not None, "all are of one form"
    return found


def _single(weight: PackedWeight) -> Tensor | PackedWeight:
    return unpack_f32(weight) if weight.kind in (LINEAR_F32, LINEAR_F16) else weight


def biased(experts: AnyExperts, gate: ExpertGate) -> BiasedMoeStruct:
    """Returns the struct that the library takes for experts with ``gate``, whose biases must be contiguous
    float32.
    """
    biases = gate.gate_up_bias.data_ptr(), gate.down_bias.data_ptr()
    return BiasedMoeStruct(experts.struct, *biases, gate.alpha, gate.limit)


def adapted(
    experts: AnyExperts, gate: ExpertGate | None, sites: tuple[int, int], lora: int | None = None
) -> tuple[AdaptedMoeStruct, tuple[ctypes.Structure, ...]]:
    """Returns the struct that the library takes for experts with adapters at ``sites`` (gate_up, down), and the
    structs that it points at. ``lora`` is the address of a step's LoraStep.
    """
    plain, form = experts.struct, None if gate is None else biased(experts, gate)
    struct = AdaptedMoeStruct(
        ctypes.addressof(plain), None if form is None else ctypes.addressof(form), lora, *sites
    )
    return struct, (plain,) if form is None else (plain, form)


def moe(
    library: ctypes.CDLL,
    experts: AnyExperts,
    x: Tensor,
    logits: Tensor,
    out: Tensor | None = None,
    gate: ExpertGate | None = None,
) -> Tensor:
    """Returns the weighted sum of the chosen experts' outputs, (rows, hidden), by a library's function.

    x (rows, hidden) and logits (rows, experts) are float32. The result is written to ``out`` if given.
    """
    call = declare(library, "moe" if gate is None else "biased_moe", P, P, I64, P, I64, P, I64)
    struct = experts.struct if gate is None else biased(experts, gate)
    out = torch.full_like(x, torch.nan) if out is None else out
    call(ctypes.byref(struct), x.data_ptr(), x.stride(0), logits.data_ptr(), len(x), out.data_ptr(), out.stride(0))
    return out
