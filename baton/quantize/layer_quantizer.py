"""Quantizes one layer, product by product, each on the inputs that the already quantized products before it give.

Knows nothing of files' formats. Without a calibration text each weight is quantized by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from baton.engine.backends.expert_gate import gate_of
from baton.engine.program.ops import Linear, Moe, Op
from baton.engine.program.program import Program, Weight
from baton.kernels.swiglu.reference import swiglu
from baton.process.heap import return_freed_memory
from baton.quantize.folds import Fold, fold_of, stored
from baton.quantize.kv_scales import kv_product
from baton.quantize.layers import LayerRun, States, pieces_of
from baton.quantize.quantized_weight import QuantizedWeight
from baton.quantize.schemes import Scheme
from baton.quantize.stats import ActivationStats

HESSIAN_BYTES = 512 << 20  # of experts that are looked at together


class QuantizedLayer(NamedTuple):
    """One layer after quantization: its quantized and its plain weights."""

    rounded: dict[str, list[QuantizedWeight]]  # by weight, a part for each tensor in the source's files
    plain: dict[str, Tensor]  # unquantized weights that folded scales have changed, as files hold them
    kv_peaks: Tensor | None = None  # (2, channels): the largest magnitudes of K and V, if a text was read


class LayerQuantizer:
    """Quantizes the linear and MoE weights of one layer.

    ``weights`` are float32, ``dtypes`` those that the checkpoint has them in; linear weights of ``plain`` stay.
    """

    def __init__(
        self,
        program: Program,
        ops: tuple[Op, ...],
        weights: dict[str, Tensor],
        shapes: dict[str, Weight],
        scheme: Scheme,
        dtypes: dict[str, torch.dtype],
        plain: frozenset[str],
    ) -> None:
        self._program, self._ops, self._scheme, self._dtypes = program, ops, scheme, dtypes
        self._left = plain
        self._weights, self._shapes = weights, shapes
        self._outs = {name: len(weight) for name, weight in weights.items()}
        self._rounded: dict[str, list[QuantizedWeight]] = {}
        self._plain: dict[str, Tensor] = {}
        self._value_factors: Tensor | None = None  # by which rows of V were divided

    def quantize_alone(self) -> QuantizedLayer:
        """Returns the layer with every weight quantized by itself."""
        for name in quantized_names(self._ops, self._left):
            self._round(name)
        return QuantizedLayer(self._rounded, self._plain)

    def _round(self, name: str) -> None:
        parts = self._weights[name].split([shape[0] for shape in self._shapes[name].shapes])
        self._rounded[name] = [self._scheme.rounded(part, None) for part in parts]

    def _alone(self, name: str) -> None:
        """Quantizes a weight by itself, and has the ops after it read its quantized values."""
        self._round(name)
        self._weights[name] = torch.cat([part.values() for part in self._rounded[name]])

    def quantize_with_text(self, states: States, after: Callable[[int], set[str]], last: bool) -> QuantizedLayer:
        """Returns the layer quantized product by product over the calibration text.

        ``states`` holds the layer's input and, unless ``last``, ends as the next layer's. ``after(i)`` are the
        registers that are read after op i.
        """
        run = LayerRun(self._program, self._ops, self._weights, states.tokens)
        done = 0
        for piece, product in pieces_of(self._ops, self._left):
            done += len(piece)
            if product is None and last:
                break
            run.run(piece, states, after(done))
            self._drop(piece)
            return_freed_memory()
            if isinstance(product, Linear):
                self._linear(product, states)
            elif product is not None:
                self._experts(product, states)
        return QuantizedLayer(self._rounded, self._plain, self._divided(run.kv_peaks))

    def _divided(self, peaks: Tensor | None) -> Tensor | None:
        """Returns ``peaks`` as they are once the rows of V are divided by the factors of attention's output."""
        if peaks is None or self._value_factors is None:
            return peaks
        return torch.stack((peaks[0], peaks[1] / self._value_factors))

    def _linear(self, op: Linear, states: States) -> None:
        if not self._scheme.needs_text:  # the text is read for KV's scales alone
            self._alone(op.weight)
            return
        weight = self._weights[op.weight]
        stats = ActivationStats(weight.shape[1], states.samples * states.tokens)
        for sample in range(states.samples):
            stats.add(states.read(sample, {op.x})[op.x])
        stats.require_finite(self._shapes[op.weight].sources[0])
        scales = self._fold(op, weight, stats)
        scaled = weight if bool((scales == 1).all()) else weight * scales
        found = self._scheme.rounded(scaled, stats.divided(scales))
        del stats, scaled, weight
        self._weights[op.weight] = found.values().div_(scales)
        ends = torch.tensor([shape[0] for shape in self._shapes[op.weight].shapes]).cumsum(0).tolist()
        self._rounded[op.weight] = [found.rows(a, b) for a, b in zip([0, *ends], ends, strict=False)]

    def _drop(self, ops: Sequence[Op]) -> None:
        """Drops the values of quantized weights that ``ops`` have read: no later op of the layer reads them."""
        for name in quantized_names(tuple(ops), self._left):
            del self._weights[name]

    def _fold(self, op: Linear, weight: Tensor, stats: ActivationStats) -> Tensor:
        """Finds the scales of the product's inputs and divides what makes these inputs by them; returns the
        scales.
        """
        fold = fold_of(self._program, self._ops, op, self._outs)
        scales = None if fold is None else self._scheme.scales(weight, stats, fold.tie)
        if fold is None or scales is None:
            return torch.ones(weight.shape[1])
        if fold.norm:
            dtype = self._dtypes[fold.norm]
            norm = self._weights[fold.norm]
            self._plain[fold.norm], scales = stored(norm, scales, dtype, self._shapes[fold.norm])
            if fold.bias:
                self._plain[fold.bias] = self._weights[fold.bias] / scales
        else:
            self._divide_rows(fold, fold.per_row(scales))
        return scales

    def _divide_rows(self, fold: Fold, factors: Tensor) -> None:
        """Divides rows of a product that is quantized already, by scaling whole rows."""
        every, (first, end) = torch.ones(self._outs[fold.product]), fold.rows
        every[first:end] = factors
        if fold.product == kv_product(self._ops):
            self._value_factors = factors
        parts = self._rounded[fold.product]
        for i, own in enumerate(every.split([len(part.q) for part in parts])):
            if bool((own != 1).any()):
                parts[i] = parts[i].times(1 / own)
        if fold.bias:
            self._plain[fold.bias] = self._weights[fold.bias] / every

    def _experts(self, op: Moe, states: States) -> None:
        """Quantizes each expert on the rows routed to it; gate and up first, then down."""
        if not self._scheme.needs_text:
            self._alone(op.gate_up)
            self._alone(op.down)
            return
        activation = gate_of(op, self._weights)
        gate_up = self._weights[op.gate_up].unflatten(0, (op.experts, -1))
        down = self._weights[op.down].unflatten(0, (op.experts, -1))
        ups: list[QuantizedWeight] = []
        downs: list[QuantizedWeight] = []
        for some in _batches(op.experts, max(gate_up.shape[2], down.shape[2])):
            ups += self._some(op, some, op.gate_up, gate_up, states, lambda rows, _: rows)
            wide = torch.stack([part.values() for part in ups[some.start :]])

            def inner(rows: Tensor, e: int, wide: Tensor = wide, first: int = some.start) -> Tensor:
                both = rows @ wide[e - first].T
                return swiglu(both) if activation is None else activation.between(e, op.experts, both)

            downs += self._some(op, some, op.down, down, states, inner)
        self._weights[op.gate_up] = torch.cat([part.values() for part in ups])
        self._weights[op.down] = torch.cat([part.values() for part in downs])
        half = gate_up.shape[1] // 2
        self._rounded[op.gate_up] = [p for up in ups for p in (up.rows(0, half), up.rows(half, 2 * half))]
        self._rounded[op.down] = downs

    def _some(
        self,
        op: Moe,
        some: range,
        name: str,
        weight: Tensor,
        states: States,
        inputs: Callable[[Tensor, int], Tensor],
    ) -> Iterator[QuantizedWeight]:
        """Yields the quantized ``weight``, named ``name``, of some experts; ``inputs`` turns an expert's rows into
        what the weight reads.
        """
        tensors = self._shapes[name].sources
        stats = {
            e: ActivationStats(weight.shape[2], states.samples * states.tokens * op.chosen // op.experts)
            for e in some
        }
        for sample in range(states.samples):
            registers = states.read(sample, {op.x, op.logits})
            chosen = registers[op.logits].topk(op.chosen, -1).indices
            for e in some:
                rows = registers[op.x][(chosen == e).any(-1)]
                stats[e].add(inputs(rows, e))
        for e in some:
            stats[e].require_finite(tensors[e * len(tensors) // op.experts])
            yield self._scheme.rounded(weight[e], stats.pop(e))


def quantized_names(ops: tuple[Op, ...], plain: frozenset[str]) -> list[str]:
    """Returns the names of a layer's weights that are quantized: those of linear and MoE ops, without ``plain``."""
    linears = [op.weight for op in ops if isinstance(op, Linear) and op.weight not in plain]
    return [*linears, *(name for op in ops if isinstance(op, Moe) for name in (op.gate_up, op.down))]


def _batches(experts: int, width: int) -> Iterator[range]:
    size = max(1, HESSIAN_BYTES // (4 * width * width))
    for start in range(0, experts, size):
        yield range(start, min(start + size, experts))
