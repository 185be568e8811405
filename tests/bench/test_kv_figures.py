"""The figures of index and tiers, small: each is there, and lifting beats computing by far."""

import pytest

from baton.bench.kv import prefix_index, tiers
from baton.cluster.served_model import DEMO


@pytest.mark.thorough
def test_the_index_is_measured_at_full_size():
    rows = {row.name.split(" (")[0]: row for row in prefix_index.rows(questions=10)}
    assert 0 < rows["index look-up p50"].value < 50
    assert rows["index look-up p50"].target == 2.0
    assert rows["hashing 131,072 tokens"].value > 0


@pytest.mark.thorough
def test_lifting_from_every_tier_is_held_against_computing_and_its_neighbour_is_watched():
    rows = {row.name: row for row in tiers.rows(str(DEMO), tokens=256, rounds=1, computed=128, window_s=0.01)}
    for tier in ("host", "disk", "disk, cold"):
        assert rows[f"{tier}: faster than computing by"].value > 1
    for what in ("lifting", "writing back"):
        row = rows[f"decode step while {what}, slower by"]
        assert row.ceiling
        assert row.low <= row.value <= row.high
        assert f"{row.name}, CPU time" in rows
