"""Metric definitions (Prometheus) and spans (OpenTelemetry), named once for every process.

Knows nothing of who observes what. Label values are bounded: roles, worker ids, model names, context classes
and the error labels of the error tree. Spans cost almost nothing until ``setup_tracing`` got an endpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
TOKENS = (1, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)
Attributes = Mapping[str, str | int | float | bool]


class RouterMetrics:
    """What a router counts, in its own ``registry``."""

    def __init__(self, registry: CollectorRegistry) -> None:
        by_class = ["model", "context_class"]
        self.registry = registry
        self.requests = Counter(
            "baton_requests", "Requests that ended; outcome is a finish_reason or an error label",
            [*by_class, "outcome"], registry=registry,
        )  # fmt: skip
        self.running = Gauge("baton_requests_running", "Requests past the queue", by_class, registry=registry)
        self.queued = Gauge("baton_requests_queued", "Requests in the router's queue", by_class, registry=registry)
        self.prompt_tokens = Counter("baton_prompt_tokens", "Prompt tokens taken in", by_class, registry=registry)
        self.output_tokens = Counter("baton_output_tokens", "Tokens sent to clients", by_class, registry=registry)
        self.cached_tokens = Counter(
            "baton_prompt_tokens_cached", "Prompt tokens found in a cache", by_class, registry=registry
        )
        self.ttft = self._seconds("time_to_first_token", "From arrival to the first token", by_class)
        self.itl = self._seconds("inter_token_latency", "Between tokens of one choice", by_class)
        self.tpot = self._seconds("time_per_output_token", "Mean between tokens, per request", by_class)
        self.duration = self._seconds("request_duration", "From arrival to the last token", by_class)
        self.station = self._seconds("station", "Time at one station of a request's way", [*by_class, "station"])
        self.prompt_length = Histogram(
            "baton_prompt_length_tokens", "Prompt length", by_class, buckets=TOKENS, registry=registry
        )
        self.decisions = Counter(
            "baton_routing_decisions", "Requests by way taken (local, prefill) and worker",
            ["way", "worker"], registry=registry,
        )  # fmt: skip
        self.retries = Counter("baton_request_retries", "Second tries, by cause", ["cause"], registry=registry)
        self.refused = Counter(
            "baton_requests_refused", "Calls without a good key or over its rate", ["cause"], registry=registry
        )
        self.workers = Gauge("baton_workers", "Workers the router can reach", ["role"], registry=registry)

    def _seconds(self, name: str, text: str, labels: list[str]) -> Histogram:
        return Histogram(f"baton_{name}_seconds", text, labels, buckets=SECONDS, registry=self.registry)


class WorkerMetrics:
    """What a worker counts, in its own ``registry``; labels role, worker and model are filled in here."""

    def __init__(self, registry: CollectorRegistry, role: str, worker: str, model: str) -> None:
        self.registry = registry
        self._labels = {"role": role, "worker": worker, "model": model}
        self._link_labels: list[dict[str, str]] = []
        self.cache_usage = self._gauge("kv_cache_usage_ratio", "Leased and quarantined pages over all pages")
        self.pages = self._gauge_by("kv_cache_pages", "Pages by state", "state")
        self.running = self._gauge("sequences_running", "Sequences in the batch")
        self.waiting = self._gauge("sequences_waiting", "Sequences that wait")
        self.waiting_tokens = self._gauge("sequences_waiting_tokens", "Prompt tokens that wait")
        self.step_seconds = self._gauge("engine_step_seconds", "Median engine step, last 512")
        self.steps = self._counter("engine_steps", "Engine steps")
        self.prefill_tokens = self._counter("prefill_tokens", "Prompt tokens computed")
        self.decode_tokens = self._counter("decode_tokens", "Tokens decoded")
        self.prefix_hits = self._counter("prefix_cache_hits", "Prompt tokens found in this cache")
        self.prefix_queries = self._counter("prefix_cache_queries", "Prompt tokens looked for in this cache")
        self.preemptions = self._counter("preemptions", "Sequences put back to make room")
        self.leases_swept = self._counter("leases_swept", "Leases the TTL sweeper had to end")
        self.transfer_bytes = self._counter("kv_transfer_bytes", "KV bytes shipped")
        self.transfer_blocks = self._counter("kv_transfer_blocks", "KV blocks shipped")
        self.fetched_bytes = self._counter("kv_fetched_bytes", "KV bytes fetched from other workers' caches")
        self.fetched_blocks = self._counter("kv_fetched_blocks", "KV blocks fetched from other workers' caches")
        self.transfer_seconds = Histogram(
            "baton_kv_transfer_seconds", "Exposed transfer: after the last chunk, until the last acknowledgement",
            list(self._labels), buckets=SECONDS, registry=registry,
        ).labels(**self._labels)  # fmt: skip
        self._links = Gauge(
            "baton_kv_transport_info", "How KV gets to each decode worker; 1 for the way in use",
            [*self._labels, "peer", "transport"], registry=registry,
        )  # fmt: skip
        self._link_speed = Gauge(
            "baton_kv_transport_bandwidth_bytes_per_second", "What the last preflight measured",
            [*self._labels, "peer", "transport"], registry=registry,
        )  # fmt: skip
        self._fallbacks = Counter(
            "baton_kv_transport_fallbacks", "Preflights that chose another than the best transport; why",
            [*self._labels, "transport", "reason"], registry=registry,
        )  # fmt: skip
        self.tier_blocks = self._gauge_by("kv_tier_blocks", "KV blocks in a lower tier", "tier")
        self._tier_events = Counter(
            "baton_kv_tier_events", "Blocks stored, loaded, evicted or found damaged, by lower tier",
            [*self._labels, "tier", "event"], registry=registry,
        )  # fmt: skip
        self._refusals = Counter(
            "baton_handoff_refusals", "Handoff frames refused, by error label", [*self._labels, "error"],
            registry=registry,
        )  # fmt: skip

    def tier_events(self, tier: str, event: str) -> Counter:
        """Blocks of a lower tier that were stored, loaded, evicted or found damaged."""
        return self._tier_events.labels(**self._labels, tier=tier, event=event)

    def refused(self, error_label: str) -> None:
        """Count one refused handoff frame."""
        self._refusals.labels(**self._labels, error=error_label).inc()

    def linked(self, peer: str, transport: str, bytes_per_s: float, reason: str) -> None:
        """KV to ``peer`` goes by ``transport`` from now on; ``reason`` says why not by the best, or is empty."""
        for old in [labels for labels in self._link_labels if labels["peer"] == peer]:
            self._links.labels(**old).set(0)
            self._link_labels.remove(old)
        labels = {**self._labels, "peer": peer, "transport": transport}
        self._link_labels.append(labels)
        self._links.labels(**labels).set(1)
        self._link_speed.labels(**labels).set(bytes_per_s)
        if reason:
            self._fallbacks.labels(**self._labels, transport=transport, reason=reason).inc()

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"baton_{name}", text, list(self._labels), registry=self.registry).labels(**self._labels)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"baton_{name}", text, list(self._labels), registry=self.registry).labels(**self._labels)

    def _gauge_by(self, name: str, text: str, label: str) -> Callable[[str], Gauge]:
        gauge = Gauge(f"baton_{name}", text, [*self._labels, label], registry=self.registry)
        return lambda value: gauge.labels(**self._labels, **{label: value})


def setup_tracing(service: str, endpoint: str, instance: str = "") -> Callable[[], None]:
    """Send this process's spans to ``endpoint`` (host:port, OTLP gRPC); call the result at the end to flush.

    With an empty endpoint nothing is set up and the result does nothing.
    """
    if not endpoint:
        return lambda: None
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create({"service.name": service, "service.instance.id": instance})
    provider = TracerProvider(resource=resource)
    exporter = OTLPSpanExporter(endpoint=endpoint.removeprefix("http://"), insecure=True, timeout=2)
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=500))
    trace.set_tracer_provider(provider)
    return provider.shutdown


@contextmanager
def span(
    name: str, traceparent: str = "", attributes: Attributes | None = None, kind: SpanKind = SpanKind.INTERNAL
) -> Iterator[Span]:
    """A span around a block, child of ``traceparent`` or else of the current span. An error marks it."""
    with trace.get_tracer("baton").start_as_current_span(
        name, context=_context(traceparent), attributes=attributes, kind=kind
    ) as current:
        yield current


def open_span(name: str, traceparent: str = "", attributes: Attributes | None = None) -> Span:
    """A span that doesn't follow a block: end it with ``.end()``. It doesn't become the current one."""
    return trace.get_tracer("baton").start_span(name, context=_context(traceparent), attributes=attributes)


def traceparent_of(current: Span) -> str:
    """The W3C header that makes others children of ``current``; empty when there is no trace."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier, context=trace.set_span_in_context(current))
    return carrier.get("traceparent", "")


def current_traceparent() -> str:
    """The W3C header of the span around us; empty when tracing is off and no caller sent one."""
    return traceparent_of(trace.get_current_span())


def _context(traceparent: str) -> Context | None:
    return propagate.extract({"traceparent": traceparent}) if traceparent else None
