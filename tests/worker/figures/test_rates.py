"""Tests rates from totals: over the last seconds, falling to nothing when nothing happens."""

import pytest

from baton.protos.channel import Stats
from baton.protos.measurements import EngineWork
from baton.worker.figures.rates import BUSY, Rates, bytes_read, flops, work_totals


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_rate_is_of_the_last_seconds_alone():
    clock = Clock()
    rates = Rates(clock, over_s=5.0)
    rates.now({})
    for total in range(10, 110, 10):
        clock.now += 1.0
        rates.now({"tokens": float(total)})
    assert rates.per_second()["tokens"] == 10.0
    clock.now += 1.0
    assert 7.0 <= rates.per_second()["tokens"] <= 8.0
    clock.now += 20.0
    assert rates.per_second()["tokens"] == 0.0


def test_the_first_total_counts_from_the_start():
    clock = Clock()
    rates = Rates(clock, over_s=5.0)
    assert rates.per_second() == {}
    rates.now({})
    clock.now += 2.0
    rates.now({"bytes": 500.0})
    assert rates.per_second() == {"bytes": 250.0}


@pytest.mark.parametrize("step_s", [0.5, 4.0, 40.0])
def test_an_engine_that_is_always_in_a_step_is_never_busier_than_that(step_s: float):
    clock = Clock()
    rates = Rates(clock, over_s=5.0)
    rates.now({})
    for step in range(1, 13):
        clock.now += step_s
        rates.now({BUSY: step * step_s, "tokens": step * step_s * 10})
        assert rates.per_second() == pytest.approx({BUSY: 1.0, "tokens": 10.0}, rel=0.11)
    clock.now += step_s + 5.0
    assert rates.per_second()["tokens"] < 10.0


def test_a_step_after_a_long_rest_counts_for_the_last_seconds():
    clock = Clock()
    rates = Rates(clock, over_s=5.0)
    rates.now({})
    clock.now += 1000.0
    rates.now({BUSY: 1.0, "tokens": 10.0})
    assert rates.per_second() == {BUSY: 0.2, "tokens": 2.0}


def test_what_steps_cost_follows_from_their_totals():
    work = EngineWork(10.0, 3.0, 2.0, 1000.0, 8.0, 1e3, 1e6)
    stats = Stats(
        step=4, running=1, waiting=0, waiting_tokens=0, free_pages=1, cached_pages=0, leased_pages=0, preemptions=0,
        leases_swept=0, tokens_prefilled=100, tokens_decoded=7, prefix_hit_tokens=0, prefix_asked_tokens=0,
        step_seconds_p50=0.0, busy_seconds=0.5, prefill_pairs=50.0, decode_context=20,
    )  # fmt: skip
    assert flops(stats, work) == 107 * 10 + 7 * 3 + 70 * 2
    assert bytes_read(stats, work) == 4 * 1000 + 20 * 8
    assert "flops" not in work_totals(stats, None)
