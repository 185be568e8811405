"""The benchmark of telemetry's parts drives each of them."""

from __future__ import annotations

from bench.telemetry_parts import A_LOOK, PARTS, least


def test_each_part_is_measured_hot_and_cold() -> None:
    for cold in (False, True):
        found = least(A_LOOK, 100, 1, cold)
        assert list(found) == list(PARTS)
        assert all(microseconds > 0 for microseconds in found.values())
