"""Adapters beside a layer on the CPU: the reference's sums, bits that company doesn't change, planted bugs."""

from __future__ import annotations

import ctypes

import pytest
import torch

from baton.kernels.abi import build, native
from tests.kernels import lora_suite as suite
from tests.kernels.conftest import needs_native
from tests.kernels.mutants import is_caught, mutant
from tests.thorough import first_now

pytestmark = needs_native


@pytest.mark.parametrize("check", suite.CHECKS, ids=lambda check: check.__name__)
def test_checks_hold(library: ctypes.CDLL, check: suite.Check) -> None:
    check(library)


def test_threads_change_no_bit(library: ctypes.CDLL) -> None:
    x, out, before, found = torch.randn(70, 40), torch.randn(70, 72), native._threads, []
    groups = [(range(0, 70, 2), (suite.matrices(8, 40, 72),)), (range(1, 70, 2), (suite.matrices(16, 40, 72),))]
    for count in (1, 2, 5):
        native.set_threads(count)
        found.append(suite.run(library, groups, out, x))
    native.set_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("bug", first_now(["LORA_GROUP", "LORA_TAIL"], 0))
def test_a_planted_bug_is_caught(bug: str) -> None:
    assert is_caught(mutant(bug, ("lora",)), suite.CHECKS)


@pytest.mark.thorough
@pytest.mark.parametrize("isa", [name for name in native.testable() if name != native.isa()])
def test_other_instruction_sets_agree(isa: str) -> None:
    other = native.load(build.built(isa))
    for check in suite.CHECKS:
        check(other)
