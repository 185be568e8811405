"""rms_norm, swiglu, embedding, rope_append and kv_copy from ``cuda.cu`` on the SIMT shim: the CPU twins' checks.

BATON_CUDA_SEEDS (make cuda-check: more than one) is how many schedules each check is run under. Planted bugs must
be caught; those that drop a barrier by the race checks, under whatever schedule.
"""

from __future__ import annotations

import ctypes
import os
import random
from collections.abc import Callable, Iterable

import numpy as np
import pytest
import torch
import xxhash

from baton.kernels.abi.native import I32, I64, F, P, declare
from baton.kernels.cuda import build, shim
from baton.kernels.linear.reference import quantize_rows
from baton.kernels.paged_attention.native import append
from baton.kernels.rms_norm.reference import normed
from baton.kernels.step.structs import KV_TYPES
from baton.kv.layout.codecs import CODECS, compress, expand, from_float32
from tests.kernels import attention_suite, kv_copy_suite, rows_suite
from tests.kernels.compilers import needs_compiler
from tests.kernels.mutants import is_caught
from tests.thorough import first_now

OPS = ("embedding", "kv_copy", "rms_norm", "rope_append", "swiglu")
SEEDS = range(int(os.environ.get("BATON_CUDA_SEEDS", "1")))
SIZES = (241, 256, 320, 329, 1024, 1025, 1088, 1089, 2048, 4096, 32_769, 65_536, 131_137)
INT8, E4M3, BF16 = 1, 2, 3
Check = Callable[[ctypes.CDLL], None]


@needs_compiler()
def library(ops: Iterable[str], extra: tuple[str, ...] = (), races: bool = False) -> ctypes.CDLL:
    return shim.as_library(build.simt(ops, extra, races), preempt=100)


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "race checks"])
def built(request: pytest.FixtureRequest) -> shim.Simt:
    return library(OPS, races=request.param)  # type: ignore[return-value]


@pytest.fixture(params=SEEDS)
def simt(request: pytest.FixtureRequest, built: shim.Simt) -> ctypes.CDLL:
    built.schedule(request.param, (0, 100, 500)[request.param % 3], 1 + request.param % 3)
    return built  # type: ignore[return-value]


def copies(library: ctypes.CDLL) -> None:
    kv_copy_suite.copies_and_sums_are_right(library, SIZES)


def the_sum_is_of_what_was_stored(library: ctypes.CDLL) -> None:
    """Places overlap their sources too, so that what is read changes meanwhile."""
    for size in (1089, 4000, 33_000):
        memory = np.resize(kv_copy_suite.DATA, size + 256)
        at = memory.ctypes.data + -memory.ctypes.data % 64
        [checksum] = kv_copy_suite.call(library)([at], [at + 16], size)
        stored = (ctypes.c_char * size).from_address(at)
        assert checksum == xxhash.xxh3_64_intdigest(stored)


def copies_alone(library: ctypes.CDLL) -> None:
    """Without sums nothing is hashed, and blocks may be shorter."""
    call = declare(library, "kv_copy", P, P, I64, I64, P)
    for size in (64, 79, 4096, 33_001):
        places = np.full(2 * size + 32, 0xEE, np.uint8)
        data = kv_copy_suite.DATA
        src = np.array([data.ctypes.data + 5, data.ctypes.data + 64_000], np.uint64)
        dst = np.array([places.ctypes.data, places.ctypes.data + size + 16], np.uint64)
        call(dst.ctypes.data, src.ctypes.data, 2, size, None)
        assert (places[:size] == data[5 : 5 + size]).all()
        assert (places[size + 16 : -16] == data[64_000 : 64_000 + size]).all()
        assert (places[size : size + 16] == 0xEE).all()


CARD_DTYPES = [dtype for dtype in attention_suite.DTYPES if dtype != "float16"]  # which no CUDA kernel stores


def appends(library: ctypes.CDLL) -> None:
    for dtype in CARD_DTYPES:
        attention_suite.appended_rows_read_back(library, dtype, (6, 2, 24))
        attention_suite.appended_rows_read_back(library, dtype, (3, 1, 6))


def norms_before_rotation(library: ctypes.CDLL) -> None:
    for heads in ((4, 2, 40), (2, 1, 256)):
        case = attention_suite.Case(6, "float32", heads, [(0, 5)])
        qkv, eps, dim = case.qkv[0].clone(), 1e-5, heads[2]
        norms = torch.rand(dim) + 0.5, torch.rand(dim) + 0.5
        append(library, qkv, case.kv, [(case.items[0][0], 0, 5)], case.rope_angles, norms, eps)
        x, q = case.qkv[0].double(), heads[0]
        for part, weight, found in (
            (x[:, :q], norms[0], qkv[:, :q]),
            (x[:, q : q + heads[1]], norms[1], case.stored(0)[0]),
        ):
            wanted = part / (part.square().mean(-1, keepdim=True) + eps).sqrt() * weight
            torch.testing.assert_close(
                found, attention_suite.rotate(wanted.float(), case.rope_angles), atol=1e-5, rtol=1e-5
            )


