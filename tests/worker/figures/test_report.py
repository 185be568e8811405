"""Tests that a worker's report counts everything once over changes of its role."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from baton.cluster.metering.telemetry import WorkerMetrics
from baton.kv.tiers.memory import host_slab
from baton.worker.figures.report import Machine, WorkerReport
from tests.worker.figures.test_engine import INFO


def test_what_a_tier_did_in_another_role_is_not_counted_again_in_this_one():
    slab, machine, page = host_slab(1 << 12, 64), Machine.unknown(None), memoryview(bytes(64))
    assert slab is not None
    shown = []
    for role, blocks in (("prefill", 5), ("decode", 2)):
        registry = CollectorRegistry()
        report = WorkerReport(INFO, WorkerMetrics(registry, role, "d0", "m"), machine, lambda: 0.0)
        for number in range(blocks):
            slab.put(f"{role}{number:>25}".encode(), page)
        for _ in range(2):
            report.tiers({"host": slab})
        labels = {"role": role, "worker": "d0", "model": "m", "tier": "host"}
        shown.append(
            (
                registry.get_sample_value("baton_kv_tier_events_total", labels | {"event": "stored"}),
                registry.get_sample_value("baton_kv_tier_blocks", labels),
            )
        )
    assert shown == [(5, 5), (2, 7)]
