"""Tries single CUDA ops on this machine's card beside torch's: their results' distance, and the time of each.

Knows nothing of models. Sizes are those of a dense 8B on a card, small ones on the SIMT shim, whose times say
nothing of a GPU.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.backends.cuda.device_ops import Call, DeviceOps, Pair, TrialSizes
from baton.engine.backends.cuda.sequence_trials import SequenceOps
from baton.kernels.abi.native import I32, I64, P
from baton.kernels.abi.native import F as Float
from baton.kernels.cuda.library import CudaLibrary
from baton.kernels.linear.packed import PackedWeight, pack_bf16, quantize

Tell = Callable[[str], None]  # says what runs next
TOLERANCE = 0.02  # of a result's distance to float32's, over its length: products take bf16 or int8 rows
EPS = 1e-5  # the norm's epsilon, of the size that checkpoints have
WARM, TIMED = 3, 20  # calls before those that are timed, and timed ones


class OpTrial(msgspec.Struct, frozen=True):
    """The result of one op: its error, and the microseconds of a call beside torch's."""

    op: str
    error: float | None  # distance to torch's float32 result, over that one's length; None: it isn't finite
    own_us: float
    torch_us: float

    @property
    def right(self) -> bool:
        """Returns whether the result may be used."""
        return self.error is not None and self.error <= TOLERANCE


def try_ops(library: CudaLibrary, device: str, sizes: TrialSizes, tell: Tell = lambda _: None) -> list[OpTrial]:
    """Returns the trials of all ops on ``device``, "cuda" or the shim's "cpu"; ``tell`` is called with the name of
    each before it runs. Raises DeviceError where a launch fails.
    """
    with torch.inference_mode():
        torch.manual_seed(1)
        by_row, by_sequence = Ops(library, device, sizes), SequenceOps(library, device, sizes)
        pairs = (pair for rows in sizes.rows for pair in chain(by_row.pairs(rows), by_sequence.pairs(rows)))
        return [_tried(pair, device, tell) for pair in pairs]


def _tried(pair: Pair, device: str, tell: Tell = lambda _: None) -> OpTrial:
    tell(pair.name)
    if pair.read is None:
        pair.out.fill_(torch.nan)
    pair.own()
    found = pair.out if pair.read is None else pair.read()
    return compare_ops(pair.name, pair.own, pair.peer, pair.wanted, device, found)


def compare_ops(
    name: str,
    own: Call,
    peer: Call,
    wanted: Tensor,
    device: str,
    found: Tensor | None = None,
    timed: bool = True,
) -> OpTrial:
    """Returns the trial of ``own`` beside ``peer``. ``found`` is the result, by default what ``own`` returns; it is
    compared with ``wanted``, float32. Unless ``timed``, both times are 0.
    """
    out = own() if found is None else found
    assert isinstance(out, Tensor)
    if device == "cuda":
        torch.cuda.synchronize()
    error = float((out.float() - wanted).norm() / wanted.norm())
    shown = error if math.isfinite(error) else None
    own_us, peer_us = (_microseconds(call, device) if timed else 0.0 for call in (own, peer))
    return OpTrial(name, shown, own_us, peer_us)


def _microseconds(call: Call, device: str) -> float:
    if device != "cuda":
        began = time.perf_counter()
        call()
        return 1e6 * (time.perf_counter() - began)
    for _ in range(WARM):
        call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(TIMED):
        call()
    end.record()
    end.synchronize()
    return 1e3 * float(begin.elapsed_time(end)) / TIMED


class Ops(DeviceOps):
    """Pairs of the ops that take rows as they come, whatever sequences they are of."""

    def pairs(self, rows: int) -> Iterator[Pair]:
        """Yields every op for ``rows`` rows, each beside torch's."""
        yield self._norm(rows)
        yield self._swiglu(rows)
        yield self._embedding(rows)
        plain = torch.randn(self.sizes.hidden, self.sizes.hidden) * self.sizes.hidden**-0.5
        for kind, weight in (
            ("bf16", pack_bf16(plain.bfloat16())),
            ("int8", quantize(plain, 8, 0)),
            ("int4", quantize(plain, 4, 32)),
        ):
            yield self._product(rows, kind, weight)

    def _norm(self, rows: int) -> Pair:
        x, delta, weight = (
            self.normal(rows, self.sizes.hidden),
            self.normal(rows, self.sizes.hidden),
            self._ones(),
        )
        out, shape = torch.empty_like(x), (self.sizes.hidden,)
        wanted = F.rms_norm(x + delta, shape, weight, EPS)
        at = x.data_ptr(), delta.data_ptr(), weight.data_ptr(), EPS, *x.shape, out.data_ptr()
        own = self.call("rms_norm", (P, P, P, Float, I64, I64, P), *at)
        return Pair(f"rms_norm, {rows} rows", own, lambda: F.rms_norm(x + delta, shape, weight, EPS), out, wanted)

    def _swiglu(self, rows: int) -> Pair:
        both, inner = self.normal(rows, 2 * self.sizes.inner), self.sizes.inner
        out = torch.empty((rows, inner), device=self.device)
        own = self.call("swiglu", (P, I64, I64, P), both.data_ptr(), rows, inner, out.data_ptr())
        return Pair(f"swiglu, {rows} rows", own, partial(_gated, both), out, _gated(both))

    def _embedding(self, rows: int) -> Pair:
        table = self.normal(self.sizes.vocab, self.sizes.hidden).bfloat16()
        tokens = torch.randint(0, self.sizes.vocab, (rows,), dtype=torch.int32, device=self.device)
        out = torch.empty((rows, self.sizes.hidden), device=self.device)
        at = tokens.data_ptr(), rows, table.data_ptr(), 1, self.sizes.hidden, out.data_ptr()
        own = self.call("embedding", (P, I64, P, I32, I64, P), *at)
        wanted = F.embedding(tokens.long(), table).float()
        return Pair(f"embedding, {rows} rows", own, lambda: F.embedding(tokens, table).float(), out, wanted)

    def _product(self, rows: int, kind: str, weight: PackedWeight) -> Pair:
        x, out = self.normal(rows, weight.k), torch.empty((rows, weight.n), device=self.device)
        struct, held = self.packed(weight)
        at = ctypes.addressof(struct), x.data_ptr(), 0, weight.k, rows, None, out.data_ptr(), 0, weight.n
        own = self.call("linear", (P, P, I32, I64, I64, P, P, I32, I64), *at, alive=(struct, held, x))
        wide = weight.wide.to(self.device)
        half = wide.bfloat16()
        return Pair(
            f"product {kind}, {rows} rows", own, lambda: F.linear(x.bfloat16(), half), out, F.linear(x, wide)
        )

    def _ones(self) -> Tensor:
        return torch.rand(self.sizes.hidden, device=self.device) + 0.5


def _gated(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, -1)
    return F.silu(gate) * up
