"""One set of definitions: what instruments are made of, what vLLM's dashboards find, what an exemplar leads to."""

from bisect import bisect_left

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics

from baton.cluster.metering import metrics
from baton.cluster.metering.metrics import SECONDS
from baton.cluster.metering.telemetry import OPTIONAL, RouterMetrics, WorkerMetrics, exemplar


def test_names_are_unique_and_units_are_in_them():
    names = [m.full_name for m in metrics.ALL]
    assert len(names) == len(set(names))
    for metric in metrics.ALL:
        assert metric.help
        assert not metric.name.endswith("_total")
        if metric.unit in ("seconds", "ratio", "joules"):
            assert metric.unit in metric.name


def test_labels_are_bounded_ones():
    allowed = {
        "model", "context_class", "outcome", "station", "slo", "verdict", "way", "worker", "cause", "role", "state",
        "peer", "transport", "reason", "tier", "event", "error", "host", "source", "kind", "mode", "figure",
        "adapter", "position", "arm", "rank", "placement", "task",
    }  # fmt: skip
    assert {label for metric in metrics.ALL for label in metric.labels} <= allowed


def test_every_definition_has_its_instrument():
    router, worker = RouterMetrics(CollectorRegistry()), WorkerMetrics(CollectorRegistry(), "decode", "d0", "m")
    for key in RouterMetrics.__annotations__:
        assert getattr(router, key) is not None
        assert key in metrics.ROUTER
    assert set(metrics.ROUTER) == set(RouterMetrics.__annotations__)
    for key in WorkerMetrics.__annotations__:
        assert getattr(worker, key) is not None
    assert set(metrics.WORKER) >= OPTIONAL


def test_what_a_worker_cannot_tell_is_absent():
    registry = CollectorRegistry()
    worker = WorkerMetrics(registry, "decode", "d0", "m")
    for name in ("baton_mfu_ratio{", "baton_host_energy_joules_total{"):
        assert name not in generate_latest(registry).decode()
    worker.optional("mfu").set(0.4)
    worker.transferred("decode-1", "ok", 512)
    worker.transferred("decode-1", "worker_lost")
    text = generate_latest(registry).decode()
    assert 'baton_mfu_ratio{model="m",role="decode",worker="d0"} 0.4' in text
    assert 'outcome="worker_lost",peer="decode-1"' in text
    assert 'baton_kv_pair_bytes_total{model="m",peer="decode-1",role="decode",worker="d0"} 512.0' in text


def test_vllms_dashboards_find_their_names_where_asked_for():
    registry = CollectorRegistry()
    RouterMetrics(registry, vllm_names=True).ttft.labels("m", "short").observe(0.2)
    text = generate_latest(registry).decode()
    assert 'vllm:time_to_first_token_seconds_count{context_class="short",model_name="m"} 1.0' in text
    assert "vllm:request_success_total" in text or "# TYPE vllm:request_success" in text
    plain = CollectorRegistry()
    RouterMetrics(plain)
    assert "vllm" not in generate_latest(plain).decode()


def test_stations_that_are_histograms_of_their_own_in_vllm_are_shown_as_such():
    registry = CollectorRegistry()
    router = RouterMetrics(registry, vllm_names=True)
    for station, seconds in (("queue", 0.02), ("prefill", 0.3), ("transfer", 0.1)):
        router.station.labels("m", "short", station).observe(seconds)
    router.output_length.labels("m", "short").observe(40)
    lines = [line for line in generate_latest(registry).decode().splitlines() if line.startswith("vllm:")]
    sums = {line.split("{")[0]: float(line.split()[-1]) for line in lines if "_sum{" in line}
    assert sums["vllm:request_queue_time_seconds_sum"] == 0.02
    assert sums["vllm:request_prefill_time_seconds_sum"] == 0.3
    assert sums["vllm:request_generation_tokens_sum"] == 40
    assert not any("station" in line or "transfer" in line for line in lines)


def test_an_exemplar_carries_the_trace_and_only_openmetrics_shows_it():
    registry = CollectorRegistry()
    router = RouterMetrics(registry)
    router.ttft.labels("m", "short").observe(0.2, exemplar("ab" * 16))
    router.tpot.labels("m", "short").observe(0.2, exemplar(""))
    assert f'# {{trace_id="{"ab" * 16}"}} 0.2' in openmetrics(registry).decode()
    assert "trace_id" not in generate_latest(registry).decode()


def test_values_that_were_counted_elsewhere_count_as_if_observed():
    one, many = (RouterMetrics(CollectorRegistry()).itl.labels("m", "a") for _ in range(2))
    for value, count in ((0.003, 4), (0.25, 1), (500.0, 2)):
        for _ in range(count):
            one.observe(value)
        many.observe_many({bisect_left(SECONDS, value): count}, value * count)
    assert one._sum.get() == many._sum.get()
    assert [b.get() for b in one._buckets] == [b.get() for b in many._buckets]


def test_telemetry_that_is_off_keeps_nothing():
    registry = CollectorRegistry()
    router = RouterMetrics(registry, enabled=False)
    router.ttft.labels("m", "short").observe(0.2)
    router.itl.labels("m", "short").observe_many({6: 3}, 0.3)
    with router.running.labels("m", "short").track_inprogress():
        pass
    worker = WorkerMetrics(registry, "decode", "d0", "m", enabled=False)
    worker.steps.inc()
    worker.transferred("decode-1", "ok", 512)
    worker.linked("decode-1", "shm", 1e9, "")
    assert {line.split()[2] for line in generate_latest(registry).decode().splitlines()} == {"baton_workers"}
