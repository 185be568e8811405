"""Says which of many cases run in every suite, and which with ``make thorough`` and ``make cuda-check`` alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def later(*values: Any) -> Any:
    """Returns a case for ``parametrize`` that runs with ``make thorough`` alone; ``values`` are its parameters."""
    return pytest.param(*values, marks=pytest.mark.thorough)


def first_now(cases: Sequence[Any], count: int = 1, whole: bool = False) -> list[Any]:
    """Returns cases for ``parametrize``: the first ``count`` as they are, the others marked as thorough.

    A tuple is a case's several parameters, or one parameter where ``whole`` says so.
    """
    rest = [later(*(case if isinstance(case, tuple) and not whole else (case,))) for case in cases[count:]]
    return [*cases[:count], *rest]
