"""Tests that what is folded is what counting one by one would show, at the moment that somebody looks."""

import random
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics

from baton.cluster.config import RouterConfig
from baton.cluster.metering.telemetry import RouterMetrics
from baton.cluster.prefix_index import HASH_BYTES
from baton.protos.nouns import Sampling, TokenLogprob, TokenLogprobs
from baton.router.answer.metering import Meter, NoMeter, RequestEnds, TallyMetering
from baton.router.compose.surfaces import make_metering
from baton.router.observe.live import SLOT_S, LiveStats, bin_of
from baton.router.observe.tallies import MOST, Tallies, count_refusal
from baton.router.request.context import RequestContext
from baton.router.request.environment import Environment
from baton.router.request.request import ChoiceSummary, RouterRequest

LABELS = {"model": "m", "context_class": "short"}


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Router:
    """Holds what counts the answers of one router."""

    def __init__(self, enabled: bool = True) -> None:
        self.clock, self.registry = Clock(), CollectorRegistry()
        self.metrics = RouterMetrics(self.registry, enabled=enabled)
        self.live = LiveStats(self.clock, self.metrics.asked.now)
        self.tallies = Tallies(self.metrics, self.live, self.clock)

    def meter(self, summary: ChoiceSummary | None = None, first_choice: bool = True) -> Meter:
        summary = summary or ChoiceSummary(prompt_tokens=5, context_class="short", stations={})
        return Meter(self.tallies, self.clock(), "m", summary, first_choice, (), "r1")

    def sample(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"baton_{name}", LABELS | labels)


def slowly(meter: Meter, clock: Clock, *pieces: tuple[float, int]) -> None:
    for seconds, tokens in pieces:
        clock.now += seconds
        meter.took(tokens)


def test_an_answer_is_seen_as_its_client_saw_it() -> None:
    router = Router()
    summary = ChoiceSummary(
        prompt_tokens=5, cached_tokens=2, context_class="short", stations={"queue": 0.01, "ttft": 9.0},
        slo_ttft_s=0.2, slo_tpot_s=0.02,
    )  # fmt: skip
    meter = router.meter(summary)
    slowly(meter, router.clock, (0.1, 1), (0.03, 3))
    meter.ended("length")
    meter.ended("stop")
    state = router.live.state({})
    (over,) = state.recent
    assert (over.output_tokens, over.verdict, over.request_id, over.outcome) == (4, "met", "r1", "length")
    assert over.ttft_s == pytest.approx(0.1)
    assert over.longest_gap_s == pytest.approx(0.03)
    short = state.classes["short"]
    assert short.counts == {"ended": 1, "met": 1, "in": 5, "cached": 2, "out": 4}
    assert short.bins["itl"] == {bin_of(0.01): 3}
    assert short.bins["ttft"] == {bin_of(0.1): 1}
    assert short.bins["queue"] == {bin_of(0.01): 1}
    for slo in ("ttft", "tpot", "all"):
        assert router.sample("slo_requests_total", slo=slo, verdict="met") == 1
    assert router.sample("requests_total", outcome="length") == 1
    assert router.sample("inter_token_latency_seconds_count") == 3
    assert router.sample("time_to_first_token_seconds_sum") == pytest.approx(0.1)
    assert router.sample("station_seconds_count", station="queue") == 1
    assert router.sample("station_seconds_count", station="ttft") is None
    assert router.sample("prompt_tokens_cached_total") == 2


def test_what_became_of_drafts_is_counted_by_class() -> None:
    router = Router()
    for accepted, rejected in ((3, 1), (4, 0), (0, 0)):
        summary = ChoiceSummary(
            5, context_class="short", accepted_drafts=accepted, rejected_drafts=rejected, stations={}
        )
        meter = router.meter(summary)
        slowly(meter, router.clock, (0.1, 1), (0.03, 8))
        meter.ended("stop")
    router.live.state({})
    assert router.sample("prediction_tokens_total", outcome="accepted") == 7
    assert router.sample("prediction_tokens_total", outcome="rejected") == 1


def test_one_token_is_not_judged_by_its_tpot_and_a_failure_misses() -> None:
    router = Router()
    for outcome, found in (("stop", "unjudged"), ("worker_lost", "missed"), ("cancelled", "")):
        meter = router.meter(ChoiceSummary(prompt_tokens=5, slo_ttft_s=0.2, slo_tpot_s=0.02, stations={}))
        meter.took(1)
        meter.ended(outcome)
        assert router.live.state({}).recent[-1].verdict == found
    counts = router.live.state({}).classes[""].counts
    assert counts == {"ended": 3, "unjudged": 1, "missed": 1, "failed": 1, "in": 15, "cached": 0, "out": 3}


