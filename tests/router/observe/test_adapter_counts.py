"""Metrics of adapters, with a label that can't grow without end."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from baton.cluster.metering.telemetry import RouterMetrics
from baton.protos.nouns import Sampling
from baton.router.observe.adapter_counts import MOST_NAMES, AdapterCounts
from baton.router.request.context import RequestContext
from baton.router.request.request import ChoiceSummary, RouterRequest


def request(adapter: str) -> RouterRequest:
    return RouterRequest("r", "m", (1,), Sampling(), context=RequestContext(adapter_id=adapter))


def test_choices_on_adapters_are_counted_by_name_up_to_a_bound():
    registry = CollectorRegistry()
    counts = AdapterCounts(RouterMetrics(registry), lambda: range(3))
    counts.ended(request(""), ChoiceSummary(1, 5, finish_reason="stop"))
    for at in range(MOST_NAMES + 10):
        counts.ended(request(f"a{at}@{'1' * 16}"), ChoiceSummary(1, 2, finish_reason="stop"))
    counts.ended(request(f"a0@{'2' * 16}"), ChoiceSummary(1, 2))
    counts.ended(request(f"a0@{'2' * 16}"), ChoiceSummary(1, 2, finish_reason="stop", choice=1))
    shown = generate_latest(registry).decode()
    assert 'baton_adapter_requests_total{adapter="a0",model="m",outcome="stop"} 1.0' in shown
    assert 'baton_adapter_requests_total{adapter="a0",model="m",outcome="unfinished"} 1.0' in shown
    assert 'baton_adapter_requests_total{adapter="other",model="m",outcome="stop"} 10.0' in shown
    assert 'baton_adapter_tokens_total{adapter="a0",model="m"} 6.0' in shown
    assert shown.count("baton_adapter_requests_total{") == MOST_NAMES + 2
    assert "baton_adapters_served 3.0" in shown
