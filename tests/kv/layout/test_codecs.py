"""KV in 8 bits and between float dtypes: how near it stays, and that the codes are what the specifications say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from baton.kv.layout.codecs import CODECS, compress, expand, from_float32, to_float32

ROWS = arrays(np.float32, (5, 16), elements=st.floats(-1e4, 1e4, width=32))
BOUND = {"int8": 0.5 / 127, "fp8": 1 / 16}  # of the largest value in the row; of the value itself


@pytest.mark.parametrize("name", CODECS)
@given(rows=ROWS)
def test_a_row_comes_back_within_its_codecs_step(name: str, rows: np.ndarray) -> None:
    codec = CODECS[name]
    scales, coded = compress(rows, codec)
    assert (scales.dtype, coded.dtype, coded.shape) == (np.float32, np.uint8, rows.shape)
    peak = np.max(np.abs(rows), axis=1, keepdims=True)
    error = np.abs(expand(scales, coded, codec) - rows)
    allowed = peak * BOUND["int8"] if name == "int8" else np.maximum(np.abs(rows) * BOUND["fp8"], peak * 2.0**-18)
    assert np.all(error <= allowed * 1.001 + 1e-30)


@pytest.mark.parametrize("name", CODECS)
def test_what_was_coded_once_is_coded_the_same_again(name: str) -> None:
    rows = np.random.default_rng(1).normal(size=(64, 32)).astype(np.float32)
    first = compress(rows, CODECS[name])
    again = compress(expand(*first, CODECS[name]), CODECS[name])
    assert np.array_equal(first[1], again[1])
    assert np.allclose(first[0], again[0], rtol=1e-6)


@pytest.mark.parametrize("name", CODECS)
def test_zeros_stay_zeros(name: str) -> None:
    scales, coded = compress(np.zeros((3, 8), np.float32), CODECS[name])
    assert np.array_equal(expand(scales, coded, CODECS[name]), np.zeros((3, 8), np.float32))


def test_every_code_of_fp8_is_its_own_value() -> None:
    codec = CODECS["fp8"]
    codes = np.array([c for c in range(256) if c & 0x7F != 0x7F], np.uint8)
    values = codec.decode(codes)
    assert values.max() == 448.0
    assert sorted({abs(float(v)) for v in values})[1] == 2.0**-9
    back = codec.encode(values)
    assert np.array_equal(back[values != 0], codes[values != 0])


def test_fp8_rounds_to_the_nearest_of_two_codes_and_to_even_between() -> None:
    encode, decode = CODECS["fp8"].encode, CODECS["fp8"].decode
    for value, expected in (
        (1.05, 1.0),
        (1.07, 1.125),
        (1.0625, 1.0),
        (1.1875, 1.25),
        (460.0, 448.0),
        (-3.3, -3.25),
    ):
        assert decode(encode(np.array([value], np.float32)))[0] == expected


@given(arrays(np.float32, 20, elements=st.floats(-60000, 60000, width=32)))
def test_narrower_floats_are_rounded_to_nearest(values: np.ndarray) -> None:
    for dtype, bits in (("bfloat16", 8), ("float16", 11)):
        narrow = from_float32(values, dtype)
        assert narrow.itemsize == 2
        back = to_float32(memoryview(narrow).cast("B"), dtype)
        assert np.all(np.abs(back - values) <= np.abs(values) * 2.0**-bits + 2.0**-25)
    assert np.array_equal(from_float32(values, "float32"), values)


def test_bfloat16_agrees_with_torch() -> None:
    torch = pytest.importorskip("torch")
    values = np.random.default_rng(2).normal(size=10_000).astype(np.float32)
    theirs = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()
    assert np.array_equal(from_float32(values, "bfloat16"), theirs)


def test_fp8_agrees_with_torch() -> None:
    torch = pytest.importorskip("torch")
    values = np.random.default_rng(3).uniform(-448, 448, 10_000).astype(np.float32)
    values[:5000] *= 1e-3
    theirs = torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.array_equal(CODECS["fp8"].encode(values), theirs)
