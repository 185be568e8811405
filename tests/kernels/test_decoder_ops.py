"""Ops that only some decoders have, on the CPU: float64's numbers, the same bits on each ISA, planted bugs."""

from __future__ import annotations

import ctypes
from functools import partial

import pytest
import torch

from baton.kernels.abi import native
from tests.kernels import decoder_ops_suite as suite
from tests.kernels.conftest import needs_native
from tests.kernels.mutants import is_caught, mutant, sound
from tests.thorough import first_now

pytestmark = needs_native

BUGS = {
    "LAYER_NORM_EPS": ("layer_norm", "norms"),
    "CENTER_TAIL": ("layer_norm", "centers"),
    "RELU_SQUARED": ("activate", "activations"),
    "HALVE_ODD": ("halve_heads", "halved_heads"),
    "TEMPER_SHIFT": ("halve_heads", "tempered_queries"),
    "ROPE": ("rope_append", "rotated_heads"),
    "ROUTE_TWO_FAR": ("route_two", "two_experts"),
    "SCAN_FADE": ("selective_scan", "selective_scans"),
    "CONVOLVE_PAST": ("selective_scan", "selective_scans"),
}
# Beside the ISA that this process runs on; tiles and AVX-VNNI multiply matrices alone.
OTHERS = [isa for isa in native.testable() if isa not in (native.isa(), "avx_vnni") and not isa.startswith("amx")]


@pytest.mark.parametrize("case", suite.CASES)
def test_results_are_the_references(library: ctypes.CDLL, case: str) -> None:
    suite.check(library, case)


def test_a_rows_bits_are_its_own_however_its_sequence_is_cut(library: ctypes.CDLL) -> None:
    suite.cuts_and_company_change_no_bit(library)
    suite.a_rows_bits_are_its_own(library)


@pytest.mark.parametrize("isa", OTHERS)
def test_each_isa_comes_to_the_same_bits(library: ctypes.CDLL, isa: str) -> None:
    other = sound(suite.SOURCES, isa)
    for case in suite.CASES:
        pairs = zip(suite.results(library, case), suite.results(other, case), strict=True)
        assert all(torch.equal(mine, theirs) for (mine, _), (theirs, _) in pairs), case


@pytest.mark.parametrize("bug", first_now(list(BUGS), 0))
def test_a_planted_bug_is_caught(bug: str) -> None:
    source, case = BUGS[bug]
    assert is_caught(mutant(bug, (source,)), [partial(suite.check, case=case)])
