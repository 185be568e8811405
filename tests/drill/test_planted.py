"""Bugs planted in the product's source are found by the simulation."""

from __future__ import annotations

import pytest
from _pytest.mark import ParameterSet

from tests.drill.bugs import BUGS, Bug
from tests.drill.planted import PACKAGE, find

QUICK = "an index is emitted twice at the seam of a migration"


@pytest.mark.parametrize("bug", BUGS, ids=[bug.name for bug in BUGS])
def test_the_source_still_has_the_text_that_is_replaced(bug: Bug) -> None:
    for file, old, _ in bug.edits:
        assert (PACKAGE / file).read_text().count(old) == 1, file


def test_a_planted_bug_is_found() -> None:
    finding = find(next(bug for bug in BUGS if bug.name == QUICK), seconds=60.0)
    assert finding.seed is not None, finding.said


def hunted(bug: Bug) -> ParameterSet:
    """Returns a case of the hunt; a bug that can't be found yet is reported as such instead of failing."""
    return pytest.param(bug, id=bug.name, marks=[pytest.mark.xfail(reason=bug.missed)] if bug.missed else [])


@pytest.mark.thorough
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("bug", [hunted(bug) for bug in BUGS])
def test_every_planted_bug_is_found(bug: Bug) -> None:
    finding = find(bug)
    assert finding.seed is not None, finding.said