@pytest.mark.parametrize(
    ("seconds", "slo_tpot_s", "found"), [(0.1, 0.0, "met"), (0.3, 0.0, "missed"), (0.1, 0.02, "unjudged")]
)
def test_an_answer_without_a_token_is_judged_by_when_it_came(seconds: float, slo_tpot_s: float, found: str) -> None:
    router = Router()
    summary = ChoiceSummary(5, context_class="short", slo_ttft_s=0.2, slo_tpot_s=slo_tpot_s, stations={})
    embedded = router.meter(summary)
    slowly(embedded, router.clock, (seconds, 0))
    embedded.ended("stop")
    (over,) = router.live.state({}).recent
    assert (over.output_tokens, over.verdict) == (0, found)
    assert over.ttft_s == pytest.approx(seconds)
    assert router.sample("time_to_first_token_seconds_count") == 1
    assert router.sample("slo_requests_total", slo="all", verdict=found) == 1


@pytest.mark.parametrize(
    ("slos", "missed"), [((0.2, 0.02), ["ttft", "tpot", "all"]), ((0.2, 0.0), ["ttft", "all"]), ((0.0, 0.0), [])]
)
def test_each_choice_of_a_refused_request_missed_every_slo_that_was_asked_for(
    slos: tuple[float, float], missed: list[str]
) -> None:
    router, context = Router(), RequestContext().with_slos(*slos)
    request = RouterRequest("r1", "m", (1, 2), Sampling(), n=3, context=context)
    count_refusal(router.metrics, router.live, request, "short")
    for slo in ("ttft", "tpot", "all"):
        assert router.sample("slo_requests_total", slo=slo, verdict="missed") == (3 if slo in missed else None)
    counts = router.live.state({}).classes["short"].counts
    assert counts == ({"refused": 1, "missed": 3} if missed else {"refused": 1})


def test_an_answer_is_seen_while_it_is_written() -> None:
    router = Router()
    meter = router.meter()
    for written in range(1, 40):
        slowly(meter, router.clock, (0.01, 1))
        assert (router.sample("inter_token_latency_seconds_count") or 0) == written - 1
        assert router.sample("time_to_first_token_seconds_count") == 1
    assert router.sample("output_tokens_total") is None
    assert sum(router.live.state({}).classes["short"].bins["itl"].values()) == 38


@pytest.mark.parametrize(
    ("ends", "counted"),
    [
        (("stop", "length", "stop"), "stop"),
        (("stop", "worker_lost", "cancelled"), "worker_lost"),
        (("cancelled", "stop"), "cancelled"),
    ],
)
def test_a_request_counts_once_when_its_last_choice_ends_and_an_error_of_one_is_its_own(ends, counted) -> None:
    router, request = Router(), RequestEnds(len(ends))
    summary = ChoiceSummary(prompt_tokens=5, context_class="short", stations={}, slo_ttft_s=1.0)
    meters = [Meter(router.tallies, router.clock(), "m", summary, False, request=request) for _ in ends]
    for meter, outcome in zip(meters, ends, strict=True):
        assert sum(router.sample("requests_total", outcome=each) or 0 for each in ends) == 0
        meter.ended(outcome)
        meter.ended("cancelled")
    assert {each: router.sample("requests_total", outcome=each) for each in ends if each == counted} == {counted: 1}
    assert sum(router.sample("requests_total", outcome=each) or 0 for each in {*ends}) == 1
    seen = router.live.state({}).classes["short"].counts
    assert seen["ended"] == 1, "the dashboard's requests are requests, too"
    assert seen["in"] == 0, "and the tokens of a prompt are those of the choice that counts it"


def test_many_are_counted_as_if_each_had_been_observed() -> None:
    rng, router, plain = random.Random(4), Router(), RouterMetrics(CollectorRegistry())
    n = 2 * MOST + 7
    for _ in range(n):
        queue = rng.lognormvariate(-4, 2)
        first = rng.random() < 0.9
        prompt, cached, tokens = rng.randrange(1, 9000), rng.randrange(0, 9), rng.randrange(2, 400)
        summary = ChoiceSummary(prompt, cached_tokens=cached, context_class="short", stations={"queue": queue})
        meter, began = router.meter(summary, first), router.clock.now
        ttft, gap = rng.random(), rng.random()
        slowly(meter, router.clock, (ttft, 1), (gap, tokens - 1))
        meter.ended("stop")
        labels = ("m", "short")
        plain.requests.labels(*labels, "stop").inc()
        plain.output_tokens.labels(*labels).inc(tokens)
        plain.output_length.labels(*labels).observe(tokens)
        plain.duration.labels(*labels).observe(router.clock.now - began)
        plain.ttft.labels(*labels).observe(ttft)
        plain.tpot.labels(*labels).observe(gap / (tokens - 1))
        plain.longest_gap.labels(*labels).observe(gap)
        plain.station.labels(*labels, "queue").observe(queue)
        if first:
            plain.prompt_tokens.labels(*labels).inc(prompt)
            plain.cached_tokens.labels(*labels).inc(cached)
            plain.best_cached_tokens.labels(*labels).inc(0)
            plain.prompt_length.labels(*labels).observe(prompt)
    shown, expected = (
        {
            (s.name, *sorted(s.labels.items())): s.value
            for family in registry.collect()
            for s in family.samples
            if not s.name.endswith("_created") and not family.name.startswith("baton_inter_token")
        }
        for registry in (router.registry, plain.registry)
    )
    assert shown == pytest.approx(expected)
    assert shown["baton_requests_total", ("context_class", "short"), ("model", "m"), ("outcome", "stop")] == n


