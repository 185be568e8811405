"""The metrics (Prometheus) and spans (OpenTelemetry) of every process.

Knows nothing of who observes what. The metrics are defined in ``metrics``. Spans cost almost nothing until
``setup_tracing`` got an endpoint.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, cast

from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from baton.cluster.metering import instruments, metrics

if TYPE_CHECKING:  # a process that exports no spans doesn't load the SDK
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider

OPTIONAL = frozenset(
    {
        "certificate",
        "adapter_row_seconds",
        "adapter_seconds",
        "mfu",
        "mbu",
        "flops",
        "bytes_read",
        "peak_flops",
        "peak_bytes",
        "sequence_steps",
        "draft_read_ahead",
        "expert_imbalance",
        "expert_copies",
        "expert_moves",
    }
)
Attributes = Mapping[str, str | int | float | bool]


class RouterMetrics:
    """Holds a router's instruments in ``registry``; each attribute is the instrument of that key in
    ``metrics.ROUTER``.

    ``enabled`` False keeps nothing except the number of reachable workers.
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
    task_failures: Counter
    workers: Gauge
    redis_away: Gauge
    handover_obstacles: Gauge
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
        """Returns the buffered total of the counter or gauge ``key`` with these label values; increments reach it
        at each scrape.
        """
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
    """Holds a worker's instruments in ``registry``, with the labels role, worker and model filled in.

    Each attribute is the instrument of that key in ``metrics.WORKER``. ``enabled`` False keeps nothing.
    """

    redis_away: Gauge
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
    steps_ahead: Counter
    rows_discarded: Counter
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
        self._ready: dict[tuple[str, ...], instruments.AnyInstrument] = {}
        self._made = (
            instruments.make(metrics.WORKER, registry) if enabled else instruments.make_nothing(metrics.WORKER)
        )
        for key, metric in metrics.WORKER.items():
            if set(metric.labels) == set(self._labels) and key not in OPTIONAL:
                setattr(self, key, self._made[key].labels(**self._labels))
        if vllm_names and enabled:
            registry.register(instruments.VllmNames(metrics.WORKER, self._made))

    def optional(self, key: str) -> instruments.AnyInstrument:
        """Returns the instrument of a key in OPTIONAL, which is exported only once this was called."""
        return self._with(key)

    def task_failed(self, task: str) -> None:
        """Counts a failure of the background task called ``task``."""
        self._with("task_failures", task=task).inc()

    def pages(self, state: str) -> Gauge:
        """Returns the gauge of KV pages in ``state``."""
        return self._with("pages", state=state)

    def judged(self, position: int, judged: int, stood: int) -> None:
        """Counts drafted tokens at ``position`` in their draft (from 0): ``judged`` were verified, ``stood``
        accepted.
        """
        if judged:
            self._with("draft_judged", position=str(position)).inc(judged)
            self._with("draft_stood", position=str(position)).inc(stood)

    def compared(self, arm: str, tokens: int, seconds: float) -> None:
        """Counts tokens and seconds of decode steps, where ``arm`` is "drafts" or "control" (steps without
        drafts).
        """
        self._with("speculation_tokens", arm=arm).inc(max(0, tokens))
        self._with("speculation_seconds", arm=arm).inc(max(0.0, seconds))

    def experts_computed(self, rank: int, rows: int) -> None:
        """Counts token rows that the experts of rank ``rank`` computed."""
        self._with("expert_rows", rank=str(rank)).inc(rows)

    def experts_placed(self, placement: str, imbalance: float) -> None:
        """Shows how uneven ranks' loads are with a ``placement`` of experts, "placed" or "home"."""
        self._with("expert_rank_imbalance", placement=placement).set(imbalance)

    def tier_blocks(self, tier: str) -> Gauge:
        """Returns the gauge of KV blocks in the lower cache tier ``tier``."""
        return self._with("tier_blocks", tier=tier)

    def tier_events(self, tier: str, event: str) -> Counter:
        """Returns the counter of an event of tier ``tier``: blocks stored, loaded, evicted or damaged, or failures
        of its store.
        """
        return self._with("tier_events", tier=tier, event=event)

    def transferred(self, peer: str, outcome: str, shipped_bytes: int = 0) -> None:
        """Counts one KV handoff to decode worker ``peer``; ``outcome`` is "ok" or an error label."""
        self._with("transfers", peer=peer, outcome=outcome).inc()
        self._with("pair_bytes", peer=peer).inc(shipped_bytes)

    def energy(self, host: str, source: str) -> Counter:
        """Returns the counter of joules used by machine ``host``, as measured by ``source``."""
        return self._with("energy", host=host, source=source)

    def refused(self, error_label: str) -> None:
        """Counts one refused KV handoff frame, by error label."""
        self._with("refusals", error=error_label).inc()

    def received(self, host: str, size: int) -> None:
        """Counts ``size`` bytes of KV that handoffs brought to ``host`` of the worker's ranks."""
        self._with("received_bytes", host=host).inc(size)

    def linked(self, peer: str, transport: str, bytes_per_s: float, reason: str) -> None:
        """Notes that KV to ``peer`` goes by ``transport`` from now on; ``reason`` says why the best transport isn't
        used, "" if it is.
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

    def in_use(self, peer: str, transport: str, used: bool) -> None:
        """Shows whether KV goes to ``peer`` by ``transport`` at present; not while ``peer`` isn't there."""
        self._with("links", peer=peer, transport=transport).set(float(used))

    def _with(self, key: str, **labels: str) -> instruments.AnyInstrument:
        found = self._ready.get((key, *labels.values()))
        if found is None:
            found = self._ready[key, *labels.values()] = self._made[key].labels(**self._labels, **labels)
        return found


