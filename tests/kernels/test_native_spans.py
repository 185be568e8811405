"""Latents, grouped routing, gates and recurrences on the CPU: the references' numbers, own bits, planted bugs."""

from __future__ import annotations

import ctypes

import pytest

from baton.kernels.abi import build, native
from tests.kernels import span_suite as suite
from tests.kernels.conftest import needs_native
from tests.kernels.mutants import is_caught, mutant
from tests.thorough import first_now

pytestmark = needs_native

BUGS = {
    "LATENT_CAUSAL": ("latent_attention", suite.LATENTS),
    "LATENT_PAIRED": ("latent_attention", suite.LATENTS),
    "LATENT_TAIL": ("latent_attention", suite.LATENTS),
    "ROUTE_BIAS": ("route", suite.EXPERTS[:1]),
    "ROUTE_GROUPS": ("route", suite.EXPERTS[:1]),
    "COMBINE_GATE": ("combine", suite.EXPERTS[1:]),
    "DELTA_FADE": ("gated_delta", suite.RECURRENT[:1]),
    "CONVOLVE_PAST": ("gated_delta", suite.RECURRENT[:1]),
    "STATE_SKIP": ("state_space", suite.RECURRENT[1:2]),
}


@pytest.mark.parametrize("check", suite.CHECKS, ids=lambda check: check.__name__)
def test_checks_hold(library: ctypes.CDLL, check: suite.Check) -> None:
    check(library)


@pytest.mark.parametrize("bug", first_now(list(BUGS), 0))
def test_a_planted_bug_is_caught(bug: str) -> None:
    source, checks = BUGS[bug]
    assert is_caught(mutant(bug, (source,)), checks)


@pytest.mark.thorough
@pytest.mark.parametrize("isa", [name for name in native.testable() if name != native.isa()])
def test_other_instruction_sets_agree(isa: str) -> None:
    other = native.load(build.built(isa))
    for check in suite.CHECKS:
        check(other)
