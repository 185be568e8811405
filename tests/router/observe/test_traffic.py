"""Tests what a router tells of its traffic, from its decision records."""

import asyncio
from types import SimpleNamespace

import pytest

from baton.cluster.traffic import TrafficSlice
from baton.protos.adapter_id import number_of
from baton.protos.errors import Overloaded
from baton.protos.nouns import Sampling
from baton.router.observe import traffic
from baton.router.observe.decisions import DecisionLog
from baton.router.observe.traffic import TrafficMeter
from baton.router.policies import Option, RoutingDecision
from baton.router.request.context import RequestContext
from baton.router.request.request import ChoiceSummary, RouterRequest
from baton.router_host.compose import pushing_traffic


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def bench():
    clock = Clock()
    meter = TrafficMeter("r", clock)
    return clock, DecisionLog("r", lambda: 0.0, observer=meter), meter


def opened(log: DecisionLog, name: str, prompt: int = 100, **slos):
    request = RouterRequest(
        name, "m", tuple(range(prompt)), Sampling(max_tokens=20), context=RequestContext(**slos)
    )
    record = log.opened(request, "short")
    return record, log.trail(record, 0, ChoiceSummary(prompt_tokens=prompt, context_class="short"))


def placed(trail, queue: float = 0.1, read: float = 0.3, write: float = 0.4) -> None:
    option = Option("prefill", "d", "p", {"queue": queue, "read": read, "ship": 0.0, "write": write})
    trail.placed(RoutingDecision("cost", option, (option,), in_seconds=True), 0.05, 0.0)


async def ended(log: DecisionLog, record, trail, outputs: int, ttft: float, decode: float, cached: int = 0) -> None:
    summary = trail.summary
    summary.completion_tokens, summary.cached_tokens, summary.finish_reason = outputs, cached, "length"
    summary.stations = {"ttft": ttft, "decode": decode}
    trail.over = True
    log.changed(record)
    await log.flush()


async def test_a_slice_that_could_not_be_pushed_is_the_only_one(bench, monkeypatch):
    """The controller would decide by no traffic at all, for as long as the router runs."""
    monkeypatch.setattr(traffic, "EVERY_S", 0.01)
    _, log, meter = bench
    pushed, failed = asyncio.Queue(), []

    async def push(one: TrafficSlice) -> None:
        if not failed:
            failed.append(one)
            raise ValueError("of no foreseen kind")
        pushed.put_nowait(one)

    async with pushing_traffic(meter, SimpleNamespace(push=push), log):
        assert await asyncio.wait_for(pushed.get(), 20) is not failed[0]


async def test_arrivals_count_at_once_and_answers_when_they_end(bench):
    clock, log, meter = bench
    record, trail = opened(log, "a", 100)
    opened(log, "b", 50)
    clock.now = 101.0
    first = meter.cut(log.unplaced())
    traffic = first.classes["short"]
    assert (traffic.arrived, traffic.arrived_tokens, traffic.ended, first.seconds) == (2, 150, 0, 1.0)
    assert (first.waiting, first.waiting_tokens) == (2, 150)
    placed(trail)
    await ended(log, record, trail, 11, 0.5, 1.0, cached=60)
    clock.now = 102.0
    second = meter.cut(log.unplaced())
    traffic = second.classes["short"]
    assert (traffic.arrived, traffic.ended, traffic.prompt_tokens, traffic.cached_tokens) == (0, 1, 100, 60)
    assert (traffic.output_tokens, traffic.pairs, traffic.context_tokens) == (11, 40 * 80, 11 * 105.5)
    assert (second.waiting, second.served[0].input_tokens) == (1, 100)
    assert second.served[0].at == pytest.approx(101.0 - 1.5)
    assert second.served[0].adapter == 0
    await ended(log, *opened(log, "c", adapter_id=(adapter := "sql@0123456789abcdef")), 11, 0.5, 1.0)
    assert meter.cut(()).served[0].adapter == number_of(adapter) > 0


async def test_the_twin_compares_what_was_placed_once_and_answered(bench):
    _, log, meter = bench
    record, trail = opened(log, "a")
    placed(trail)
    await ended(log, record, trail, 11, 0.5, 1.0)
    twin = meter.cut(log.unplaced()).twins[0]
    assert twin.predicted_ttft == pytest.approx(0.45)
    assert (twin.ttft, twin.tpot, twin.predicted_tpot) == (0.5, 0.1, 0.4 / 20)
    record, trail = opened(log, "b")
    placed(trail)
    placed(trail)  # it had to go elsewhere
    await ended(log, record, trail, 11, 0.5, 1.0)
    assert meter.cut(log.unplaced()).twins == []


async def test_good_is_judged_by_the_requests_own_slos(bench):
    _, log, meter = bench
    for name, ttft in (("met", 0.1), ("late", 9.0)):
        record, trail = opened(log, name, slo_ttft_s=1.0, slo_tpot_s=0.2)
        placed(trail)
        await ended(log, record, trail, 11, ttft, 1.0)
    record, trail = opened(log, "unasked")
    placed(trail)
    await ended(log, record, trail, 11, 0.1, 1.0)
    traffic = meter.cut(log.unplaced()).classes["short"]
    assert (traffic.judged, traffic.good, traffic.ended) == (2, 1, 3)


async def test_a_slice_is_bounded_however_much_came(bench):
    _, log, meter = bench
    for i in range(500):
        record, trail = opened(log, str(i))
        placed(trail)
        await ended(log, record, trail, 2, 0.1, 0.1)
    found = meter.cut(log.unplaced())
    assert (found.classes["short"].ended, len(found.twins) <= 64, len(found.served) <= 256) == (500, True, True)


@pytest.mark.parametrize("by", [-3600.0, 3600.0])
def test_a_clock_that_is_set_makes_no_slice_of_an_hour_or_of_less_than_nothing(bench, by: float):
    """Rates are counts by the seconds of slices: a minute's traffic would have come in an instant."""
    clock, _, meter = bench
    clock.now += by
    assert meter.cut(()).seconds == 1.0
    clock.now += 2.0
    assert meter.cut(()).seconds == 2.0


async def test_a_request_that_no_worker_had_says_nothing_of_how_long_answers_are(bench):
    """Under too much load half of them are refused: answers seemed half as long, and decode half as busy."""
    clock, log, meter = bench
    record, trail = opened(log, "a", 100)
    placed(trail)
    await ended(log, record, trail, 10, 0.5, 1.0)
    refused, none = opened(log, "b", 100, slo_ttft_s=1.0)
    none.failed(Overloaded("too many wait"))
    log.changed(refused)
    await log.flush()
    clock.now = 101.0
    traffic = meter.cut(log.unplaced()).classes["short"]
    assert (traffic.arrived, traffic.ended, traffic.prompt_tokens, traffic.output_tokens) == (2, 1, 100, 10)
    assert (traffic.judged, traffic.good) == (1, 0)


async def test_a_request_for_which_nobody_waits_is_work_but_not_in_the_dials_traffic(bench):
    clock, log, meter = bench
    for name, can_wait in (("a", False), ("b", True)):
        record, trail = opened(log, name, 100, can_wait=can_wait)
        placed(trail)
        await ended(log, record, trail, 10, 0.5, 1.0)
    clock.now = 101.0
    found = meter.cut(log.unplaced())
    assert (found.classes["short"].output_tokens, len(found.served)) == (20, 1)