def setup_tracing(service: str, endpoint: str, instance: str = "") -> Callable[[], None]:
    """Exports this process's spans to ``endpoint`` (host:port, OTLP over gRPC; https://host:port: with TLS);
    returns a function that flushes at the end.

    With an empty endpoint nothing is set up and that function does nothing.
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
    _spans.processor = BatchSpanProcessor(exporter, schedule_delay_millis=500)
    provider.add_span_processor(_spans.processor)
    trace.set_tracer_provider(provider)
    return provider.shutdown


class _Spans:
    """Holds where this process exports its spans, and the tracer provider of a service that was renamed.

    Both are None until then: nothing is exported, and spans are of the provider that was set first.
    """

    processor: SpanProcessor | None = None
    renamed: TracerProvider | None = None


_spans = _Spans()


def rename_service(service: str) -> None:
    """Gives ``service`` as the service of spans that begin from now on, because a worker may change its role.

    Does nothing while spans aren't exported.
    """
    if _spans.processor is None:
        return
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider

    first = cast(TracerProvider, trace.get_tracer_provider())
    resource = first.resource.merge(Resource({"service.name": service}))
    _spans.renamed = TracerProvider(sampler=first.sampler, resource=resource, shutdown_on_exit=False)
    _spans.renamed.add_span_processor(_spans.processor)


def _tracer() -> trace.Tracer:
    return (_spans.renamed or trace.get_tracer_provider()).get_tracer("baton")


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
    """Returns a context manager that opens a span, a child of ``traceparent`` or else of the current span; an
    exception marks the span.

    While spans aren't exported and no ``traceparent`` is given, no span is made.
    """
    if not traceparent and isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return _NO_SPAN
    return _tracer().start_as_current_span(name, context=_context(traceparent), attributes=attributes, kind=kind)


def open_span(name: str, traceparent: str = "", attributes: Attributes | None = None) -> Span:
    """Opens and returns a span without making it the current one; call its ``end()``."""
    return _tracer().start_span(name, context=_context(traceparent), attributes=attributes)


def traceparent_of(current: Span) -> str:
    """Returns the W3C traceparent header of ``current``; "" if there is no trace."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier, context=trace.set_span_in_context(current))
    return carrier.get("traceparent", "")


def trace_id_of(current: Span) -> str:
    """Returns the trace id, in hex, if the trace is sampled, else ""."""
    context = current.get_span_context()
    return f"{context.trace_id:032x}" if context.is_valid and context.trace_flags.sampled else ""


def exemplar(trace_id: str) -> dict[str, str] | None:
    """Returns the exemplar for a histogram's ``observe``; None for an empty ``trace_id``."""
    return {"trace_id": trace_id} if trace_id else None


def current_traceparent() -> str:
    """Returns the W3C traceparent header of the current span; "" if there is none."""
    current = trace.get_current_span()
    return traceparent_of(current) if current.get_span_context().is_valid else ""


def _context(traceparent: str) -> Context | None:
    return propagate.extract({"traceparent": traceparent}) if traceparent else None
