"""Which of many cases run in every suite, and which with ``make thorough`` and ``make cuda-check`` alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def first_now(cases: Sequence[Any], count: int = 1) -> list[Any]:
    """For ``parametrize``: the first ``count`` cases as they are, the others marked as thorough."""
    later = [
        pytest.param(*(c if isinstance(c, tuple) else (c,)), marks=pytest.mark.thorough) for c in cases[count:]
    ]
    return [*cases[:count], *later]
