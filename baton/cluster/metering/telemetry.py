"""The metrics (Prometheus) and spans (OpenTelemetry) of every process.

Knows nothing of who observes what. What there is to measure is defined in ``metrics``, once for all. Spans cost
almost nothing until ``setup_tracing`` got an endpoint.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from baton.cluster.metering import instruments, metrics

OPTIONAL = frozenset(
    {"certificate", "mfu", "mbu", "flops", "bytes_read", "peak_flops", "peak_bytes", "sequence_steps"}
)
Attributes = Mapping[str, str | int | float | bool]


class RouterMetrics:
    """Holds what a router counts, in its own ``registry``; each attribute is the instrument of ``metrics.ROUTER``.

    ``enabled`` False keeps nothing, and shows how many workers can be reached, alone.
    """

    requests: Counter
    running: Gauge
    queued: Gauge
    prompt_tokens: Counter
    output_tokens: Counter
    prediction_tokens: Counter
    cached_tokens: Counter
    best_cached_tokens: Counter
    ttft: instruments.ManyHistogram
    itl: instruments.ManyHistogram
    tpot: instruments.ManyHistogram
    longest_gap: instruments.ManyHistogram
    duration: instruments.ManyHistogram
    station: instruments.ManyHistogram
    prompt_length: instruments.ManyHistogram
    output_length: instruments.ManyHistogram
    slo: Counter
    decisions: Counter
    adapter_requests: Counter
    adapter_tokens: Counter
    adapter_loads: Counter
    adapter_load_seconds: instruments.ManyHistogram
    adapters_served: Gauge
    retries: Counter
    refused: Counter
    loop_stalls: Counter
    workers: Gauge
    certificate: Gauge
    price: Gauge
    control_decisions: Counter
    control_age: Gauge
    control_pressure: Gauge
    control_error: Gauge

    def __init__(self, registry: CollectorRegistry, vllm_names: bool = False, enabled: bool = True) -> None:
        self.registry, self.enabled = registry, enabled
        self.asked = instruments.ScrapeListener()
        self.asked.before(self._tell)
        registry.register(self.asked)
        self._sums: defaultdict[str, dict[tuple[str, ...], instruments.PendingTotal]] = defaultdict(dict)
        some = metrics.ROUTER if enabled else {"workers": metrics.ROUTER["workers"]}
        made = instruments.make_nothing(metrics.ROUTER) | instruments.make(some, registry)
        vars(self).update(made)
        if vllm_names and enabled:
            registry.register(instruments.VllmNames(metrics.ROUTER, made))

    def sum(self, key: str, *labels: str) -> instruments.PendingTotal:
        """Returns a sum in front of a counter or gauge, for what every request counts or passes."""
        sums = self._sums[key]
        found = sums.get(labels)
        if found is None:
            found = sums[labels] = instruments.PendingTotal(getattr(self, key).labels(*labels))
        return found

    def _tell(self) -> None:
        for sums in self._sums.values():
            for one in sums.values():
                one.tell()


class WorkerMetrics:
    """Holds what a worker counts, in its own ``registry``; labels role, worker and model are filled in here."""

    cache_usage: Gauge
    running: Gauge
    batch_fill: Gauge
    waiting: Gauge
    waiting_tokens: Gauge
    step_seconds: Gauge
    steps: Counter
    busy_seconds: Counter
    prefill_tokens: Counter
    decode_tokens: Counter
    prefix_hits: Counter
    prefix_queries: Counter
    preemptions: Counter
    leases_swept: Counter
    drafts: Counter
    draft_tokens: Counter
    draft_tokens_accepted: Counter
    draft_seconds: Counter
    transfer_bytes: Counter
    transfer_blocks: Counter
    fetched_bytes: Counter
    fetched_blocks: Counter
    transfer_seconds: Histogram

    def __init__(
        self,
        registry: CollectorRegistry,
        role: str,
        worker: str,
        model: str,
        vllm_names: bool = False,
        enabled: bool = True,
    ) -> None:
        self.registry, self.enabled = registry, enabled
        self._labels = {"role": role, "worker": worker, "model": model}
        self._link_labels: list[dict[str, str]] = []
        self._ready: dict[tuple[str, ...], Any] = {}
        self._made = (
            instruments.make(metrics.WORKER, registry) if enabled else instruments.make_nothing(metrics.WORKER)
        )
        for key, metric in metrics.WORKER.items():
            if set(metric.labels) == set(self._labels) and key not in OPTIONAL:
                setattr(self, key, self._made[key].labels(**self._labels))
        if vllm_names and enabled:
            registry.register(instruments.VllmNames(metrics.WORKER, self._made))

    def optional(self, key: str) -> Any:
        """Returns one of OPTIONAL, which is shown from its first use on: not every worker can tell."""
        return self._with(key)

    def pages(self, state: str) -> Gauge:
        """Pages in a state."""
        return self._with("pages", state=state)

    def judged(self, position: int, judged: int, stood: int) -> None:
        """Counts drafted tokens at ``position`` of their draft, from 0, that were judged, and those that stood."""
        if judged:
            self._with("draft_judged", position=str(position)).inc(judged)
            self._with("draft_stood", position=str(position)).inc(stood)

    def compared(self, arm: str, tokens: int, seconds: float) -> None:
        """Counts tokens and seconds of steps that may draft, or of those that may not."""
        self._with("speculation_tokens", arm=arm).inc(max(0, tokens))
        self._with("speculation_seconds", arm=arm).inc(max(0.0, seconds))

    def tier_blocks(self, tier: str) -> Gauge:
        """Blocks in a lower tier."""
        return self._with("tier_blocks", tier=tier)

    def tier_events(self, tier: str, event: str) -> Counter:
        """Blocks of a lower tier that were stored, loaded, evicted or found damaged, and failures of its store."""
        return self._with("tier_events", tier=tier, event=event)

    def transferred(self, peer: str, outcome: str, shipped_bytes: int = 0) -> None:
        """Counts one handoff to a decode worker; ``outcome`` is "ok" or an error label."""
        self._with("transfers", peer=peer, outcome=outcome).inc()
        self._with("pair_bytes", peer=peer).inc(shipped_bytes)

    def energy(self, host: str, source: str) -> Counter:
        """Joules of the machine."""
        return self._with("energy", host=host, source=source)

    def refused(self, error_label: str) -> None:
        """Counts one refused handoff frame."""
        self._with("refusals", error=error_label).inc()

    def linked(self, peer: str, transport: str, bytes_per_s: float, reason: str) -> None:
        """Notes that KV to ``peer`` goes by ``transport`` from now on; ``reason`` says why not by the best, or is
        empty.
        """
        for old in [labels for labels in self._link_labels if labels["peer"] == peer]:
            self._with("links", **old).set(0)
            self._link_labels.remove(old)
        labels = {"peer": peer, "transport": transport}
        self._link_labels.append(labels)
        self._with("links", **labels).set(1)
        self._with("link_speed", **labels).set(bytes_per_s)
        if reason:
            self._with("fallbacks", transport=transport, reason=reason).inc()

    def _with(self, key: str, **labels: str) -> Any:
        found = self._ready.get((key, *labels.values()))
        if found is None:
            found = self._ready[key, *labels.values()] = self._made[key].labels(**self._labels, **labels)
        return found


def setup_tracing(service: str, endpoint: str, instance: str = "") -> Callable[[], None]:
    """Sends this process's spans to ``endpoint`` (host:port, OTLP gRPC; https://host:port: with TLS); call the
    result at the end to flush.

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
    secured = endpoint.startswith("https://")  # its CA: OTEL_EXPORTER_OTLP_CERTIFICATE, else the system's
    target = endpoint.removeprefix("http://").removeprefix("https://")
    exporter = OTLPSpanExporter(endpoint=target, insecure=not secured, timeout=2)
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=500))
    trace.set_tracer_provider(provider)
    return provider.shutdown


