"""Times products of bf16 matrices on a card, by our kernels and by cuBLASLt, and keeps what was chosen of them.

Knows nothing of checkpoints. A start tries each matrix's sizes once, for a few numbers of rows; what was found is
kept with its figures for this card, driver, cuBLASLt and these kernels. How is chosen: product_choice.py.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.backends.cuda.device_ops import DeviceOps, TrialSizes
from baton.engine.backends.cuda.gpu import Gpu
from baton.engine.backends.cuda.product_choice import (
    FEW,
    LIBRARY,
    OWN,
    Matrix,
    ProductChoice,
    ProductTimes,
    chosen,
)
from baton.kernels.abi.build import cache_dir
from baton.kernels.abi.native import I32, I64, P
from baton.kernels.cuda.build import prebuilt_name
from baton.kernels.cuda.library import CudaLibrary, DeviceError
from baton.kernels.linear.by_row import BY_ROW, rows_of
from baton.kernels.linear.packed import PackedMatrixStruct, pack_bf16

log = logging.getLogger("baton.engine")

LIBRARY_ENV = "BATON_CUBLASLT"  # the library's path; "0" to do without it
NAMES = ("libcublasLt.so.13", "libcublasLt.so.12")
ROWS = (1, 8, 16, 32, FEW, 96, 128, 256, 512, 1024, 2048)  # numbers of rows that are timed
USUAL = (  # o, down, qkv, gate and up of an 8B
    Matrix(4096, 4096, False),
    Matrix(4096, 14336, False),
    Matrix(6144, 4096, False),
    Matrix(28672, 4096, True),
)
TOLERANCE = 0.02  # of a result's distance to float32's, over its length
WARM, TIMED = 2, 7  # calls before those that are timed, and timed ones

Seconds = Callable[[Callable[[], object]], float]  # times a call


class ProductRecord(msgspec.Struct, frozen=True):
    """Holds the choices of matrices that were timed with one cuBLASLt."""

    version: int
    choices: tuple[ProductChoice, ...]


def library_path() -> str:
    """Returns the path of cuBLASLt: $BATON_CUBLASLT, or the one that torch's wheels brought, or the name by which
    the loader may find it; empty if it is turned off.
    """
    told = os.environ.get(LIBRARY_ENV, "")
    if told:
        return "" if told == "0" else told
    wheels = importlib.util.find_spec("nvidia")
    places = [] if wheels is None else [Path(place) for place in wheels.submodule_search_locations or ()]
    found = [str(path) for place in places for name in NAMES for path in sorted(place.glob(f"*/lib/{name}"))]
    return (found or [NAMES[0]])[0]


def open_library(device: CudaLibrary, path: str) -> int:
    """Loads cuBLASLt at ``path`` for ``device``; returns its version. Raises DeviceError."""
    version = ctypes.c_int64()
    device.call("linear_library", path.encode(), ctypes.byref(version))
    return version.value


def apply_choices(device: CudaLibrary, choices: Iterable[ProductChoice]) -> None:
    """Tells ``device`` which products of matrices that lie row by row go by cuBLASLt."""
    for choice in choices:
        if choice.by_row:
            _choose(device, choice.matrix, choice.ways())


def _choose(device: CudaLibrary, matrix: Matrix, ways: dict[int, int]) -> None:
    sizes, taken = (ctypes.c_int64 * len(ways))(*ways), (ctypes.c_int32 * len(ways))(*ways.values())
    device.call("linear_ways", matrix.n, matrix.k, int(matrix.gated), sizes, taken, len(ways))


def choices_on(gpu: Gpu, device: CudaLibrary, matrices: Sequence[Matrix]) -> tuple[ProductChoice, ...]:
    """Returns the choice for each of ``matrices`` on this process's card, from the record or by a trial that is
    then kept; none where there is no cuBLASLt. Raises DeviceError where a launch fails.
    """
    if not matrices or not (path := library_path()):
        return ()
    try:
        version = open_library(device, path)
    except DeviceError as error:
        log.info("products of many rows are our own: cuBLASLt can't be loaded from %s: %s", path, error)
        return ()
    earlier = {choice.matrix: choice for choice in load_choices(gpu, version)}
    missing = [matrix for matrix in matrices if matrix not in earlier]
    if missing and (begun := _begun(gpu)).exists():
        log.warning("products are not tried: a trial began and hasn't ended (%s); baton doctor --gpu tries", begun)
        return tuple(earlier[matrix] for matrix in matrices if matrix in earlier)
    if missing:
        earlier |= _tried(gpu, device, missing)
        _keep(gpu, ProductRecord(version, tuple(earlier.values())))
    found = tuple(earlier[matrix] for matrix in matrices)
    for choice in found:
        log.info("%s", choice.told)
    return found


def forget_choices(gpu: Gpu) -> None:
    """Makes the next start with ``gpu`` try all products, also where a trial didn't end."""
    for path in (_path(gpu), _begun(gpu)):
        path.unlink(missing_ok=True)


