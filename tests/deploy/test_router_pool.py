"""Several router processes as one: metrics added up, ports that are really ours."""

import socket

import pytest
from prometheus_client import CollectorRegistry

from baton.cluster.config import BatonConfig, RouterConfig, load_config
from baton.cluster.telemetry import RouterMetrics
from baton.deploy.router_metrics import SharedMetrics, merged
from baton.deploy.router_pool import require_free
from baton.protos.errors import ConfigError


def metrics(requests: int, workers: int) -> CollectorRegistry:
    registry = CollectorRegistry()
    counted = RouterMetrics(registry)
    counted.requests.labels("m", "short", "stop").inc(requests)
    counted.ttft.labels("m", "short").observe(0.2)
    counted.workers.labels("decode").set(workers)
    if requests > 1:
        counted.retries.labels("worker_lost").inc()
    return registry


async def test_whichever_process_is_asked_answers_for_all(tmp_path):
    first, second = (SharedMetrics(metrics(n, 3), tmp_path, i, 3) for i, n in enumerate((1, 4)))
    async with first.serving(), second.serving():  # the third isn't up: it is left out
        for one in (first, second):
            shown = (await one.exposition()).decode().splitlines()
            assert 'baton_requests_total{context_class="short",model="m",outcome="stop"} 5.0' in shown
            assert 'baton_time_to_first_token_seconds_count{context_class="short",model="m"} 2.0' in shown
            assert 'baton_workers{role="decode"} 3.0' in shown
            assert 'baton_request_retries_total{cause="worker_lost"} 1.0' in shown
            assert len([line for line in shown if line.startswith("# TYPE baton_requests_total ")]) == 1
    assert list(tmp_path.iterdir()) == []


def test_the_first_creation_counts():
    a, b = "# HELP x_created c\nx_created 5.0\n", "# HELP x_created c\nx_created 3.0\n"
    assert merged([a, b]) == "# HELP x_created c\nx_created 3.0\n"


def test_a_port_of_somebody_else_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port}"):
            require_free(RouterConfig(port=port, grpc_port=port + 1))


def test_shared_ports_must_be_named(tmp_path):
    assert BatonConfig().router.processes == 1
    with pytest.raises(ConfigError, match="processes"):
        load_config(flags={"router": {"processes": 2, "port": 0}}, search=tmp_path)
