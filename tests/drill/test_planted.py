"""Bugs planted in the product's source are found by the simulation."""

from __future__ import annotations

import pytest

from tests.drill.bugs import BUGS, Bug
from tests.drill.planted import PACKAGE, find

QUICK = "the hash root has no tenant in it"


@pytest.mark.parametrize("bug", BUGS, ids=[bug.name for bug in BUGS])
def test_the_source_still_has_the_text_that_is_replaced(bug: Bug) -> None:
    for file, old, _ in bug.edits:
        assert (PACKAGE / file).read_text().count(old) == 1, file


def test_a_planted_bug_is_found() -> None:
    finding = find(next(bug for bug in BUGS if bug.name == QUICK), 20)
    assert finding.seed is not None, finding.said


@pytest.mark.thorough
@pytest.mark.timeout(900)
@pytest.mark.parametrize("bug", BUGS, ids=[bug.name for bug in BUGS])
def test_every_planted_bug_is_found(bug: Bug) -> None:
    finding = find(bug, 400, seconds=800.0)
    assert finding.seed is not None, finding.said
