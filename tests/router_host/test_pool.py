"""Several router processes as one: metrics of all in one answer, ports that are really ours."""

import io
import socket

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.parser import text_fd_to_metric_families

from baton.cluster.config import BatonConfig, RouterConfig, load_config
from baton.cluster.metering.telemetry import RouterMetrics
from baton.protos.errors import ConfigError
from baton.router.observe.live import LiveState
from baton.router_host.metrics import SharedMetrics, merged
from baton.router_host.pool import require_free


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.router_host.metrics.WAIT_S", 60.0)


def metrics(requests: int, workers: int) -> CollectorRegistry:
    registry = CollectorRegistry()
    counted = RouterMetrics(registry)
    counted.requests.labels("m", "short", "stop").inc(requests)
    counted.ttft.labels("m", "short").observe(0.2)
    counted.workers.labels("decode").set(workers)
    counted.running.labels("m", "short").set(requests)
    if requests > 1:
        counted.retries.labels("worker_lost").inc()
    return registry


async def test_whichever_process_is_asked_answers_for_all(tmp_path):
    first, second = (SharedMetrics(metrics(n, 3), tmp_path, i, 3) for i, n in enumerate((1, 4)))
    async with first.serving(), second.serving():  # the third isn't up: it is left out
        for one in (first, second):
            shown = (await one.exposition())[0].decode().splitlines()
            for process, requests in ((0, 1), (1, 4)):
                labels = f'process="{process}",context_class="short",model="m"'
                assert f'baton_requests_total{{{labels},outcome="stop"}} {requests}.0' in shown
                assert f"baton_time_to_first_token_seconds_count{{{labels}}} 1.0" in shown
                assert f'baton_router_loop_stalls_total{{process="{process}"}} 0.0' in shown
            assert 'baton_workers{role="decode"} 3.0' in shown
            assert 'baton_requests_running{context_class="short",model="m"} 5.0' in shown
            assert 'baton_request_retries_total{process="1",cause="worker_lost"} 1.0' in shown
            assert len([line for line in shown if line.startswith("# TYPE baton_requests_total ")]) == 1
    assert list(tmp_path.iterdir()) == []


async def test_the_processes_live_states_are_asked_for_too(tmp_path):
    states = [LiveState(10.0, {}, [], {"short": n}) for n in (1, 4)]
    first, second = (SharedMetrics(metrics(1, 1), tmp_path, i, 3, lambda s=s: s) for i, s in enumerate(states))
    async with first.serving(), second.serving():
        assert [s.waiting for s in await first.others()] == [{"short": 4}]
        assert [s.waiting for s in await second.others()] == [{"short": 1}]


async def test_openmetrics_of_several_processes_keep_their_exemplars(tmp_path):
    registry = metrics(1, 3)
    one, two = (SharedMetrics(r, tmp_path, i, 2) for i, r in enumerate((registry, traced("ab" * 16))))
    async with one.serving(), two.serving():
        shown, media_type = await one.exposition("application/openmetrics-text; version=1.0.0")
    text = shown.decode()
    assert media_type.startswith("application/openmetrics-text")
    assert text.endswith("# EOF\n")
    assert text.count("# EOF") == 1
    assert 'baton_time_to_first_token_seconds_count{process="1",context_class="short",model="m"} 1.0' in text
    assert f'# {{trace_id="{"ab" * 16}"}} 0.2' in text
    assert list(text_string_to_metric_families(text))


def traced(trace_id: str) -> CollectorRegistry:
    registry = CollectorRegistry()
    RouterMetrics(registry).ttft.labels("m", "short").observe(0.2, {"trace_id": trace_id})
    return registry


async def test_no_counter_falls_when_a_process_is_late_or_begins_anew(tmp_path, monkeypatch):
    monkeypatch.setattr("baton.router_host.metrics.WAIT_S", 0.5)
    first, second, anew = (SharedMetrics(metrics(n, 3), tmp_path, i, 2) for i, n in ((0, 10), (1, 40), (1, 2)))
    looks = []
    async with first.serving():
        async with second.serving():
            looks.append(counts_in(await first.exposition()))
        looks.append(counts_in(await first.exposition()))
        async with anew.serving():
            looks.append(counts_in(await first.exposition()))
    assert looks == [{"0": 10.0, "1": 40.0}, {"0": 10.0}, {"0": 10.0, "1": 2.0}]


def counts_in(shown: tuple[bytes, str]) -> dict[str, float]:
    """The requests of each process in an exposition."""
    families = text_fd_to_metric_families(io.StringIO(shown[0].decode()))
    return {s.labels["process"]: s.value for f in families for s in f.samples if s.name == "baton_requests_total"}


def test_when_counters_began_is_that_of_each_process():
    a, b = (f"# TYPE x_created gauge\nx_created {at}\n" for at in (5.0, 3.0))
    assert (
        merged({0: a, 1: b}) == '# TYPE x_created gauge\nx_created{process="0"} 5.0\nx_created{process="1"} 3.0\n'
    )


def test_a_port_of_somebody_else_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port}"):
            require_free(RouterConfig(port=port, grpc_port=port + 1))


def test_shared_ports_must_be_named(tmp_path):
    assert BatonConfig().router.processes == 1
    with pytest.raises(ConfigError, match="processes"):
        load_config(flags={"router": {"processes": 2, "port": 0}}, search=tmp_path)
