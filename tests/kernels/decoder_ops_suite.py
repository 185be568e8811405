"""Runs ops that only some decoders have, as functions of a library: norms by mean and variance, gateless MLPs'
activations, heads reordered or rotated before they are normed, SparseMixer's choice, the first Mamba.

Knows nothing of pytest. Each case yields what the library computed beside its reference in float64.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.backends.native import span_structs as s
from baton.kernels.abi.native import I32, I64, P, declare
from baton.kernels.abi.native import F as F32
from baton.kernels.activate.reference import ACTIVATIONS
from baton.kernels.halve_heads import reference as halve
from baton.kernels.layer_norm.reference import center, layer_norm
from baton.kernels.rope_append.reference import rotate
from baton.kernels.route_two.reference import route_two
from baton.kernels.selective_scan.reference import convolve_by_taps, selective_scan
from tests.kernels.span_suite import near, stepped

Pairs = Iterator[tuple[Tensor, Tensor]]
SOURCES = ("layer_norm", "activate", "halve_heads", "rope_append", "route_two", "combine", "selective_scan")
WIDTHS = (5, 16, 101, 1000)  # below a vector, one, with a tail, more than all chains
ROWS = 7
SPANS = ((3, 5), (40, 1), (0, 70))  # (start, queries) of sequences in a step
TAPS = 4


def fresh(*shape: int) -> Tensor:
    """Returns memory for a result, in which what isn't written shows."""
    return torch.full(shape, torch.nan)


def items(spans: Sequence[tuple[int, int]] = SPANS):
    """The items of a step of ``spans``, without pages."""
    found = stepped([count for _, count in spans])
    found["start"] = [start for start, _ in spans]
    return found


def norms(library: ctypes.CDLL) -> Pairs:
    call = declare(library, "layer_norm", P, P, P, P, F32, I64, I64, P)
    for width in WIDTHS:
        for delta, bias in ((torch.randn(ROWS, width), None), (None, torch.randn(width))):
            x, weight, out = torch.randn(ROWS, width) * 3e-3 + 0.01, torch.rand(width) + 0.5, fresh(ROWS, width)
            at = (None if each is None else each.data_ptr() for each in (delta, weight, bias))
            wide = (None if each is None else each.double() for each in (delta, weight, bias))
            wanted = layer_norm(x.double(), *wide, 1e-5)
            call(x.data_ptr(), *at, 1e-5, ROWS, width, out.data_ptr())
            yield x, wanted[0]
            yield out, wanted[1]
            call(x.data_ptr(), None, weight.data_ptr(), None, 1e-5, ROWS, width, x.data_ptr())
            yield x, layer_norm(wanted[0], None, weight.double(), None, 1e-5)[1]


def centers(library: ctypes.CDLL) -> Pairs:
    call = declare(library, "center", P, I64, I64, P)
    for width in WIDTHS:
        x, out = torch.randn(ROWS, width) + 3, fresh(ROWS, width)
        call(x.data_ptr(), ROWS, width, out.data_ptr())
        yield out, center(x.double())


def scaled_rows(library: ctypes.CDLL) -> Pairs:
    x, factor, out = torch.randn(ROWS, 37), torch.randn(ROWS, 1), fresh(ROWS, 37)
    call = declare(library, "scale_rows", P, P, I64, I64, P)
    call(x.data_ptr(), factor.data_ptr(), ROWS, 37, out.data_ptr())
    yield out, x.double() * factor


def activations(library: ctypes.CDLL) -> Pairs:
    call = declare(library, "activate", I32, P, I64, I64, P, I64)
    for name, kind in s.ACTIVATIONS.items():
        x, out = torch.randn(ROWS, 88) * 4, torch.zeros(ROWS, 90)  # a wider register: columns behind stay
        x[0, :3] = torch.tensor([-90.0, 90.0, 0.0])
        call(kind, x.data_ptr(), ROWS, 88, out.data_ptr(), 90)
        yield out, F.pad(ACTIVATIONS[name](x.double()), (0, 2))


def halved_heads(library: ctypes.CDLL) -> Pairs:
    call = declare(library, "halve_heads", P, I64, I64, I64, I64, I64, P)
    for paired in (2, 6, 12):
        x = torch.randn(ROWS, 5 * 12 + 9)
        wanted, out = halve.halve_heads(x, 5, 12, paired).double(), fresh(*x.shape)
        for to in (out, x):
            call(x.data_ptr(), ROWS, x.shape[1], 5, 12, paired, to.data_ptr())
            yield to, wanted


