"""One watched cluster for the tests of a file: it computes while nobody asks, so it ends with them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.bench.router.cluster import BenchCluster
from baton.router.access.keys import add_key
from tests.e2e.fleet import ForkedProcesses
from tests.router.dashboard.watched import CLASSES, Watched


class WatchedCluster(ForkedProcesses, BenchCluster):
    """A paced cluster whose processes are forks."""


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    keys = Path(tmp_path_factory.mktemp("keys")) / "keys.json"
    admin, tenant = add_key(keys, "ops", 0.0, admin=True), add_key(keys, "someone", 0.0)
    with WatchedCluster(
        decode=2, prefill=1, fixed=0.01, prefill_s=5e-5, pages=600, keys_file=str(keys), context_classes=CLASSES,
        local_prefill_max_tokens=0,
    ) as cluster:  # fmt: skip
        yield Watched(cluster, admin, tenant)