def long_batches(library: ctypes.CDLL) -> None:
    """More items than a block has threads, some without rows."""
    rng = random.Random(9)
    sizes = [(rng.choice((0, 15, 31)), rng.choice((1, 1, 1, 2))) for _ in range(300)]
    case = attention_suite.Case(4, "int8", (2, 1, 8), sizes)
    rows = torch.cat([qkv[start:] for qkv, (start, _) in zip(case.qkv, sizes, strict=True)])
    append(library, rows, case.kv, case.items, case.rope_angles)
    for at, (start, _) in enumerate(sizes):
        found, wanted = case.stored(at)[1][start:], case.rows(at)[1][start:]
        assert bool(((found - wanted).abs() <= 1e-2 * wanted.abs().amax(-1, keepdim=True)).all())


def rounded_norms(library: ctypes.CDLL) -> None:
    """Against the reference's norm, rounded by the reference; a row with a NaN keeps it to itself."""
    call = declare(library, "rms_norm_quantized", P, P, P, F, I64, I64, I32, P, P)
    for rows, hidden in ((1, 4), (3, 260), (4, 257), (2, 1028), (2, 5000), (2, 8200)):
        x, delta, weight = torch.randn(rows, hidden), torch.randn(rows, hidden), torch.rand(hidden) + 0.1
        x[-1, 0] = torch.nan
        for rounding, kind in ((INT8, torch.int8), (E4M3, torch.float8_e4m3fn)):
            out, scales, mine = torch.zeros(rows, hidden, dtype=kind), torch.full((rows,), torch.nan), x.clone()
            call(mine.data_ptr(), delta.data_ptr(), weight.data_ptr(), 1e-5, rows, hidden, rounding,
                 out.data_ptr(), scales.data_ptr())  # fmt: skip
            wide = normed(x + delta, weight, 1e-5)
            assert bool(torch.isnan(scales[-1]))
            assert bool((out[-1].float() == 0).all())
            found, wanted = (out.float() * scales[:, None])[:-1], wide[:-1]
            step = scales[:-1, None] * 0.501 if rounding == INT8 else wanted.abs() / 15.9 + scales[:-1, None] / 1000
            assert bool(((found - wanted).abs() <= step).all())
            if rounding == INT8:
                exact = quantize_rows(wide)[0][:-1]
                assert int((out[:-1].float() != exact).sum()) <= max(1, rows * hidden // 500)
        half, mine = torch.zeros(rows, hidden, dtype=torch.bfloat16), x.clone()
        call(mine.data_ptr(), delta.data_ptr(), weight.data_ptr(), 1e-5, rows, hidden, BF16, half.data_ptr(), None)
        plain, floats = declare(library, "rms_norm", P, P, P, F, I64, I64, P), torch.zeros(rows, hidden)
        mine = x.clone()
        plain(mine.data_ptr(), delta.data_ptr(), weight.data_ptr(), 1e-5, rows, hidden, floats.data_ptr())
        assert torch.equal(half.nan_to_num(9), floats.bfloat16().nan_to_num(9))


def a_part_of_the_table_leaves_others_rows_alone(library: ctypes.CDLL) -> None:
    """A rank with the tokens 10 … 29 writes the rows of the first and the last, and no others."""
    call = declare(library, "embedding_part", P, I64, I32, I32, P, I32, I64, P)
    tokens = np.array([10, 9, 29, 30, 17, 0], np.int32)
    own = torch.tensor([0, 2, 4])
    for dtype, code in ((torch.float32, 0), (torch.bfloat16, 1)):
        table, out = torch.randn(21, 24).to(dtype), torch.full((6, 24), torch.nan)
        call(tokens.ctypes.data, 6, 10, 20, table.data_ptr(), code, 24, out.data_ptr())
        assert torch.equal(out[own], table[torch.from_numpy(tokens)[own].long() - 10].float())
        assert bool(torch.isnan(out[[1, 3, 5]]).all())


def verified(library: ctypes.CDLL) -> None:
    """One block of three was damaged on the way: that one is said to be wrong, and all sums are of what came."""
    call = declare(library, "kv_verify", P, P, I64, I64, P, P, P)
    size, data = 40_000, kv_copy_suite.DATA[:120_000].copy()
    sent = np.array([xxhash.xxh3_64_intdigest(data[i * size :][:size].data) for i in range(3)], np.uint64)
    data[size + 12_345] ^= 1
    places, sums, wrong = np.zeros(3 * size, np.uint8), np.zeros(3, np.uint64), np.full(3, -1, np.int32)
    src, dst = (
        np.array([memory.ctypes.data + i * size for i in (0, 1, 2)], np.uint64) for memory in (data, places)
    )
    arguments = (dst, src, sums, sent, wrong)
    at = [array.ctypes.data for array in arguments]
    call(at[0], at[1], 3, size, at[2], at[3], at[4])
    assert wrong.tolist() == [0, 1, 0]
    assert (places == data).all()
    assert sums[1] == xxhash.xxh3_64_intdigest(data[size : 2 * size].data)


def wire_codecs(library: ctypes.CDLL) -> None:
    """Bit for bit what kv/layout/codecs.py makes of the same pages, there and back."""
    for head_dim, rows in ((8, 40), (128, 70), (512, 9), (20, 33)):
        values = torch.randn(3, rows, head_dim)
        values[1, 2] = 0
        for dtype, kind in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
            pages = values.to(kind).contiguous()
            for name in ("int8", "fp8"):
                _one_codec(library, pages, dtype, name)


def _one_codec(library: ctypes.CDLL, pages: torch.Tensor, dtype: str, name: str) -> None:
    count, rows, head_dim = pages.shape
    wire = np.full((count, rows * (4 + head_dim) + 8), 0xEE, np.uint8)
    back = torch.zeros_like(pages)
    at = [np.array([base + i * step for i in (2, 0, 1)], np.uint64) for base, step in (
        (pages.data_ptr(), pages.stride(0) * pages.itemsize), (wire.ctypes.data, wire.shape[1]),
        (back.data_ptr(), back.stride(0) * back.itemsize),
    )]  # fmt: skip
    shape = (count, rows, head_dim, KV_TYPES[dtype], KV_TYPES["int8" if name == "int8" else "fp8_e4m3"])
    declare(library, "kv_compress", P, P, I64, I64, I32, I32, I32)(at[1].ctypes.data, at[0].ctypes.data, *shape)
    declare(library, "kv_expand", P, P, I64, I64, I32, I32, I32)(at[2].ctypes.data, at[1].ctypes.data, *shape)
    for page, coded, found in zip(pages, wire, back, strict=True):
        scales, codes = compress(page.float().numpy(), CODECS[name])
        assert (coded[: rows * 4].view(np.float32) == scales).all()
        assert (coded[rows * 4 : -8].reshape(rows, head_dim) == codes).all()
        assert (coded[-8:] == 0xEE).all()
        assert (
            from_float32(expand(scales, codes, CODECS[name]), dtype).tobytes()
            == found.view(torch.uint8).numpy().tobytes()
        )


CHECKS: tuple[Check, ...] = (
    *rows_suite.CHECKS,
    *(rounded_norms, appends, norms_before_rotation, long_batches, a_part_of_the_table_leaves_others_rows_alone),
    *(copies, copies_alone, the_sum_is_of_what_was_stored, verified, wire_codecs),
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_cpu_twins_checks_hold_on_the_shim(simt: ctypes.CDLL, check: Check) -> None:
    before = simt.launches()  # type: ignore[attr-defined]
    check(simt)
    assert simt.launches() > before  # type: ignore[attr-defined]


BUGS: tuple[tuple[str, str, Check], ...] = (
    ("NORM", "rms_norm", rows_suite.norms_are_right),
    ("CUDA_REDUCE_BARRIER", "rms_norm", rows_suite.norms_are_right),
    ("CUDA_REDUCE_REUSE", "rms_norm", rounded_norms),
    ("CUDA_SWIGLU_SIGN", "swiglu", rows_suite.swiglu_is_exact),
    ("CUDA_EMBEDDING_ROW", "embedding", rows_suite.embedding_widens),
    ("CUDA_EMBEDDING_PART", "embedding", a_part_of_the_table_leaves_others_rows_alone),
    ("ROPE", "rope_append", appends),
    ("PAGE", "rope_append", appends),
    ("CUDA_ROPE_SCALE", "rope_append", appends),
    ("CUDA_ROPE_BARRIER", "rope_append", appends),
    ("KV_COPY_NO_SCRAMBLE", "kv_copy", copies),
    ("KV_COPY_SHORT", "kv_copy", copies),
    ("CUDA_KV_COPY_BARRIER", "kv_copy", copies),
    ("CUDA_KV_COPY_TAIL", "kv_copy", copies),
    ("CUDA_CODEC_LANE", "kv_copy", wire_codecs),
)


@pytest.mark.parametrize(("bug", "op", "check"), first_now(BUGS), ids=[bug for bug, _, _ in BUGS])
def test_a_planted_bug_is_caught(bug: str, op: str, check: Check) -> None:
    assert is_caught(library([op], (f"-DBATON_MUTATION_{bug}",), races=True), [check])


@pytest.mark.parametrize("bug", ["CUDA_REDUCE_BARRIER", "CUDA_KV_COPY_BARRIER"])
def test_a_dropped_barrier_is_caught_by_the_random_schedule_alone(bug: str) -> None:
    """Race checks are off: what is read too early is poison, or an incomplete sum."""
    op, check = next((op, check) for name, op, check in BUGS if name == bug)
    assert is_caught(library([op], (f"-DBATON_MUTATION_{bug}",)), [check])
