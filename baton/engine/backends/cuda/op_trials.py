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
from typing import NamedTuple

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

from baton.kernels.abi.native import I32, I64, P
from baton.kernels.abi.native import F as Float
from baton.kernels.cuda.library import CudaLibrary, DeviceError
from baton.kernels.linear.packed import PackedMatrixStruct, PackedWeight, pack_bf16, quantize

TOLERANCE = 0.02  # of a result's distance to float32's, over its length: products take bf16 or int8 rows
EPS = 1e-5
WARM, TIMED = 3, 20  # calls before those that are timed, and timed ones
Call = Callable[[], object]


class TrialSizes(NamedTuple):
    """The sizes of the ops that are tried."""

    hidden: int
    inner: int
    vocab: int
    rows: tuple[int, ...]  # of a step: a decode, a batch, a prompt's chunk


ON_A_CARD, ON_THE_SHIM = TrialSizes(4096, 14336, 32768, (1, 16, 64, 512)), TrialSizes(128, 192, 256, (1, 9))


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


class Pair(NamedTuple):
    """One op twice: ``own`` writes ``out``; ``peer`` is torch's, for the time; ``wanted`` is torch's in float32."""

    name: str
    own: Call
    peer: Call
    out: Tensor
    wanted: Tensor


def try_ops(library: CudaLibrary, device: str, sizes: TrialSizes) -> list[OpTrial]:
    """Returns the trials of all ops on ``device``, "cuda" or the shim's "cpu". Raises DeviceError where a launch
    fails.
    """
    with torch.inference_mode():
        torch.manual_seed(1)
        return [_tried(pair, device) for rows in sizes.rows for pair in Ops(library, device, sizes).pairs(rows)]


def _tried(pair: Pair, device: str) -> OpTrial:
    pair.out.fill_(torch.nan)
    pair.own()
    return compare_ops(pair.name, pair.own, pair.peer, pair.wanted, device, pair.out)


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


class Ops:
    """The ops of a loaded library over random tensors of ``device``."""

    def __init__(self, library: CudaLibrary, device: str, sizes: TrialSizes) -> None:
        self._library, self._device, self._sizes = library, device, sizes

    def pairs(self, rows: int) -> Iterator[Pair]:
        """Yields every op for ``rows`` rows, each beside torch's."""
        yield self._norm(rows)
        yield self._swiglu(rows)
        yield self._embedding(rows)
        plain = torch.randn(self._sizes.hidden, self._sizes.hidden) * self._sizes.hidden**-0.5
        for kind, weight in (
            ("bf16", pack_bf16(plain.bfloat16())),
            ("int8", quantize(plain, 8, 0)),
            ("int4", quantize(plain, 4, 32)),
        ):
            yield self._product(rows, kind, weight)

    def _norm(self, rows: int) -> Pair:
        x, delta, weight = (
            self._normal(rows, self._sizes.hidden),
            self._normal(rows, self._sizes.hidden),
            self._ones(),
        )
        out, shape = torch.empty_like(x), (self._sizes.hidden,)
        wanted = F.rms_norm(x + delta, shape, weight, EPS)
        at = x.data_ptr(), delta.data_ptr(), weight.data_ptr(), EPS, *x.shape, out.data_ptr()
        own = self._call("rms_norm", (P, P, P, Float, I64, I64, P), *at)
        return Pair(f"rms_norm, {rows} rows", own, lambda: F.rms_norm(x + delta, shape, weight, EPS), out, wanted)

    def _swiglu(self, rows: int) -> Pair:
        both, inner = self._normal(rows, 2 * self._sizes.inner), self._sizes.inner
        out = torch.empty((rows, inner), device=self._device)
        own = self._call("swiglu", (P, I64, I64, P), both.data_ptr(), rows, inner, out.data_ptr())
        return Pair(f"swiglu, {rows} rows", own, partial(_gated, both), out, _gated(both))

    def _embedding(self, rows: int) -> Pair:
        table = self._normal(self._sizes.vocab, self._sizes.hidden).bfloat16()
        tokens = torch.randint(0, self._sizes.vocab, (rows,), dtype=torch.int32, device=self._device)
        out = torch.empty((rows, self._sizes.hidden), device=self._device)
        at = tokens.data_ptr(), rows, table.data_ptr(), 1, self._sizes.hidden, out.data_ptr()
        own = self._call("embedding", (P, I64, P, I32, I64, P), *at)
        wanted = F.embedding(tokens.long(), table).float()
        return Pair(f"embedding, {rows} rows", own, lambda: F.embedding(tokens, table).float(), out, wanted)

    def _product(self, rows: int, kind: str, weight: PackedWeight) -> Pair:
        x, out = self._normal(rows, weight.k), torch.empty((rows, weight.n), device=self._device)
        tensors = [weight.data, weight.scales, weight.mins, weight.row_scale]
        held = [None if one is None else one.to(self._device) for one in tensors]
        struct = PackedMatrixStruct(
            weight.kind, weight.group, weight.n, weight.k, *(one if one is None else one.data_ptr() for one in held)
        )
        at = ctypes.addressof(struct), x.data_ptr(), 0, weight.k, rows, None, out.data_ptr(), 0, weight.n
        own = self._call("linear", (P, P, I32, I64, I64, P, P, I32, I64), *at, alive=(struct, held, x))
        wide = weight.wide.to(self._device)
        half = wide.bfloat16()
        return Pair(
            f"product {kind}, {rows} rows", own, lambda: F.linear(x.bfloat16(), half), out, F.linear(x, wide)
        )

    def _call(self, name: str, kinds: tuple[type, ...], *arguments: object, alive: object = ()) -> Call:
        function = ctypes.CFUNCTYPE(I32, *kinds, P)((f"baton_{name}", self._library.library))

        def run(kept: object = alive) -> None:
            stream = torch.cuda.current_stream().cuda_stream if self._device == "cuda" else None
            if status := function(*arguments, stream):
                raise DeviceError(f"{name}: status {status}")

        return run

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self._device)

    def _ones(self) -> Tensor:
        return torch.rand(self._sizes.hidden, device=self._device) + 0.5


def _gated(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, -1)
    return F.silu(gate) * up
