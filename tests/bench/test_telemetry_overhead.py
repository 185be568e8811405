"""Tests telemetry's benchmark: rounds are paired and turned, and a cluster that is slower in every round is found
so.
"""

import asyncio
from collections import Counter

import pytest

from bench import telemetry_overhead as bench


class FakeSide:
    """A cluster whose rate is its own share of the machine's, which changes from one load to the next."""

    order: list[str] = []

    def __init__(self, name: str) -> None:
        self._name, self._share = name, {"on": 0.97, "off": 1.0}[name]

    async def measure(self, load, number) -> tuple[float, Counter[str]]:
        FakeSide.order.append(self._name)
        machine = 100.0 + 10.0 * (number // 4 % 5)
        return machine * self._share, Counter({"router": 0.5 / self._share, bench.ALL: 2.0})

    @property
    def running(self):
        return self


def test_what_slows_a_whole_round_cancels_out(monkeypatch: pytest.MonkeyPatch) -> None:
    async def load(running, number) -> int:
        return 1

    monkeypatch.setattr(bench, "Side", FakeSide)
    monkeypatch.setattr(FakeSide, "order", [])
    found = asyncio.run(bench.compare(bench.Kind("rate", "req/s", "free", load), "on", "off", 10))
    assert found.ratios == pytest.approx([0.97] * 10)
    assert found.row.ratio == pytest.approx(0.97)
    assert not found.row.reached
    assert found.cpu == {"router": pytest.approx([1 / 0.97] * 10), bench.ALL: [1.0] * 10}
    assert FakeSide.order[:8] == ["off", "on", "on", "off", "on", "off", "off", "on"]
    assert "0.970 (0.970 to 0.970)" in bench.told(found)
    assert "CPU time of router: 1.031" in bench.told(found)


def test_a_pair_of_clusters_counts_as_one() -> None:
    shares = [0.98, 0.99, 1.0]
    pairs = [
        bench.Compared("rate", "req/s", (100 * s, 100.0), [s - 0.1, s + 0.1], {bench.ALL: [1.0, 3.0]})
        for s in shares
    ]
    found = bench.joined(pairs)
    assert found.ratios == pytest.approx([0.98, 0.99, 1.0])
    assert found.cpu == {bench.ALL: [2.0, 2.0, 2.0]}
    assert found.row.value == 99.0
    assert found.row.ratio == pytest.approx(0.99)
