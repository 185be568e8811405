"""Calls single ops of a CUDA library over random tensors, for trials. Knows nothing of what a trial compares."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from baton.kernels.abi.native import I32, P
from baton.kernels.cuda.library import CudaLibrary, DeviceError
from baton.kernels.linear.packed import PackedMatrixStruct, PackedWeight

Call = Callable[[], object]


class TrialSizes(NamedTuple):
    """The sizes of the ops that are tried."""

    hidden: int
    inner: int
    vocab: int
    rows: tuple[int, ...]  # of a step: a decode, a batch, a prompt's chunk
    heads: tuple[int, int, int]  # query heads, KV heads, head size
    keys: int  # of each decode's sequence


ON_A_CARD = TrialSizes(4096, 14336, 32768, (1, 16, 64, 512), (32, 8, 128), 1024)
ON_THE_SHIM = TrialSizes(128, 192, 256, (1, 9), (4, 2, 16), 40)


class Pair(NamedTuple):
    """One op twice: ``own`` writes ``out``; ``peer`` is torch's, for the time; ``wanted`` is torch's in float32.

    ``read`` returns what is compared where that isn't ``out`` as it is.
    """

    name: str
    own: Call
    peer: Call
    out: Tensor
    wanted: Tensor
    read: Callable[[], Tensor] | None = None


class DeviceOps:
    """Calls a loaded library's ops over random tensors of ``device``."""

    def __init__(self, library: CudaLibrary, device: str, sizes: TrialSizes) -> None:
        self._library, self.device, self.sizes = library, device, sizes

    def call(self, name: str, kinds: tuple[type, ...], *arguments: object, alive: object = ()) -> Call:
        """Returns a call of ``baton_name`` with a stream behind ``arguments``, which raises DeviceError where it is
        refused. ``alive`` is kept as long as the call.
        """
        function = ctypes.CFUNCTYPE(I32, *kinds, P)((f"baton_{name}", self._library.library))

        def run(kept: object = alive) -> None:
            stream = torch.cuda.current_stream().cuda_stream if self.device == "cuda" else None
            if status := function(*arguments, stream):
                raise DeviceError(f"{name}: status {status}")

        return run

    def normal(self, *shape: int) -> Tensor:
        """Returns normally distributed float32 numbers on the device."""
        return torch.randn(shape, device=self.device)

    def packed(self, weight: PackedWeight) -> tuple[PackedMatrixStruct, list[Tensor | None]]:
        """Returns the struct of ``weight`` on the device, and the tensors that it points to."""
        tensors = [weight.data, weight.scales, weight.mins, weight.row_scale]
        held = [None if one is None else one.to(self.device) for one in tensors]
        places = (one if one is None else one.data_ptr() for one in held)
        return PackedMatrixStruct(weight.kind, weight.group, weight.n, weight.k, *places), held