def test_what_nobody_looks_at_is_in_the_slot_in_which_it_happened() -> None:
    router = Router()
    for slot in range(4):
        for _ in range(slot + 1):
            meter = router.meter()
            slowly(meter, router.clock, (0.1, 1), (0.1, 4))
            meter.ended("stop")
        router.clock.now = 1000 + (slot + 1) * SLOT_S
    router.clock.now = 1000 + 12 * SLOT_S  # the first slot is too old by now
    seen = router.live.state({}).classes["short"]
    assert seen.counts["ended"] == 9
    assert sum(seen.bins["itl"].values()) == 36
    router.clock.now += 2 * SLOT_S
    assert router.live.state({}).classes["short"].counts["ended"] == 4


def test_a_trace_is_led_to_from_each_histogram_that_its_answer_is_in() -> None:
    router, trace = Router(), "ab" * 16
    meter = router.meter(ChoiceSummary(5, context_class="short", stations={"queue": 0.01}, trace_id=trace))
    slowly(meter, router.clock, (0.1, 1), (0.03, 3))
    meter.ended("stop")
    lines = [line for line in openmetrics(router.registry).decode().splitlines() if trace in line]
    assert {line.partition("_seconds")[0] for line in lines} == {
        "baton_time_to_first_token", "baton_time_per_output_token", "baton_longest_gap", "baton_request_duration",
        "baton_station",
    }  # fmt: skip
    assert "trace_id" not in generate_latest(router.registry).decode()


def test_nothing_that_an_answer_was_made_of_waits_with_its_figures() -> None:
    router = Router()
    scores = (TokenLogprobs(TokenLogprob(1, -1.0, 1)),)
    meter = router.meter(ChoiceSummary(5, context_class="short", stations={}, prompt_logprobs=scores))
    meter.took(1)
    meter.ended("stop")
    before = sys.getrefcount(scores)
    del meter
    assert sys.getrefcount(scores) == before - 1
    assert len(router.live.state({}).recent) == 1


def test_what_an_endless_cache_would_have_held_is_counted_once_a_prompt() -> None:
    router, chain = Router(), bytes(range(2 * HASH_BYTES))
    for first_choice in (True, False, True):
        router.meter(ChoiceSummary(40, context_class="short", stations={}, chain=chain), first_choice).ended("stop")
    assert router.live.state({}).classes["short"].counts["best"] == 32
    assert router.sample("prompt_tokens_total") == 80
    assert router.sample("prompt_tokens_cached_best_total") == 32


def test_the_trace_is_told_the_prompt_with_the_blocks_that_the_routing_made() -> None:
    router, told = Router(), []
    router.tallies.recorder = SimpleNamespace(record=lambda *what: told.append(what))
    summary = ChoiceSummary(5, context_class="short", stations={})
    meter = Meter(router.tallies, router.clock(), "m", summary, False, (1, 2, 3, 4, 5))
    summary.chain = b"found later"
    slowly(meter, router.clock, (0.5, 1), (0.5, 2))
    meter.ended("stop")
    assert told == [(1.0, (1, 2, 3, 4, 5), 3, b"found later", "")]


def test_without_telemetry_only_a_trace_makes_a_router_measure(tmp_path: Path) -> None:
    metrics = RouterMetrics(CollectorRegistry(), enabled=False)
    environment, traced = Environment(), RouterConfig(trace_file=str(tmp_path / "t.jsonl"))
    assert isinstance(make_metering(traced, metrics, None, environment), TallyMetering)
    unmetered = make_metering(RouterConfig(), metrics, None, environment).meters(None, [None], 0)[0]
    assert isinstance(unmetered, NoMeter)
    unmetered.took(3)
    unmetered.ended("stop")


def test_a_router_without_telemetry_shows_nothing_of_its_answers() -> None:
    router = Router(enabled=False)
    meter = router.meter()
    slowly(meter, router.clock, (0.1, 1), (0.1, 1))
    meter.ended("stop")
    assert "baton_requests" not in generate_latest(router.registry).decode()
