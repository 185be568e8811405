"""Ranks that are processes fork from one that has imported all; in ``tests/e2e`` engines start them as they do."""

from __future__ import annotations

import pytest

from baton.engine.backends.ranks.followers import Follower
from tests import warm


@pytest.fixture(autouse=True)
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Follower, "spawn", staticmethod(warm.spawn_rank))
