"""Ops of several residual streams and of layers' own inputs: float64's numbers, the same bits on each ISA, bugs."""

from __future__ import annotations

import ctypes
from functools import partial

import pytest
import torch

from baton.kernels.abi import native
from tests.kernels import stream_ops_suite as suite
from tests.kernels.conftest import needs_native
from tests.kernels.mutants import is_caught, mutant, sound
from tests.kernels.span_suite import near
from tests.thorough import first_now

pytestmark = needs_native

BUGS = {
    "STREAMS_TURNED": ("predict_streams", "predicted_streams"),
    "STREAMS_ONE": ("predict_streams", "corrected_streams"),
    "MATCH_LEAST": ("predict_streams", "matched_sizes"),
    "INPUTS_UNKNOWN": ("layer_inputs", "inputs_of_layers"),
    "SPARSEN_MEAN": ("layer_inputs", "sparsened_gates"),
}
# Beside the ISA that this process runs on; tiles and AVX-VNNI multiply matrices alone.
OTHERS = [isa for isa in native.testable() if isa not in (native.isa(), "avx_vnni") and not isa.startswith("amx")]


def results(library: ctypes.CDLL, case: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(len(case))
    return [(found.clone(), wanted) for found, wanted in suite.CASES[case](library)]


def check(library: ctypes.CDLL, case: str) -> None:
    for found, wanted in results(library, case):
        near(found, wanted, 1e-5)


@pytest.mark.parametrize("case", suite.CASES)
def test_results_are_the_references(library: ctypes.CDLL, case: str) -> None:
    check(library, case)


def test_a_rows_bits_are_its_own(library: ctypes.CDLL) -> None:
    suite.a_rows_bits_are_its_own(library)


@pytest.mark.parametrize("isa", OTHERS)
def test_each_isa_comes_to_the_same_bits(library: ctypes.CDLL, isa: str) -> None:
    other = sound((*suite.SOURCES, "rms_norm", "embedding"), isa)
    for case in suite.CASES:
        pairs = zip(results(library, case), results(other, case), strict=True)
        assert all(torch.equal(mine, theirs) for (mine, _), (theirs, _) in pairs), case


@pytest.mark.parametrize("bug", first_now(list(BUGS), 0))
def test_a_planted_bug_is_caught(bug: str) -> None:
    source, case = BUGS[bug]
    sources = (source, "embedding") if source == "layer_inputs" else (source,)
    assert is_caught(mutant(bug, sources), [partial(check, case=case)])
