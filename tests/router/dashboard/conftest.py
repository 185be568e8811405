"""One watched cluster for all tests of the operator's surface."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.bench.router.cluster import BenchCluster
from baton.router.access.keys import add_key
from tests.router.dashboard.watched import CLASSES, Watched


@pytest.fixture(scope="session")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    keys = Path(tmp_path_factory.mktemp("keys")) / "keys.json"
    admin, tenant = add_key(keys, "ops", 0.0, admin=True), add_key(keys, "someone", 0.0)
    with BenchCluster(
        decode=2, prefill=1, fixed=0.01, prefill_s=5e-5, pages=600, keys_file=str(keys), context_classes=CLASSES,
        local_prefill_max_tokens=0,
    ) as cluster:  # fmt: skip
        yield Watched(cluster, admin, tenant)