def _tried(gpu: Gpu, device: CudaLibrary, matrices: Sequence[Matrix]) -> dict[Matrix, ProductChoice]:
    """Tries ``matrices``, with a note as long as that lasts: what hangs or faults is not tried at every start."""
    begun = _begun(gpu)
    try:
        begun.parent.mkdir(parents=True, exist_ok=True)
        begun.touch()
    except OSError as error:
        log.warning("a trial of products can't be noted: %s", error)
    found = {matrix: try_matrix(device, "cuda", matrix, _timed_on_card) for matrix in matrices}
    torch.cuda.empty_cache()  # the card's memory is the weights' and KV's
    begun.unlink(missing_ok=True)
    return found


def try_matrix(
    device: CudaLibrary,
    where: str,
    matrix: Matrix,
    timed: Seconds,
    sizes: Sequence[int] = ROWS,
) -> ProductChoice:
    """Times ``matrix`` of random weights on ``where`` ("cuda", or "cpu" for the shim); returns the choice."""
    ops = DeviceOps(device, where, TrialSizes(matrix.k, matrix.n, 0, (), (0, 0, 0), 0))
    with torch.inference_mode():
        torch.manual_seed(1)
        plain = (torch.randn(matrix.n, matrix.k, device=where) * matrix.k**-0.5).bfloat16()
        trial = _MatrixTrial(ops, device, matrix, plain, timed)
        return chosen(matrix, [trial.times(rows) for rows in sizes])


class _MatrixTrial:
    """Runs one matrix in both layouts, which lie on the device beside one another."""

    def __init__(self, ops: DeviceOps, device: CudaLibrary, matrix: Matrix, plain: Tensor, timed: Seconds) -> None:
        self._ops, self._device, self._matrix, self._plain, self._timed = ops, device, matrix, plain, timed
        packed = pack_bf16(plain.cpu())
        self._panels, self._held = ops.packed(packed)
        rows = rows_of(packed).to(ops.device)
        self._rows = PackedMatrixStruct(packed.kind, BY_ROW, packed.n, packed.k, rows.data_ptr())
        self._held.append(rows)

    def times(self, rows: int) -> ProductTimes:
        """Returns the times of ``rows`` rows."""
        x = self._ops.normal(rows, self._matrix.k).bfloat16()
        wanted = F.linear(x.float(), self._plain.float())
        if self._matrix.gated:
            gate, up = wanted.chunk(2, 1)
            wanted = F.silu(gate) * up
        panels = self._time(self._panels, x, wanted)
        self._way(OWN)
        by_row = self._time(self._rows, x, wanted)
        self._way(LIBRARY)
        library = self._time(self._rows, x, wanted) if rows > FEW else None
        self._way(OWN)
        return ProductTimes(rows, panels, by_row, library)

    def _way(self, way: int) -> None:
        _choose(self._device, self._matrix, {FEW + 1: way})

    def _time(self, weight: PackedMatrixStruct, x: Tensor, wanted: Tensor) -> float | None:
        """Returns microseconds of a product; None if it is refused or its result is wrong."""
        out = torch.full_like(wanted, torch.nan)
        name = "linear_swiglu" if self._matrix.gated else "linear"
        at = ctypes.addressof(weight), x.data_ptr(), 1, x.shape[1], len(x), None, out.data_ptr(), 0, out.shape[1]
        call = self._ops.call(name, (P, P, I32, I64, I64, P, P, I32, I64), *at, alive=(weight, x, out))
        try:
            call()
        except DeviceError:
            return None
        if self._ops.device == "cuda":
            torch.cuda.synchronize()
        error = float((out - wanted).norm() / wanted.norm())
        return 1e6 * self._timed(call) if error <= TOLERANCE else None


def _timed_on_card(call: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(WARM):
        call()
    begin.record()
    for _ in range(TIMED):
        call()
    end.record()
    end.synchronize()
    return 1e-3 * float(begin.elapsed_time(end)) / TIMED


def load_choices(gpu: Gpu, version: int = 0) -> tuple[ProductChoice, ...]:
    """Returns what was kept for ``gpu``, these kernels and cuBLASLt ``version`` (0: any)."""
    try:
        found = msgspec.json.decode(_path(gpu).read_bytes(), type=ProductRecord)
    except (OSError, msgspec.MsgspecError):
        return ()
    return found.choices if version in (0, found.version) else ()


def _keep(gpu: Gpu, record: ProductRecord) -> None:
    path = _path(gpu)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(record)))
    except OSError as error:
        log.warning("the choice of products is not kept, and is tried again at the next start: %s", error)


def _path(gpu: Gpu) -> Path:
    key = hashlib.sha256(f"{gpu.name} {gpu.capability} {gpu.driver} {prebuilt_name()}".encode()).hexdigest()[:16]
    return cache_dir() / "cuda" / "products" / f"{key}.json"


def _begun(gpu: Gpu) -> Path:
    return _path(gpu).with_suffix(".begun")
