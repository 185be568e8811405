"""KV in 4 bits: each number within half a step of its group's, keys by channel and values by token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from baton.kv.layout.coding import coded_bytes, decode, encode
from baton.protos.nouns import LayerGroup

GROUP = LayerGroup("full", ("k", "v"), 2, 3, 8)
SHAPE = (2, 2, 16, 3, 8)


def brought(values: np.ndarray, group: LayerGroup = GROUP) -> np.ndarray:
    wire = encode("int4", values, group)
    assert len(wire) == coded_bytes("int4", group)
    return decode("int4", memoryview(wire), group).reshape(values.shape)


@given(arrays(np.float32, SHAPE, elements=st.floats(-1e3, 1e3, width=32)))
def test_each_number_is_within_half_a_step_of_its_group(values: np.ndarray) -> None:
    found = brought(values)
    for plane, axis in ((0, 1), (1, 3)):
        own = values[:, plane]
        spread = own.max(axis, keepdims=True) - own.min(axis, keepdims=True)
        size = np.abs(own).max(axis, keepdims=True)  # float16 rounds the least, and the step
        assert np.all(np.abs(found[:, plane] - own) <= spread / 30 * 1.02 + size * 2.0**-9 + 1e-6)


def test_keys_with_large_channels_lose_less_than_by_rows_of_eight_bits() -> None:
    draw = np.random.default_rng(4)
    values = draw.normal(size=SHAPE).astype(np.float32)
    values[:, 0, :, :, 2] += 300  # one channel of every key
    by_row = decode("int8", memoryview(encode("int8", values, GROUP)), GROUP).reshape(SHAPE)
    others = [0, 1, 3, 4, 5, 6, 7]
    lost = [np.abs(found - values)[:, 0][..., others].mean() for found in (brought(values), by_row)]
    assert lost[0] < lost[1] / 5


def test_zeros_and_constants_come_back_as_they_are() -> None:
    for number in (0.0, -2.5):
        assert np.array_equal(brought(np.full(SHAPE, number, np.float32)), np.full(SHAPE, number, np.float32))


def test_numbers_beyond_float16_come_back_as_its_largest_and_a_nan_harms_its_group_alone() -> None:
    values = np.zeros(SHAPE, np.float32)
    values[0, 0, 0, 0, 0], values[1, 1, 3, 2, 5] = 1e9, np.nan
    found = brought(values)
    assert found[0, 0, 0, 0, 0] == pytest.approx(65504, rel=1e-3)
    assert np.isnan(found).sum() == 8
    assert np.isnan(found[1, 1, 3, 2]).all()


def test_a_plane_of_latents_is_coded_by_channel() -> None:
    latent = LayerGroup("full", ("latent",), 1, 1, 6)
    values = np.random.default_rng(1).normal(size=(1, 1, 16, 1, 6)).astype(np.float32)
    assert np.abs(brought(values, latent) - values).max() < 0.3


def test_four_bits_take_a_third_of_bfloat16_for_heads_of_128() -> None:
    group = LayerGroup("full", ("k", "v"), 32, 8, 128)
    assert coded_bytes("int4", group) / (32 * 2 * 16 * 8 * 128 * 2) < 0.33
