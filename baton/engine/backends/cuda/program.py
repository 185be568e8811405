"""Compiles a program for a GPU: the native program with its weights in device memory.

Knows nothing of plans or of kernels. The structs stay in host memory, where the step's host code reads them; the
weights that they point to are copied to the device once, in panels or, where ``by_row`` names them, row by row.
"""

from __future__ import annotations

import ctypes

from torch import Tensor

from baton.engine.backends.native.program import NativeProgram, Weights
from baton.engine.program.ops import LmHead
from baton.engine.program.program import Program
from baton.kernels.cuda.library import CudaLibrary
from baton.kernels.linear.by_row import BY_ROW, rows_of
from baton.kernels.linear.packed import PackedMatrixStruct, PackedWeight
from baton.kernels.lora.structs import LoraStep
from baton.kernels.moe.native import AnyExperts, Experts
from baton.kernels.step.structs import Op


class CudaProgram(NativeProgram):
    """A native program whose weights are in memory of ``device`` until ``close``."""

    def __init__(
        self, program: Program, weights: Weights, device: CudaLibrary, by_row: frozenset[str] = frozenset()
    ) -> None:
        self._device, self._by_row = device, by_row
        self._taken: list[int] = []
        self._structs: dict[str, PackedMatrixStruct] = {}
        self.head_lora = LoraStep(None, 0)  # of sampled rows, in the step that is run next
        try:
            super().__init__(program, weights)
        except BaseException:
            self.close()
            raise
        self._packed.clear()  # the host's copies have served

    def close(self) -> None:
        """Frees the device memory of the weights."""
        while self._taken:
            self._device.release(self._taken.pop())

    def _place(self, tensor: Tensor) -> int:
        return self._put(tensor)

    def _place_matrix(self, name: str, weight: PackedWeight) -> int:
        if name not in self._structs:
            rows = name in self._by_row
            tensors = (rows_of(weight) if rows else weight.data, weight.scales, weight.mins, weight.row_scale)
            places = (None if tensor is None else self._put(tensor) for tensor in tensors)
            group = BY_ROW if rows else weight.group
            self._structs[name] = PackedMatrixStruct(weight.kind, group, weight.n, weight.k, *places)
        return ctypes.addressof(self._structs[name])

    def _place_experts(self, name: str, layer: AnyExperts) -> int:
        assert isinstance(layer, Experts)  # cuda/load.py
        struct = layer.struct
        struct.gate_up, struct.down = self._put(layer.gate_up), self._put(layer.down)
        self._kept.append(struct)
        return ctypes.addressof(struct)

    def _adapt_head(self, found: Op, op: LmHead) -> None:
        found.table, found.layer = ctypes.addressof(self.head_lora), self._head_site()

    def _put(self, tensor: Tensor) -> int:
        whole = tensor.cpu().contiguous()
        self._taken.append(self._device.put(whole.data_ptr(), whole.nbytes))
        return self._taken[-1]
