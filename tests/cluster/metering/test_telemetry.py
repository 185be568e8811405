import subprocess
import sys

from prometheus_client import CollectorRegistry, generate_latest

from baton.cluster.metering.telemetry import RouterMetrics, WorkerMetrics, current_traceparent, setup_tracing, span

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_names_and_labels_are_what_dashboards_expect() -> None:
    registry = CollectorRegistry()
    router = RouterMetrics(registry)
    router.ttft.labels(model="m", context_class="short").observe(0.1)
    text = generate_latest(registry).decode()
    assert 'baton_time_to_first_token_seconds_bucket{context_class="short",le="0.1",model="m"} 1.0' in text
    assert "baton_inter_token_latency_seconds" in text


def test_a_worker_fills_in_its_own_labels() -> None:
    registry = CollectorRegistry()
    worker = WorkerMetrics(registry, "decode", "decode-0", "m")
    worker.cache_usage.set(0.5)
    worker.prefix_hits.inc(3)
    worker.transfer_bytes.inc(10)
    worker.pages("free").set(4)
    worker.refused("stale_epoch")
    text = generate_latest(registry).decode()
    labels = 'model="m",role="decode",worker="decode-0"'
    assert f"baton_kv_cache_usage_ratio{{{labels}}} 0.5" in text
    assert f"baton_prefix_cache_hits_total{{{labels}}} 3.0" in text
    assert f"baton_kv_transfer_bytes_total{{{labels}}} 10.0" in text
    assert 'baton_kv_cache_pages{model="m",role="decode",state="free",worker="decode-0"} 4.0' in text
    assert 'error="stale_epoch"' in text


def test_without_tracing_a_callers_trace_still_passes_through() -> None:
    setup_tracing("router", "")()
    assert current_traceparent() == ""
    with span("route", PARENT):
        assert current_traceparent() == PARENT


def test_spans_of_two_processes_make_one_trace_at_the_collector() -> None:
    """A real OTLP collector in a process of its own, since a tracer provider is set once per process."""
    code = """
import concurrent.futures, grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as t, trace_service_pb2_grpc as g
from baton.cluster.metering.telemetry import (
    current_traceparent, open_span, rename_service, setup_tracing, span, traceparent_of,
)
seen, services = [], {}
class Sink(g.TraceServiceServicer):
    def Export(self, request, context):
        for r in request.resource_spans:
            spans = [s for scope in r.scope_spans for s in scope.spans]
            seen.extend(spans)
            (service,) = [a.value.string_value for a in r.resource.attributes if a.key == "service.name"]
            services.update({s.name: service for s in spans})
        return t.ExportTraceServiceResponse()
server = grpc.server(concurrent.futures.ThreadPoolExecutor(1))
g.add_TraceServiceServicer_to_server(Sink(), server)
port = server.add_insecure_port("127.0.0.1:0"); server.start()
rename_service("nobody's")
stop = setup_tracing("baton-prefill", f"127.0.0.1:{port}")
with span("route"):
    header = current_traceparent()
detached = open_span("decode", header, {"tokens": 3})
inner = traceparent_of(detached)
detached.end()
rename_service("baton-decode")  # as a worker whose role has changed
with span("transfer", inner):
    pass
stop()
by_name = {s.name: s for s in seen}
assert set(by_name) == {"route", "decode", "transfer"}, by_name
assert by_name["decode"].parent_span_id == by_name["route"].span_id
assert by_name["transfer"].parent_span_id == by_name["decode"].span_id
assert len({s.trace_id for s in seen}) == 1
assert services == {"route": "baton-prefill", "decode": "baton-prefill", "transfer": "baton-decode"}, services
server.stop(0)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)
