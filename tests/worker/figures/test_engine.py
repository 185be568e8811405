"""An engine's Stats as metrics and as a worker's load: what speculation did, by position and beside no drafts."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from baton.cluster.metering.telemetry import WorkerMetrics
from baton.cost.fit import AdaptedStepFit
from baton.protos.channel import Stats
from baton.protos.measurements import ExpertCopies, ExpertLoad, SpeculationTotals
from baton.protos.nouns import KvLayout, WorkerInfo
from baton.worker.figures.engine import EngineFigures

INFO = WorkerInfo(
    worker_id="d0", incarnation="i", role="decode", address="", model_id="m", fingerprint="f",
    layout=KvLayout("bytes", (), 16, "bytes"), max_model_len=64, vocab_size=9, eos_token_ids=(),
    pages=8, max_batch=4, device="cpu",
)  # fmt: skip


def stats(speculation: SpeculationTotals | None = None, experts: ExpertLoad | None = None) -> Stats:
    return Stats(
        step=4, running=1, waiting=0, waiting_tokens=0, free_pages=1, cached_pages=0, leased_pages=0, preemptions=0,
        leases_swept=0, tokens_prefilled=1, tokens_decoded=7, prefix_hit_tokens=0, prefix_asked_tokens=0,
        step_seconds_p50=0.0, speculation=speculation, expert_load=experts,
    )  # fmt: skip


def test_what_drafts_bring_is_counted_once_by_position_and_arm():
    registry = CollectorRegistry()
    figures = EngineFigures(WorkerMetrics(registry, "decode", "d0", "m"), INFO, None, AdaptedStepFit(), lambda: 0.0)
    first = SpeculationTotals(10, (6, 3, 0), (3, 1, 0), (14, 2), (1.0, 0.25), 100)
    then = SpeculationTotals(30, (9, 4, 1), (5, 2, 0), (40, 5), (3.0, 0.75), 140)
    figures.observe(stats(first))
    figures.observe(stats(then))
    shown = generate_latest(registry).decode()

    def value(name: str, label: str = "") -> float:
        [line] = [x for x in shown.splitlines() if x.startswith(f"baton_{name}_total{{") and label in x]
        return float(line.rpartition(" ")[2])

    assert value("sequence_steps") == 30
    assert value("draft_read_ahead_tokens") == 140
    assert (value("draft_judged_tokens", 'position="0"'), value("draft_stood_tokens", 'position="0"')) == (9, 5)
    assert (value("draft_judged_tokens", 'position="2"'), value("draft_stood_tokens", 'position="2"')) == (1, 0)
    assert (value("speculation_tokens", 'arm="drafts"'), value("speculation_seconds", 'arm="drafts"')) == (40, 3.0)
    assert value("speculation_tokens", 'arm="control"') == 5
    assert value("speculation_seconds", 'arm="control"') == 0.75
    load = figures.load()
    assert load is not None
    assert load.speculation == then
    assert then.gain == 40 / 3.0 / (5 / 0.75)


def test_a_worker_without_speculation_shows_none_of_it():
    registry = CollectorRegistry()
    figures = EngineFigures(WorkerMetrics(registry, "decode", "d0", "m"), INFO, None, AdaptedStepFit(), lambda: 0.0)
    figures.observe(stats(None))
    shown = generate_latest(registry).decode()
    assert "baton_sequence_steps_total{" not in shown
    assert "baton_speculation_tokens_total{" not in shown


def test_rows_of_experts_are_counted_by_rank_and_show_how_uneven_they_are():
    registry = CollectorRegistry()
    figures = EngineFigures(WorkerMetrics(registry, "decode", "d0", "m"), INFO, None, AdaptedStepFit(), lambda: 0.0)
    figures.observe(stats())
    assert "baton_expert_imbalance_ratio{" not in generate_latest(registry).decode()
    for load in (ExpertLoad((6, 2), 5, 4), ExpertLoad((30, 10), 25, 4)):
        figures.observe(stats(experts=load))
    labels = {"role": "decode", "worker": "d0", "model": "m"}
    for rank, rows in (("0", 30), ("1", 10)):
        assert registry.get_sample_value("baton_expert_rows_total", labels | {"rank": rank}) == rows
    assert registry.get_sample_value("baton_expert_imbalance_ratio", labels) == 2.5
    assert registry.get_sample_value("baton_expert_copies", labels) is None  # no rank has room for any
    for copies in (ExpertCopies(1, 1), ExpertCopies(2, 3, 1.5, 1.1), ExpertCopies(2, 5, 1.5, 1.1)):
        figures.observe(stats(experts=ExpertLoad((30, 10), 25, 4, copies)))
    found = {name: registry.get_sample_value(f"baton_expert_{name}", labels) for name in ("copies", "moves_total")}
    assert found == {"copies": 2, "moves_total": 5}
    for placement, imbalance in (("home", 1.5), ("placed", 1.1)):
        where = labels | {"placement": placement}
        assert registry.get_sample_value("baton_expert_rank_imbalance_ratio", where) == imbalance