class _NoSpan:
    """A block in which the current span stays the caller's, if there is one: nobody exports ours."""

    def __enter__(self) -> Span:
        return trace.get_current_span()

    def __exit__(self, *_: object) -> None:
        pass


_NO_SPAN = _NoSpan()


def span(
    name: str, traceparent: str = "", attributes: Attributes | None = None, kind: SpanKind = SpanKind.INTERNAL
) -> AbstractContextManager[Span]:
    """Opens a span around a block, a child of ``traceparent`` or else of the current span. An error marks it."""
    if not traceparent and isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return _NO_SPAN
    return trace.get_tracer("baton").start_as_current_span(
        name, context=_context(traceparent), attributes=attributes, kind=kind
    )


def open_span(name: str, traceparent: str = "", attributes: Attributes | None = None) -> Span:
    """Opens a span that doesn't follow a block: end it with ``.end()``. It doesn't become the current one."""
    return trace.get_tracer("baton").start_span(name, context=_context(traceparent), attributes=attributes)


def traceparent_of(current: Span) -> str:
    """Returns the W3C header that makes others children of ``current``; empty when there is no trace."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier, context=trace.set_span_in_context(current))
    return carrier.get("traceparent", "")


def trace_id_of(current: Span) -> str:
    """Returns the id, in hex, of a trace that is kept; else empty: an exemplar must lead somewhere."""
    context = current.get_span_context()
    return f"{context.trace_id:032x}" if context.is_valid and context.trace_flags.sampled else ""


def exemplar(trace_id: str) -> dict[str, str] | None:
    """Returns what a histogram's ``observe`` takes besides the value."""
    return {"trace_id": trace_id} if trace_id else None


def current_traceparent() -> str:
    """Returns the W3C header of the span around us; empty when tracing is off and no caller sent one."""
    current = trace.get_current_span()
    return traceparent_of(current) if current.get_span_context().is_valid else ""


def _context(traceparent: str) -> Context | None:
    return propagate.extract({"traceparent": traceparent}) if traceparent else None
