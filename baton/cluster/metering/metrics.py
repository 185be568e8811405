"""Definitions of every metric of the cluster: name, type, unit, help, labels. Imports neither torch nor a metrics
client.

Knows nothing of who observes what, nor of Prometheus' library: ``telemetry`` makes instruments of these, and
``dashboards`` the Grafana dashboard, the alert rules and a table of them. Label values are bounded: roles, worker
ids, models, classes, stations, outcomes and error labels. ``vllm`` is the name that dashboards made for vLLM ask
for, shown too where ``telemetry.vllm_names`` is set.
"""

from __future__ import annotations

from typing import Literal

import msgspec

# Upper bounds of histograms' bins, in seconds: from a step to a long answer.
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
# Upper bounds of histograms' bins, in tokens: by factors of four.
TOKENS = (1, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)
PREFIX, VLLM_PREFIX = "baton_", "vllm:"
Kind = Literal["counter", "gauge", "histogram"]


class Metric(msgspec.Struct, frozen=True):
    """Defines one family of metrics.

    ``name`` is without prefix and without the ``_total`` of counters; ``vllm`` is vLLM's name of the same figure,
    "" for none.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    unit: str = ""
    buckets: tuple[float, ...] = ()
    vllm: str = ""
    vllm_by: tuple[tuple[str, str], ...] = ()  # (value of the last label, vLLM's name of the figure for that value)

    @property
    def full_name(self) -> str:
        """Returns the name for the client library, with prefix."""
        return PREFIX + self.name

    @property
    def series(self) -> str:
        """Returns the name in queries, with prefix and a counter's ``_total`` (for a histogram, the stem of its
        series).
        """
        return self.full_name + ("_total" if self.kind == "counter" else "")


_CLASS = ("model", "context_class")
_WORKER = ("role", "worker", "model")


# vLLM has a histogram of its own for each of these stations.
VLLM_STATIONS = (
    ("queue", "request_queue_time_seconds"),
    ("prefill", "request_prefill_time_seconds"),
    ("decode", "request_decode_time_seconds"),
)


def _seconds(
    name: str,
    text: str,
    labels: tuple[str, ...] = _CLASS,
    vllm: str = "",
    vllm_by: tuple[tuple[str, str], ...] = (),
) -> Metric:
    return Metric(f"{name}_seconds", "histogram", text, labels, "seconds", SECONDS, vllm, vllm_by)


def _count(name: str, text: str, labels: tuple[str, ...], unit: str = "", vllm: str = "") -> Metric:
    return Metric(name, "counter", text, labels, unit, (), vllm)


def _gauge(name: str, text: str, labels: tuple[str, ...], unit: str = "", vllm: str = "") -> Metric:
    return Metric(name, "gauge", text, labels, unit, (), vllm)


# What a router counts, by the name of its attribute in telemetry.RouterMetrics.
ROUTER: dict[str, Metric] = {
    "requests": _count(
        "requests",
        "Requests that ended, each once whatever its n; outcome is a finish_reason, or an error label if any of "
        "its choices had an error",
        (*_CLASS, "outcome"),
        vllm="request_success",
    ),
    "running": _gauge("requests_running", "Requests past the queue", _CLASS, vllm="num_requests_running"),
    "queued": _gauge("requests_queued", "Requests in the router's queue", _CLASS, vllm="num_requests_waiting"),
    "prompt_tokens": _count("prompt_tokens", "Prompt tokens taken in", _CLASS, "tokens", "prompt_tokens"),
    "output_tokens": _count("output_tokens", "Tokens sent to clients", _CLASS, "tokens", "generation_tokens"),
    "prediction_tokens": _count(
        "prediction_tokens",
        "Drafted tokens of answers that ended; outcome is accepted or rejected",
        (*_CLASS, "outcome"),
    ),
    "cached_tokens": _count("prompt_tokens_cached", "Prompt tokens found in a cache", _CLASS, "tokens"),
    "best_cached_tokens": _count(
        "prompt_tokens_cached_best",
        "Prompt tokens that a cache which never forgets, shared by all workers, would have held",
        _CLASS,
        "tokens",
    ),
    "ttft": _seconds(
        "time_to_first_token",
        "From arrival to the first token, or to the answer where it has none (an embedding)",
        vllm="time_to_first_token_seconds",
    ),
    "itl": _seconds("inter_token_latency", "Between tokens of one choice", vllm="inter_token_latency_seconds"),
    "tpot": _seconds(
        "time_per_output_token",
        "Mean between tokens, per request",
        vllm="request_time_per_output_token_seconds",
    ),
    "longest_gap": _seconds("longest_gap", "The longest wait between two tokens, per request"),
    "duration": _seconds("request_duration", "From arrival to the last token", vllm="e2e_request_latency_seconds"),
    "station": _seconds(
        "station",
        "Time at one station of a request's way: queue (router), adapter (its load), prefill_queue, prefill, "
        "fetch, transfer (exposed), first_decode (first to second token), decode",
        (*_CLASS, "station"),
        vllm_by=VLLM_STATIONS,
    ),
    "prompt_length": Metric(
        "prompt_length_tokens", "histogram", "Prompt length", _CLASS, "tokens", TOKENS, "request_prompt_tokens"
    ),
    "output_length": Metric(
        "output_length_tokens",
        "histogram",
        "Answer length, per choice",
        _CLASS,
        "tokens",
        TOKENS,
        "request_generation_tokens",
    ),
    "slo": _count(
        "slo_requests",
        "Choices of requests that had an SLO, each judged by itself. By slo: ttft, tpot or all; by verdict: met, "
        "missed or unjudged (one token has no TPOT). Refused and failed ones are missed",
        (*_CLASS, "slo", "verdict"),
    ),
    "decisions": _count(
        "routing_decisions", "Requests by way taken (local, prefill) and worker", ("way", "worker")
    ),
    "retries": _count("request_retries", "Second tries, by cause", ("cause",)),
    "refused": _count("requests_refused", "Calls without a good key or over its rate", ("cause",)),
    "loop_stalls": _count(
        "router_loop_stalls", "Times that a router's event loop stood still for telemetry.loop_stall_s", ()
    ),
    "task_failures": _count(
        "router_task_failures", "Failures of a router's background tasks, each of which begins again", ("task",)
    ),
    "adapter_requests": _count(
        "adapter_requests",
        "Requests on an adapter that ended; outcome is the first choice's finish_reason or unfinished; beyond 64 "
        "names the adapter is other",
        ("model", "adapter", "outcome"),
    ),
    "adapter_tokens": _count(
        "adapter_tokens", "Tokens that requests on an adapter gave", ("model", "adapter"), "tokens"
    ),
    "adapter_loads": _count(
        "adapter_loads", "Adapters that this router let workers load; outcome is ok or an error label", ("outcome",)
    ),
    "adapter_load_seconds": _seconds("adapter_load", "Until a worker had loaded an adapter", ()),
    "adapters_served": _gauge("adapters_served", "Adapters that clients may name", ()),
    "workers": _gauge("workers", "Workers the router can reach", ("role",)),
    "redis_away": _gauge(
        "router_redis_away",
        "1 while a router's last look at Redis failed, so that it keeps its last view of the workers; else 0",
        (),
    ),
    "handover_obstacles": _gauge(
        "router_handover_obstacles",
        "Ready workers that can't hand KV over to one another, 64 at most. The cause is weights (a worker without "
        "a partner of its weights), layout or failing (of a pair)",
        ("cause",),
    ),
    "certificate": _gauge(
        "router_certificate_expiry_timestamp_seconds",
        "When a router's certificate in force ends, since 1970; kind is api (what clients see) or cluster",
        ("kind",),
        "seconds",
    ),
    "price": _gauge(
        "workers_price_dollars_per_hour", "What the reachable workers cost, as configured", ("role",), "dollars"
    ),
    "control_decisions": _count(
        "controller_decisions",
        "The ratio controller's looks by what came of them, in the router that leads",
        ("kind",),
    ),
    "control_age": _gauge(
        "controller_decision_age_seconds",
        "Since the controller's last look; only the router that leads has it",
        ("mode",),
        "seconds",
    ),
    "control_pressure": _gauge(
        "controller_pressure_ratio",
        "Load on each role over what it carries within its SLO, as the controller sees it",
        ("role",),
        "ratio",
    ),
    "control_error": _gauge(
        "controller_twin_error_ratio", "Predicted against observed, relative (0.1: 10% off)", ("figure",), "ratio"
    ),
}

# What a worker counts, by the name of its attribute in telemetry.WorkerMetrics.
WORKER: dict[str, Metric] = {
    "certificate": _gauge(
        "worker_certificate_expiry_timestamp_seconds",
        "When the worker's certificate in force ends, since 1970; not shown without TLS",
        _WORKER,
        "seconds",
    ),
    "redis_away": _gauge(
        "worker_redis_away", "1 while the worker's last heartbeat didn't reach Redis; else 0", _WORKER
    ),
    "task_failures": _count(
        "worker_task_failures",
        "Failures of a worker's background tasks, each of which begins again",
        (*_WORKER, "task"),
    ),
    "cache_usage": _gauge(
        "kv_cache_usage_ratio",
        "Leased and quarantined pages over all pages",
        _WORKER,
        "ratio",
        "kv_cache_usage_perc",
    ),
    "pages": _gauge("kv_cache_pages", "Pages by state", (*_WORKER, "state")),
    "running": _gauge("sequences_running", "Sequences in the batch", _WORKER),
    "batch_fill": _gauge(
        "batch_fill_ratio", "Sequences in the batch over the most that it holds", _WORKER, "ratio"
    ),
    "waiting": _gauge("sequences_waiting", "Sequences that wait", _WORKER),
    "waiting_tokens": _gauge("sequences_waiting_tokens", "Prompt tokens that wait", _WORKER, "tokens"),
    "step_seconds": _gauge("engine_step_seconds", "Median engine step, last 512", _WORKER, "seconds"),
    "adapter_row_seconds": _gauge(
        "engine_adapter_row_seconds",
        "Fitted time that a row on a LoRA adapter adds to a step, at the mean rank of such rows. Not shown before "
        "there were steps with adapters and without",
        _WORKER,
        "seconds",
    ),
    "adapter_seconds": _gauge(
        "engine_adapter_seconds",
        "Fitted time that each different LoRA adapter adds to a step, at the mean rank of its rows",
        _WORKER,
        "seconds",
    ),
    "steps": _count("engine_steps", "Engine steps", _WORKER),
    "busy_seconds": _count("engine_busy_seconds", "Time inside engine steps", _WORKER, "seconds"),
    "flops": _count(
        "engine_flops",
        "Floating-point operations that the steps needed; of a paced engine, seconds at its profile's ceiling",
        _WORKER,
    ),
    "bytes_read": _count(
        "engine_read_bytes",
        "Bytes of weights and KV that the steps had to read; of a paced engine, seconds at its profile's ceiling",
        _WORKER,
        "bytes",
    ),
    "peak_flops": _gauge(
        "engine_peak_flops", "Operations per second that this machine does at all, measured at start", _WORKER
    ),
    "peak_bytes": _gauge(
        "engine_peak_bytes_per_second",
        "Bytes per second that this machine reads at all, measured at start",
        _WORKER,
        "bytes",
    ),
    "mfu": _gauge("mfu_ratio", "Model FLOPs utilisation, last seconds, idle time included", _WORKER, "ratio"),
    "mbu": _gauge("mbu_ratio", "Memory bandwidth utilisation, last seconds, idle time included", _WORKER, "ratio"),
    "prefill_tokens": _count("prefill_tokens", "Prompt tokens computed", _WORKER, "tokens"),
    "decode_tokens": _count("decode_tokens", "Tokens decoded", _WORKER, "tokens"),
    "prefix_hits": _count(
        "prefix_cache_hits", "Prompt tokens found in this cache", _WORKER, "tokens", "prefix_cache_hits"
    ),
    "prefix_queries": _count(
        "prefix_cache_queries", "Prompt tokens looked for in this cache", _WORKER, "tokens", "prefix_cache_queries"
    ),
    "preemptions": _count("preemptions", "Sequences put back to make room", _WORKER, vllm="num_preemptions"),
    "leases_swept": _count("leases_swept", "Leases the TTL sweeper had to end", _WORKER),
    "steps_ahead": _count("steps_ahead", "Steps planned while the one before them ran, on a GPU", _WORKER),
    "rows_discarded": _count(
        "rows_discarded", "Rows of steps planned ahead whose answers had ended by then", _WORKER
    ),
    "drafts": _count(
        "drafts", "Drafts verified, one per sequence and step", _WORKER, vllm="spec_decode_num_drafts"
    ),
    "draft_tokens": _count(
        "draft_tokens", "Drafted tokens verified", _WORKER, "tokens", "spec_decode_num_draft_tokens"
    ),
    "draft_tokens_accepted": _count(
        "draft_tokens_accepted", "Drafted tokens accepted", _WORKER, "tokens", "spec_decode_num_accepted_tokens"
    ),
    "draft_seconds": _count("draft_seconds", "Seconds spent making drafts", _WORKER, "seconds"),
    "draft_judged": _count(
        "draft_judged_tokens",
        "Drafted tokens that came to be judged, by position in the draft from 0",
        (*_WORKER, "position"),
    ),
    "draft_stood": _count(
        "draft_stood_tokens",
        "Drafted tokens that stood, by position in the draft from 0",
        (*_WORKER, "position"),
        vllm="spec_decode_num_accepted_tokens_per_pos",
    ),
    "expert_rows": _count(
        "expert_rows", "Rows that went to the experts of a rank, in all layers", (*_WORKER, "rank"), "rows"
    ),
    "expert_imbalance": _gauge(
        "expert_imbalance_ratio", "Rows of the busiest expert over the mean of all, since the role began", _WORKER
    ),
    "expert_copies": _gauge(
        "expert_copies", "Copies of busy experts that compute rows, in all layers (worker.expert_replicas)", _WORKER
    ),
    "expert_moves": _count("expert_moves", "Copies of busy experts that ranks were given", _WORKER),
    "expert_rank_imbalance": _gauge(
        "expert_rank_imbalance_ratio",
        "Rows of the busiest rank's experts over the mean of ranks, as of the last look. With their copies it is "
        "placed; home is what it would be without",
        (*_WORKER, "placement"),
    ),
    "sequence_steps": _count(
        "sequence_steps", "Steps of sequences that write, where worker.speculation is on", _WORKER
    ),
    "draft_read_ahead": _count(
        "draft_read_ahead_tokens",
        "Prompt tokens that drafts were prepared from while their KV was arriving",
        _WORKER,
    ),
    "speculation_tokens": _count(
        "speculation_tokens",
        "Tokens written where worker.speculation is on; arm is drafts, or control: the share of steps without",
        (*_WORKER, "arm"),
    ),
    "speculation_seconds": _count(
        "speculation_seconds", "Seconds of those tokens' steps and of their drafts", (*_WORKER, "arm"), "seconds"
    ),
    "transfer_bytes": _count("kv_transfer_bytes", "KV bytes shipped", _WORKER, "bytes"),
    "transfer_blocks": _count("kv_transfer_blocks", "KV blocks shipped", _WORKER),
    "transfers": _count(
        "kv_transfers",
        "Handoffs to each decode worker; outcome is ok or an error label",
        (*_WORKER, "peer", "outcome"),
    ),
    "pair_bytes": _count("kv_pair_bytes", "KV bytes shipped to each decode worker", (*_WORKER, "peer"), "bytes"),
    "received_bytes": _count(
        "kv_received_bytes",
        "KV bytes that handoffs brought, by the host of the worker's ranks that took them (lead: the worker's own)",
        (*_WORKER, "host"),
        "bytes",
    ),
    "fetched_bytes": _count("kv_fetched_bytes", "KV bytes fetched from other workers' caches", _WORKER, "bytes"),
    "fetched_blocks": _count("kv_fetched_blocks", "KV blocks fetched from other workers' caches", _WORKER),
    "transfer_seconds": _seconds(
        "kv_transfer", "Exposed transfer: after the last chunk, until the last acknowledgement", _WORKER
    ),
    "links": _gauge(
        "kv_transport_info",
        "How KV gets to each decode worker; 1 for the way in use",
        (*_WORKER, "peer", "transport"),
    ),
    "link_speed": _gauge(
        "kv_transport_bandwidth_bytes_per_second",
        "What the last preflight measured",
        (*_WORKER, "peer", "transport"),
        "bytes",
    ),
    "fallbacks": _count(
        "kv_transport_fallbacks",
        "Preflights that chose another than the best transport; why",
        (*_WORKER, "transport", "reason"),
    ),
    "tier_blocks": _gauge("kv_tier_blocks", "KV blocks in a lower tier", (*_WORKER, "tier")),
    "tier_events": _count(
        "kv_tier_events",
        "Blocks stored, loaded, evicted or found damaged, and failures of the store, by lower tier",
        (*_WORKER, "tier", "event"),
    ),
    "refusals": _count("handoff_refusals", "Handoff frames refused, by error label", (*_WORKER, "error")),
    "energy": _count(
        "host_energy_joules",
        "Energy of this worker's whole machine, where it tells (source rapl or nvml); add up once per host",
        (*_WORKER, "host", "source"),
        "joules",
    ),
}

ALL: tuple[Metric, ...] = (*ROUTER.values(), *WORKER.values())
