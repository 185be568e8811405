"""The last minute by class: percentiles, verdicts, slots that leave, processes that add up."""

import random

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from baton.cluster.telemetry import RouterMetrics
from baton.router.live import Ended, LiveState, LiveStats, bin_of, merged, percentiles, verdict
from baton.router.metering import Meter
from baton.router.request import Summary
from baton.router.reuse import EndlessCache, ReuseMeter
from baton.router.tagging import ContextClass, ContextClasses


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def ended(**fields) -> Ended:
    base = {
        "at": 1.0, "request_id": "r", "model": "m", "context_class": "short", "outcome": "stop", "way": "prefill",
        "prefill": "p0", "decode": "d0", "prompt_tokens": 100, "cached_tokens": 40, "output_tokens": 10,
        "duration_s": 0.5, "ttft_s": 0.1, "tpot_s": 0.02, "longest_gap_s": 0.05, "stations": {"queue": 0.01},
        "slo_ttft_s": 0.2, "slo_tpot_s": 0.05, "verdict": "met",
    }  # fmt: skip
    return Ended(**(base | fields))


def test_percentiles_are_right_to_a_bin():
    values = [random.Random(7).lognormvariate(-3, 1) for _ in range(5000)]
    bins: dict[int, int] = {}
    for value in values:
        bins[bin_of(value)] = bins.get(bin_of(value), 0) + 1
    values.sort()
    found = percentiles(bins)
    for q in (50, 95, 99):
        assert found[f"p{q}"] == pytest.approx(values[int(q / 100 * 5000) - 1], rel=0.03)
    assert percentiles({}) is None


@pytest.mark.parametrize(
    ("ttft", "tpot", "slos", "ok", "found"),
    [
        (0.1, 0.02, (0.2, 0.05), True, "met"),
        (0.3, 0.02, (0.2, 0.05), True, "missed"),
        (0.1, 0.09, (0.2, 0.05), True, "missed"),
        (0.1, None, (0.2, 0.05), True, "unjudged"),
        (0.3, None, (0.2, 0.05), True, "missed"),
        (0.1, None, (0.2, 0.0), True, "met"),
        (None, None, (0.2, 0.0), False, "missed"),
        (0.1, 0.02, (0.2, 0.05), False, "missed"),
        (0.1, 0.02, (0.0, 0.0), True, ""),
    ],
)
def test_a_request_is_good_when_every_slo_is_met(ttft, tpot, slos, ok, found):
    assert verdict(ttft, tpot, *slos, ok) == found


def test_what_is_older_than_a_minute_is_forgotten():
    clock = Clock()
    live = LiveStats(clock)
    live.ended(ended(), {bin_of(0.02): 9})
    assert live.state({}).classes["short"].counts == {"ended": 1, "met": 1, "in": 100, "cached": 40, "out": 10}
    clock.now += 30
    live.refused("short", had_slo=True)
    assert live.state({}).classes["short"].counts["missed"] == 1
    clock.now += 45
    assert live.state({}).classes["short"].counts == {"refused": 1, "missed": 1}
    clock.now += 60
    assert live.state({}).classes == {}
    assert len(live.state({}).recent) == 1


def test_processes_add_up_over_the_wire():
    states = []
    for n in (1, 2):
        live = LiveStats(Clock())
        for i in range(n):
            live.ended(ended(at=float(i), request_id=f"{n}-{i}"), {bin_of(0.02): 3})
        states.append(msgspec.json.decode(msgspec.json.encode(live.state({"short": n})), type=LiveState))
    both = merged(states)
    assert both.classes["short"].counts["ended"] == 3
    assert sum(both.classes["short"].bins["itl"].values()) == 9
    assert both.waiting == {"short": 3}
    assert [e.at for e in both.recent] == [1.0, 0.0, 0.0]


def meter(clock, summary, told, registry=None):
    metrics = RouterMetrics(registry or CollectorRegistry())
    return Meter(metrics, clock, clock(), "m", summary, True, None, lambda *what: told.append(what), "r1")


def test_a_meter_tells_what_a_client_saw():
    clock, told, registry = Clock(), [], CollectorRegistry()
    summary = Summary(
        prompt_tokens=5, context_class="short", stations={"queue": 0.01}, slo_ttft_s=0.2, slo_tpot_s=0.02
    )
    one = meter(clock, summary, told, registry)
    clock.now += 0.1
    one.took(1)
    clock.now += 0.03
    one.took(3)
    one.ended("length")
    one.ended("stop")
    ((over, gaps),) = told
    assert (over.output_tokens, over.verdict, over.request_id) == (4, "met", "r1")
    assert over.ttft_s == pytest.approx(0.1)
    assert over.longest_gap_s == pytest.approx(0.03)
    assert gaps == {bin_of(0.01): 3}
    shown = generate_latest(registry).decode()
    assert 'baton_slo_requests_total{context_class="short",model="m",slo="all",verdict="met"} 1.0' in shown
    assert 'baton_inter_token_latency_seconds_count{context_class="short",model="m"} 3.0' in shown


def test_one_token_is_not_judged_by_its_tpot_and_a_failure_misses():
    clock, told = Clock(), []
    for outcome, found in (("stop", "unjudged"), ("worker_lost", "missed"), ("cancelled", "")):
        one = meter(clock, Summary(prompt_tokens=5, slo_ttft_s=0.2, slo_tpot_s=0.02, stations={}), told)
        one.took(1)
        one.ended(outcome)
        assert told[-1][0].verdict == found


def test_an_endless_cache_knows_every_prefix_it_has_seen():
    cache = EndlessCache()
    chain = [i.to_bytes(32, "little") for i in range(100, 140)]
    assert cache.seen(chain[:20]) == 0
    assert cache.seen(chain) == 20
    assert cache.seen(chain[:7]) == 7
    other = [*chain[:10], *(i.to_bytes(32, "little") for i in range(900, 910))]
    assert cache.seen(other) == 10


def test_an_endless_cache_is_bounded_all_the_same():
    cache = EndlessCache(kept=100)
    for n in range(50):
        cache.seen([f"{n:8d}{i:8d}".encode()[-8:] + n.to_bytes(8, "little") for i in range(30)])
    assert len(cache._young) + len(cache._old) <= 230


def test_reuse_counts_a_request_once_and_leaves_a_token_to_compute():
    from baton.protos.nouns import Sampling
    from baton.router.request import RouterRequest

    told = []
    reuse = ReuseMeter(ContextClasses([ContextClass("all")]), lambda *what: told.append(what))
    hashes = [bytes([i]) * 32 for i in range(2)]
    for name in ("a", "b", "b", "c"):
        reuse(RouterRequest(name, "m", tuple(range(32)), Sampling()), hashes)
    assert told == [("m", "all", 0), ("m", "all", 31), ("m", "all", 31)]