def tempered_queries(library: ctypes.CDLL) -> Pairs:
    x = torch.randn(sum(count for _, count in SPANS), 30)
    wanted, first = x.double(), 0
    for start, count in SPANS:
        halve.temper_queries(wanted[first : first + count], 20, start, 0.3, 9.0, 1)
        first += count
    call, op = declare(library, "temper_queries", P, P, I32, I64, I64, P), s.TemperingStruct(0.3, 9.0, 1)
    call(ctypes.addressof(op), (of := items()).ctypes.data, len(of), 30, 20, x.data_ptr())
    yield x, wanted


def rotated_heads(library: ctypes.CDLL) -> Pairs:
    heads, width, rotated = 3, 20, 12
    x = torch.randn(sum(count for _, count in SPANS), heads * width + 7)
    angles = torch.arange(80)[:, None] * 0.3 ** torch.arange(rotated // 2)
    rope_angles, at = (
        torch.cat((angles.cos(), angles.sin()), 1),
        torch.cat([torch.arange(b, b + n) for b, n in SPANS]),
    )
    half = rope_angles.double()[at].unflatten(1, (2, -1))
    cos, sin = (
        torch.cat((sign * each, each), -1)[:, None] for sign, each in zip((1, -1), half.unbind(1), strict=True)
    )
    wanted = x.double()
    part = wanted[:, : heads * width].unflatten(1, (heads, width))[..., :rotated]
    part.copy_(rotate(part.clone(), cos, sin))
    call = declare(library, "rotate_heads", P, I32, I64, I64, I64, P, I64, I32, P)
    of = items()
    call(of.ctypes.data, len(of), heads, width, x.shape[1], rope_angles.data_ptr(), rotated, rotated, x.data_ptr())
    yield x, wanted


def two_experts(library: ctypes.CDLL) -> Pairs:
    call = declare(library, "route_two", P, I64, I32, F32, P, P)
    for experts, jitter in ((16, 0.01), (5, 0.3), (2, 1e9)):
        logits, out, factor = torch.randn(ROWS, experts), fresh(ROWS, experts), fresh(ROWS, 1)
        logits[0] = logits[0].abs() + 1  # all of one sign,
        logits[1] = -logits[1].abs() - 1
        logits[2] = 0.5  # and all alike
        call(logits.data_ptr(), ROWS, experts, jitter, out.data_ptr(), factor.data_ptr())
        wanted, by = route_two(logits, jitter)
        yield out.exp(), wanted.double().exp()
        yield factor, by.double()


class Selective:
    """Makes a case of a convolution and a scan over sequences' states, which lie between other bytes."""

    def __init__(self, channels: int = 150, size: int = 21, bias: bool = True) -> None:
        self.channels, self.size, rows = channels, size, sum(count for _, count in SPANS)
        self.gated, self.conv = torch.randn(rows, 2 * channels), torch.randn(channels, TAPS)
        self.bias = torch.randn(channels) if bias else None
        self.dt, self.b, self.c = (torch.randn(rows, n) * 3 for n in (channels, size, size))
        self.fade, self.skip = -3 * torch.rand(channels, size), torch.randn(channels)
        self.past = torch.randn(len(SPANS), channels, TAPS - 1)
        self.state = torch.randn(len(SPANS), channels, size)

    def run(self, library: ctypes.CDLL, spans=SPANS, rows: slice = slice(None), of: slice = slice(None)):
        """Returns the convolved rows, what was read, and states behind them, between guards."""
        gated, dt, b, c = (x[rows].contiguous() for x in (self.gated, self.dt, self.b, self.c))
        count, guard = len(gated), torch.full((len(spans), 1), 5.0)
        kept = torch.cat((guard, self.past[of].flatten(1), self.state[of].flatten(1), guard), 1).contiguous()
        states, taps = s.StatesStruct(kept.data_ptr(), kept.shape[1] * 4), self.conv.T.contiguous()
        bias = None if self.bias is None else self.bias.data_ptr()
        convolution = s.ConvolutionStruct(ctypes.addressof(states), taps.data_ptr(), bias, 4, TAPS, self.channels)
        fed, out, at = fresh(count, self.channels + 3), fresh(count, self.channels), stepped([n for _, n in spans])
        call = declare(library, "convolve", P, P, I32, P, I64, P, I64)
        of_step = at.ctypes.data, len(at)
        call(
            ctypes.addressof(convolution), *of_step, gated.data_ptr(), gated.shape[1], fed.data_ptr(), fed.shape[1]
        )
        scan = s.SelectiveScanStruct(
            ctypes.addressof(states), self.fade.data_ptr(), self.skip.data_ptr(),
            4 + 4 * self.past[0].numel(), self.channels, self.size,
        )  # fmt: skip
        gate = gated.data_ptr() + 4 * self.channels
        lines = s.ScanRows(
            fed.data_ptr(), dt.data_ptr(), b.data_ptr(), c.data_ptr(), gate,
            fed.shape[1], gated.shape[1], out.shape[1], out.data_ptr(),
        )  # fmt: skip
        declare(library, "selective_scan", P, P, I32, P)(ctypes.addressof(scan), *of_step, ctypes.addressof(lines))
        assert fed[:, self.channels :].isnan().all()
        assert (kept[:, (0, -1)] == 5.0).all()
        return fed[:, : self.channels], out, kept

    def wanted(self) -> tuple[Tensor, Tensor, Tensor]:
        past, state, fed, read, first = self.past.double(), self.state.double(), [], [], 0
        for at, (_, count) in enumerate(SPANS):
            rows, own = slice(first, first + count), slice(at, at + 1)
            x = convolve_by_taps(self.gated[rows, : self.channels].double(), self.conv.double(), past[own])
            fed.append(F.silu(x if self.bias is None else x + self.bias))
            scanned = fed[-1], self.dt[rows].double(), self.b[rows].double(), self.c[rows].double()
            found = selective_scan(*scanned, self.fade.double(), self.skip.double(), state[own])
            read.append(found * F.silu(self.gated[rows, self.channels :].double()))
            first += count
        guard = torch.full((len(SPANS), 1), 5.0)
        return torch.cat(fed), torch.cat(read), torch.cat((guard, past.flatten(1), state.flatten(1), guard), 1)


def selective_scans(library: ctypes.CDLL) -> Pairs:
    for case in (Selective(), Selective(64, 16, bias=False)):
        yield from zip(case.run(library), case.wanted(), strict=True)


CASES: dict[str, Callable[[ctypes.CDLL], Pairs]] = {
    case.__name__: case
    for case in (
        *(norms, centers, scaled_rows, activations, halved_heads, tempered_queries, rotated_heads, two_experts),
        selective_scans,
    )
}


def results(library: ctypes.CDLL, case: str) -> list[tuple[Tensor, Tensor]]:
    """Returns what ``library`` computed in ``case`` beside the reference, on the same numbers each time."""
    torch.manual_seed(len(case))
    return [(found.clone(), wanted) for found, wanted in CASES[case](library)]


def check(library: ctypes.CDLL, case: str) -> None:
    """Asserts that ``library`` computes ``case`` as its reference does."""
    for found, wanted in results(library, case):
        near(found, wanted, 1e-5)


def cuts_and_company_change_no_bit(library: ctypes.CDLL) -> None:
    """Asserts that a sequence's convolved rows, reads and states are the same alone and in two steps."""
    torch.manual_seed(2)
    case = Selective()
    fed, read, kept = case.run(library)
    first = case.run(library, [(0, 33)], slice(6, 39), slice(2, 3))
    cut = 1 + case.past[0].numel()
    case.past[2], case.state[2] = (
        part.view_as(like)
        for part, like in zip((first[2][0, 1:cut], first[2][0, cut:-1]), (case.past[2], case.state[2]), strict=True)
    )
    second = case.run(library, [(33, 37)], slice(39, 76), slice(2, 3))
    assert torch.equal(fed[6:], torch.cat((first[0], second[0])))
    assert torch.equal(read[6:], torch.cat((first[1], second[1])))
    assert torch.equal(kept[2:], second[2])


def a_rows_bits_are_its_own(library: ctypes.CDLL) -> None:
    """Asserts that norms by mean and activations have the same bits for a row alone as in company."""
    torch.manual_seed(3)
    x, weight, width = torch.randn(40, 1001), torch.rand(1001), 1001
    norm = declare(library, "layer_norm", P, P, P, P, F32, I64, I64, P)
    activate = declare(library, "activate", I32, P, I64, I64, P, I64)
    for run in (
        lambda rows, out: norm(rows.data_ptr(), None, weight.data_ptr(), None, 1e-5, len(rows), width, out),
        lambda rows, out: activate(0, rows.data_ptr(), len(rows), width, out, width),
    ):
        together = fresh(*x.shape)
        run(x, together.data_ptr())
        for row in (0, 17, 39):
            alone = fresh(1, width)
            run(x[row : row + 1], alone.data_ptr())
            assert torch.equal(alone[0], together[row])
