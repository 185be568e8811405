"""The last minute by class: percentiles, verdicts, slots that leave, processes that add up."""

import random

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from baton.cluster.metering.telemetry import RouterMetrics
from baton.cluster.prefix_index import HASH_BYTES, truncated
from baton.kv.layout import prefix
from baton.router.observe.live import (
    SLOT_S,
    ClassWindow,
    LiveState,
    LiveStats,
    bin_of,
    merged,
    percentiles,
    verdict,
)
from baton.router.observe.reuse import UnboundedCache
from baton.router.observe.tallies import Tallies
from tests.router.ends import ended


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


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
    metrics = RouterMetrics(CollectorRegistry())
    live = LiveStats(clock, metrics.asked.now)
    tallies = Tallies(metrics, live, clock)
    tallies.fold()
    tallies.of("m", "short").requests.append("stop")
    tallies.ended(tallies.of("m", "short"), ended(), b"")
    assert live.state({}).classes["short"].counts == {"ended": 1, "met": 1, "in": 100, "cached": 40, "out": 10}
    clock.now += 30
    live.refused("short", missed=1)
    assert live.state({}).classes["short"].counts["missed"] == 1
    clock.now += 45
    assert live.state({}).classes["short"].counts == {"refused": 1, "missed": 1}
    clock.now += 60
    assert live.state({}).classes == {}
    assert len(live.state({}).recent) == 1


def test_looks_in_between_change_nothing():
    rng, clock = random.Random(8), Clock()
    watched, unwatched = LiveStats(clock), LiveStats(clock)
    for _ in range(400):
        slot, name = int(clock() / SLOT_S) - rng.choice([0, 0, 0, 1]), rng.choice("ab")
        window = ClassWindow({"ended": rng.randrange(5)}, {"e2e": {rng.randrange(9): 1}})
        for live in (watched, unwatched):
            live.add(slot, name, window)
        watched.state({})
        clock.now += rng.random() * 2
    assert watched.state({}) == unwatched.state({})


def test_processes_add_up_over_the_wire():
    states = []
    for n in (1, 2):
        live = LiveStats(Clock())
        for i in range(n):
            live.recent.append(ended(at=float(i), request_id=f"{n}-{i}"))
            live.add(200, "short", ClassWindow({"ended": 1}, {"itl": {bin_of(0.02): 3}}))
        states.append(msgspec.json.decode(msgspec.json.encode(live.state({"short": n})), type=LiveState))
    both = merged(states)
    assert both.classes["short"].counts["ended"] == 3
    assert sum(both.classes["short"].bins["itl"].values()) == 9
    assert both.waiting == {"short": 3}
    assert [e.at for e in both.recent] == [1.0, 0.0, 0.0]


def test_an_endless_cache_knows_every_prefix_it_has_seen():
    cache = UnboundedCache()
    chain = [i.to_bytes(HASH_BYTES, "little") for i in range(100, 140)]
    assert cache.seen(b"".join(chain[:20])) == 0
    assert cache.seen(b"".join(chain)) == 20
    assert cache.seen(b"".join(chain[:7])) == 7
    other = [*chain[:10], *(i.to_bytes(HASH_BYTES, "little") for i in range(900, 910))]
    assert cache.seen(b"".join(other)) == 10


def test_an_endless_cache_is_bounded_all_the_same():
    cache = UnboundedCache(kept=100)
    for n in range(50):
        cache.seen(b"".join(f"{n:8d}{i:8d}".encode() for i in range(30)))
    assert len(cache) <= 230


def test_an_endless_cache_knows_what_sets_of_blocks_would():
    rng, cache, blocks, made = random.Random(3), UnboundedCache(), set[bytes](), [[0]]
    for _ in range(500):
        base = rng.choice(made)[: rng.randrange(25)]
        made.append(base + [rng.randrange(3) for _ in range(rng.randrange(12))])
        chain = prefix.block_hashes(b"", made[-1], 1)
        known = next((i for i, h in enumerate(chain) if h not in blocks), len(chain))
        blocks |= {*chain}
        assert cache.seen(truncated(chain)) == known
        assert len(cache) == len(blocks)


def test_what_an_endless_cache_holds_leaves_a_token_to_compute():
    cache, chain = UnboundedCache(), bytes(range(2 * HASH_BYTES))
    assert [cache.could_reuse(chain, tokens) for tokens in (32, 32, 40)] == [0, 31, 32]
    assert cache.could_reuse(b"", 5) == 0
