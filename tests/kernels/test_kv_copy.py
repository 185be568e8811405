"""Blocks copied and checksummed in one pass: the library's own XXH3-64 as the oracle, on every ISA of this CPU."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import xxhash

from baton.kernels.abi import build, native
from baton.kernels.kv_copy import cpu, reference
from tests.kernels.conftest import needs_native
from tests.kernels.kv_copy_suite import (
    DATA,
    RNG,
    SIZES,
    call,
    copies_and_sums_are_right,
    what_is_hashed_is_the_copy,
)
from tests.kernels.mutants import is_caught, mutant

pytestmark = needs_native
KNOWN = {256: 0x44F5D90DACDE463A, 1024: 0xE5D78BAFA45B2AA5, 4096: 0x7135FFA504F1BC71}  # of bytes i % 251


@pytest.fixture(params=[isa for isa in native.able() if isa != "avx_vnni"])  # which has avx2's copies
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    return native.load(build.built(request.param))


def test_every_byte_is_copied_and_the_checksum_is_the_librarys(library: ctypes.CDLL) -> None:
    copies_and_sums_are_right(library)


def test_what_is_hashed_is_what_was_stored_though_the_source_has_changed(library: ctypes.CDLL) -> None:
    what_is_hashed_is_the_copy(library)


def test_without_places_it_only_hashes(library: ctypes.CDLL) -> None:
    for size in SIZES:
        at = [int(RNG.integers(0, len(DATA) - size)) for _ in range(3)]
        found = call(library)(None, [DATA.ctypes.data + start for start in at], size)
        assert found == [xxhash.xxh3_64_intdigest(DATA[start : start + size].data) for start in at]


def test_no_blocks_are_no_work(library: ctypes.CDLL) -> None:
    assert call(library)([], [], 4096) == []


def test_the_values_that_are_on_the_wire_never_change() -> None:
    for size, known in KNOWN.items():
        data = np.array([i % 251 for i in range(size)], np.uint8)
        assert cpu.kv_copy(None, [data.ctypes.data], size) == [known]
        assert reference.kv_copy(None, [data.ctypes.data], size) == [known]


@pytest.mark.parametrize("size", [1, 16, 240, 241, 4096])
def test_the_op_is_its_reference_also_where_the_native_algorithm_does_not_reach(size: int) -> None:
    mine, theirs = np.zeros((2, size), np.uint8), np.zeros((2, size), np.uint8)
    src = [DATA.ctypes.data + 5, DATA.ctypes.data + 1000]
    found = cpu.kv_copy([row.ctypes.data for row in mine], src, size)
    assert found == reference.kv_copy([row.ctypes.data for row in theirs], src, size)
    assert (mine == theirs).all()
    assert (mine[0] == DATA[5 : 5 + size]).all()


def test_the_copy_alone_copies() -> None:
    place = np.zeros(70_000, np.uint8)
    cpu.copy_only([place.ctypes.data], [DATA.ctypes.data + 3], len(place))
    assert (place == DATA[3 : 3 + len(place)]).all()


@pytest.mark.parametrize("bug", ["KV_COPY_NO_SCRAMBLE", "KV_COPY_SHORT", "KV_COPY_HASHES_SOURCE"])
def test_planted_bugs_are_caught(bug: str) -> None:
    broken = mutant(bug, ["kv_copy"])
    assert is_caught(broken, [copies_and_sums_are_right, what_is_hashed_is_the_copy])
