"""Runs the ops of several residual streams and of layers' own inputs, as functions of a library.

Knows nothing of pytest. Each case yields what the library computed beside its reference in float64.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from baton.engine.backends.native import span_structs as s
from baton.kernels.abi.native import I64, P, declare
from baton.kernels.abi.native import F as F32
from baton.kernels.layer_inputs import reference as own
from baton.kernels.predict_streams import reference as streams

Pairs = Iterator[tuple[Tensor, Tensor]]
SOURCES = ("predict_streams", "layer_inputs")
ROWS, EPS = 7, 1e-5


def _fresh(*shape: int) -> Tensor:
    return torch.full(shape, torch.nan)


class Mixed:
    """Some streams of a width, with what mixes them."""

    def __init__(self, count: int, width: int, gain: bool) -> None:
        self.x, self.y, self.others = (torch.randn(ROWS, n) for n in (width, width, (count - 1) * width))
        self.norm, self.router = torch.rand(width) + 0.5, torch.randn(count, width) * width**0.5
        self.predict, self.correct = torch.randn(count * count, count), torch.randn(count, count)
        self.gain = torch.rand(width) if gain else None
        self.sizes = count, width

    def struct(self, mix: Tensor) -> s.StreamMixStruct:
        gain = None if self.gain is None else self.gain.data_ptr()
        weights = (each.data_ptr() for each in (self.norm, self.router, mix))
        return s.StreamMixStruct(*weights, gain, *self.sizes, EPS)

    def modes(self, x: Tensor) -> Tensor:
        return streams.router_modes(x.double(), self.norm.double(), self.router.double(), EPS)


def cases_of_streams() -> Iterator[Mixed]:
    for count, width in ((2, 5), (3, 101), (4, 64), (16, 48)):
        yield Mixed(count, width, gain=count % 2 == 1)


def predicted_streams(library: ctypes.CDLL) -> Pairs:
    call = declare(library, "predict_streams", P, I64, P, P)
    for case in cases_of_streams():
        wide = case.x.double(), case.others.double(), case.modes(case.x), case.predict.double()
        wanted = streams.predict_streams(*wide)
        struct = case.struct(case.predict)
        call(ctypes.addressof(struct), ROWS, case.x.data_ptr(), case.others.data_ptr())
        yield from zip((case.x, case.others), wanted, strict=True)


def corrected_streams(library: ctypes.CDLL) -> Pairs:
    call = declare(library, "correct_streams", P, I64, P, P, P, P)
    for case in cases_of_streams():
        wide = (each.double() for each in (case.x, case.others, case.y))
        wanted = streams.correct_streams(*wide, case.modes(case.y), case.correct.double())
        out, at = _fresh(*case.x.shape), (each.data_ptr() for each in (case.y, case.x, case.others))
        struct = case.struct(case.correct)
        call(ctypes.addressof(struct), ROWS, *at, out.data_ptr())
        yield from zip((case.x, case.others), wanted, strict=True)
        yield out, wanted[0] if case.gain is None else wanted[0] * case.gain


def matched_sizes(library: ctypes.CDLL) -> Pairs:
    call = declare(library, "match_size", P, I64, I64, P, I64, P)
    for count, width in ((1, 5), (3, 101)):
        x, others = torch.randn(ROWS, width), torch.randn(ROWS, count * width) * 3
        others[0, :width] *= 1e-4  # below the least size
        out, wanted = _fresh(*others.shape), streams.match_size(x.double(), others.double())
        for to in (out, others):
            call(x.data_ptr(), ROWS, width, others.data_ptr(), count * width, to.data_ptr())
            yield to, wanted


def sums(library: ctypes.CDLL) -> Pairs:
    each, delta, wide = torch.randn(4, ROWS, 37), torch.randn(ROWS, 37), torch.randn(ROWS, 3 * 37)
    out, at = _fresh(ROWS, 37), torch.tensor([x.data_ptr() for x in each])
    declare(library, "sum_rows", P, I64, I64, F32, P)(at.data_ptr(), 4, out.numel(), 0.3, out.data_ptr())
    yield out, each.double().sum(0) * 0.3
    wanted = streams.add_to_each(wide.double(), delta.double())
    declare(library, "add_to_each", P, I64, I64, P, I64)(delta.data_ptr(), ROWS, 37, wide.data_ptr(), 3 * 37)
    yield wide, wanted


def inputs_of_layers(library: ctypes.CDLL) -> Pairs:
    call = declare(library, "layer_inputs", P, P, I64, P, P)
    layers, width = 3, 21
    tokens, norm = torch.tensor([0, 4, 9, 10, 11, 500, 3], dtype=torch.int32), torch.rand(width) + 0.5
    for kind, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16)):
        x, table = torch.randn(ROWS, layers * width), torch.randn(11, layers * width).to(dtype)
        wanted = own.layer_inputs(x.double(), tokens.long(), table, norm.double(), 1e-3, 4.0)
        struct = s.LayerInputsStruct(table.data_ptr(), norm.data_ptr(), 11, layers, width, kind, 1e-3, 4.0)
        out = _fresh(*x.shape)
        for to in (out, x):
            call(ctypes.addressof(struct), tokens.data_ptr(), ROWS, x.data_ptr(), to.data_ptr())
            yield to, wanted


def gated_inputs(library: ctypes.CDLL) -> Pairs:
    x, inputs = torch.randn(ROWS, 21), torch.randn(ROWS, 63)
    wanted, out = own.gate_inputs(x.double(), inputs.double(), 42), _fresh(ROWS, 21)
    call = declare(library, "gate_inputs", P, I64, I64, P, I64, I64, P)
    for to in (out, x):
        call(x.data_ptr(), ROWS, 21, inputs.data_ptr(), 63, 42, to.data_ptr())
        yield to, wanted


def sparsened_gates(library: ctypes.CDLL) -> Pairs:
    call = declare(library, "sparsen", P, I64, I64, F32, P)
    for inner, deviations in ((5, 0.25), (88, 1.6), (1000, -0.4)):
        x = torch.randn(ROWS, 2 * inner) + 0.7
        wanted, out = own.sparsen(x.double(), deviations), _fresh(*x.shape)
        for to in (out, x):
            call(x.data_ptr(), ROWS, inner, deviations, to.data_ptr())
            yield to, wanted


CASES: dict[str, Callable[[ctypes.CDLL], Pairs]] = {
    case.__name__: case
    for case in (
        *(predicted_streams, corrected_streams, matched_sizes, sums),
        *(inputs_of_layers, gated_inputs, sparsened_gates),
    )
}


def a_rows_bits_are_its_own(library: ctypes.CDLL) -> None:
    """Asserts that streams and sparse gates have the same bits for a row alone as in company."""
    torch.manual_seed(5)
    predict = declare(library, "predict_streams", P, I64, P, P)
    sparsen = declare(library, "sparsen", P, I64, I64, F32, P)
    case, gates = Mixed(4, 101, gain=False), torch.randn(ROWS, 2 * 1001)
    alone = [(case.x[row].clone(), case.others[row].clone(), gates[row].clone()) for row in range(ROWS)]
    struct = case.struct(case.predict)
    predict(ctypes.addressof(struct), ROWS, case.x.data_ptr(), case.others.data_ptr())
    sparsen(gates.data_ptr(), ROWS, 1001, 0.5, gates.data_ptr())
    for row, (x, others, gate) in enumerate(alone):
        predict(ctypes.addressof(struct), 1, x.data_ptr(), others.data_ptr())
        sparsen(gate.data_ptr(), 1, 1001, 0.5, gate.data_ptr())
        for mine, theirs in ((x, case.x), (others, case.others), (gate, gates)):
            assert torch.equal(mine, theirs[row])
