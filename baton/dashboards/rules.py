"""Prometheus recording and alert rules, as plain data.

Knows nothing of files. An alert says what is wrong for whom, and what to look at first. Each cluster is judged by
itself where several are on one Prometheus.
"""

from __future__ import annotations

from baton.cluster.metering.metrics import ROUTER as R
from baton.cluster.metering.metrics import WORKER as W
from baton.dashboards import queries as q

WINDOW = "5m"
CRITICAL, WARNING = "critical", "warning"
MODEL = f"{q.CLUSTER}, model"
WHOSE = "{{ $labels.context_class }} requests of {{ $labels.model }}"
SHARE = "{{ $value | humanizePercentage }}"


def rules() -> dict[str, object]:
    """Returns the content of a Prometheus rule file."""
    return {
        "groups": [
            {"name": "baton-figures", "interval": "30s", "rules": _figures()},
            {"name": "baton-clients", "rules": _clients()},
            {"name": "baton-workers", "rules": _workers()},
            {"name": "baton-kv", "rules": _kv()},
            {"name": "baton-adapters", "rules": _adapters()},
            {"name": "baton-certificates", "rules": _certificates()},
        ]
    }


def _figures() -> list[dict[str, str]]:
    by, rows = f"{q.CLUSTER}, model, context_class", []
    for name, query in (
        ("baton:goodput:rate5m", q.goodput(by, WINDOW)),
        ("baton:slo_attainment:ratio_rate5m", q.attainment(by, WINDOW)),
        ("baton:time_to_first_token_seconds:p99_5m", q.quantile(0.99, R["ttft"], by, window=WINDOW)),
        ("baton:time_per_output_token_seconds:p99_5m", q.quantile(0.99, R["tpot"], by, window=WINDOW)),
        ("baton:prefix_hits:ratio_rate5m", q.share(R["cached_tokens"], R["prompt_tokens"], MODEL, WINDOW)),
        (
            "baton:prefix_hits_best:ratio_rate5m",
            q.share(R["best_cached_tokens"], R["prompt_tokens"], MODEL, WINDOW),
        ),
        ("baton:dollars_per_million_tokens:5m", q.per_million_of_all(WINDOW)),
        ("baton:dollars_per_million_input_tokens:5m", q.per_million("prefill", R["prompt_tokens"], WINDOW)),
        ("baton:dollars_per_million_output_tokens:5m", q.per_million("decode", R["output_tokens"], WINDOW)),
    ):
        rows.append({"record": name, "expr": query})
    return rows


def _clients() -> list[dict[str, object]]:
    failed = q.rate(R["requests"], MODEL, 'outcome!~"stop|length|tool_calls|cancelled"', WINDOW)
    ended = q.rate(R["requests"], MODEL, window=WINDOW)
    attained = "baton:slo_attainment:ratio_rate5m"
    return [
        _alert(
            "BatonSloMissed",
            f"{attained} < 0.90",
            "10m",
            CRITICAL,
            f"{WHOSE} meet their SLOs only {SHARE} of the time",
            "See which station grew (queue, prefill, transfer, decode), and what the ratio dial says.",
        ),
        _alert(
            "BatonSloAtRisk",
            f"{attained} < 0.97 and {attained} >= 0.90",
            "15m",
            WARNING,
            f"{WHOSE} meet their SLOs {SHARE} of the time",
            "",
        ),
        _alert(
            "BatonRequestsFail",
            f"{failed} / {ended} > 0.01",
            "5m",
            CRITICAL,
            "{{ $value | humanizePercentage }} of {{ $labels.model }}'s requests end in an error",
            "By outcome: worker_lost, no_worker and internal are ours; overloaded is a matter of capacity.",
        ),
        _alert(
            "BatonQueueStands",
            f"min_over_time(({q.level(R['queued'], f'{MODEL}, context_class')})[10m:30s]) > 0",
            "5m",
            WARNING,
            f"{WHOSE} have waited in the router for ten minutes without a pause",
            "Prefill is short of capacity, or decode of KV pages: compare both pools.",
        ),
        _alert(
            "BatonRefusesCalls",
            f"{q.rate(R['refused'], f'{q.CLUSTER}, cause', window=WINDOW)} > 1",
            "10m",
            WARNING,
            "{{ $value | humanize }} calls per second are turned away: {{ $labels.cause }}",
            "",
        ),
    ]


def _workers() -> list[dict[str, object]]:
    workers = q.level(R["workers"], f"{q.CLUSTER}, role", how="max")
    decoders = q.level(R["workers"], q.CLUSTER, 'role="decode"', how="max")
    steps, running = f"rate({W['steps'].series}[2m])", W["running"].series
    return [
        _alert(
            "BatonNoDecodeWorker",
            f"{decoders} == 0",
            "30s",
            CRITICAL,
            "The router reaches no decode worker: nothing can be answered",
            "See the workers' logs, and Redis.",
        ),
        _alert(
            "BatonRedisAway",
            f"{R['redis_away'].series} > 0 or {W['redis_away'].series} > 0",
            "1m",
            WARNING,
            "{{ $labels.instance }} hasn't reached Redis for a minute: it goes on with what it saw last",
            "New workers aren't seen, quotas aren't shared and batch jobs wait until Redis is back.",
        ),
        _alert(
            "BatonCannotHandOver",
            f"{q.level(R['handover_obstacles'], f'{q.CLUSTER}, cause', how='max')} > 0",
            "5m",
            WARNING,
            "{{ $value }} workers or pairs can't hand KV over ({{ $labels.cause }}): their prompts go other ways",
            "`baton workers` and the router's log name each, the reason and the remedy.",
        ),
        _alert(
            "BatonRouterGone",
            f"absent({R['workers'].series})",
            "1m",
            CRITICAL,
            "No router is scraped",
            "Is it running? Is /metrics reachable from Prometheus?",
        ),
        _alert(
            "BatonWorkerLost",
            f"{workers} < max_over_time(({workers})[30m:1m])",
            "5m",
            WARNING,
            "Fewer {{ $labels.role }} workers than half an hour ago: {{ $value }}",
            "A change of role does this too: the dashboard's timeline tells.",
        ),
        _alert(
            "BatonEngineStuck",
            f"{steps} == 0 and {running} > 0",
            "1m",
            CRITICAL,
            "{{ $labels.worker }} has sequences in its batch and makes no step",
            "",
        ),
        _alert(
            "BatonPreempts",
            f"{q.rate(W['preemptions'], f'{q.CLUSTER}, worker', window=WINDOW)} > 0.2",
            "10m",
            WARNING,
            "{{ $labels.worker }} puts sequences back to make room: {{ $value | humanize }} per second",
            "It is short of KV pages: more decode workers, a smaller KV dtype, or more memory.",
        ),
        _alert(
            "BatonControllerSilent",
            f"{q.level(R['control_age'], q.CLUSTER, how='min')} > 120",
            "1m",
            WARNING,
            "The ratio's controller hasn't looked for {{ $value | humanizeDuration }}",
            "Is Redis there? The log of the router that leads says why.",
        ),
        _alert(
            "BatonWorkersDoNotCome",
            q.grew(R["control_decisions"], 'kind="failed"', "30m"),
            "0s",
            WARNING,
            "What the ratio's controller asked for did not come",
            "The timeline of the dashboard says what; see whoever places workers, and whether there is room.",
        ),
        _alert(
            "BatonHitsFarBelowBest",
            "baton:prefix_hits_best:ratio_rate5m - baton:prefix_hits:ratio_rate5m > 0.25",
            "30m",
            WARNING,
            f"{{{{ $labels.model }}}}: {SHARE} of prompt tokens could have been in a cache and were not",
            "Caches are too small (host or disk tier), or requests of one conversation are spread.",
        ),
    ]


def _certificates() -> list[dict[str, object]]:
    left = f"({R['certificate'].series} or {W['certificate'].series}) - time()"
    renew = "Renew it where it comes from (`baton certs renew`, cert-manager): no restart is needed."
    return [
        _alert(
            "BatonCertificateEnds",
            f"{left} < {7 * 86400}",
            "10m",
            WARNING,
            "A certificate of {{ $labels.instance }} ends in {{ $value | humanizeDuration }}",
            renew,
        ),
        _alert(
            "BatonCertificateEndsNow",
            f"{left} < {86400}",
            "1m",
            CRITICAL,
            "A certificate of {{ $labels.instance }} ends in {{ $value | humanizeDuration }}, and connections then",
            renew,
        ),
    ]


def _kv() -> list[dict[str, object]]:
    failures = q.rate(
        W["transfers"], f"{q.CLUSTER}, worker, peer, outcome", 'outcome!~"ok|cancelled|draining|overloaded"', WINDOW
    )
    return [
        _alert(
            "BatonKvFull",
            f"{W['cache_usage'].series} > 0.97",
            "5m",
            WARNING,
            "{{ $labels.worker }} ({{ $labels.role }}) has used up its KV pages",
            "New requests wait; preemptions follow.",
        ),
        _alert(
            "BatonTransfersFail",
            f"{failures} > 0.05",
            "5m",
            CRITICAL,
            "KV from {{ $labels.worker }} to {{ $labels.peer }} fails: {{ $labels.outcome }}",
            "",
        ),
        _alert(
            "BatonCorruptKv",
            q.grew(W["refusals"], 'error="corrupt_frame"', "10m"),
            "0s",
            CRITICAL,
            "{{ $labels.worker }} refused KV whose checksum was wrong",
            "No answer was wrong: the blocks were refused. Look at the memory and the network of both ends.",
        ),
        _alert(
            "BatonTransportFallback",
            q.grew(W["fallbacks"], window="10m"),
            "0s",
            WARNING,
            "{{ $labels.worker }} ships KV by {{ $labels.transport }}, not by its best way: {{ $labels.reason }}",
            "",
        ),
        _alert(
            "BatonLeasesSwept",
            q.grew(W["leases_swept"], window="10m"),
            "0s",
            WARNING,
            "{{ $labels.worker }} had to end leases by their time limit",
            "Outside of network partitions this stays 0.",
        ),
    ]


def _adapters() -> list[dict[str, object]]:
    asked = q.rate(R["adapter_requests"], q.CLUSTER, window=WINDOW)
    loaded = q.rate(R["adapter_loads"], q.CLUSTER, 'outcome="ok"', WINDOW)
    return [
        _alert(
            "BatonAdapterLoadsFail",
            q.rate(R["adapter_loads"], f"{q.CLUSTER}, outcome", 'outcome!~"ok|adapter_refused"', WINDOW) + " > 0",
            "10m",
            WARNING,
            "Workers can't load LoRA adapters: {{ $labels.outcome }}",
            "adapter_changed: files were replaced in place. adapters_full: raise adapters.max_loaded, or unpin.",
        ),
        _alert(
            "BatonAdaptersThrash",
            f"{loaded} > 0.2 * {asked} and {asked} > 0.1",
            "15m",
            WARNING,
            "More than one in five requests on LoRA adapters waits for a load",
            "Workers hold too few: raise adapters.max_loaded and adapters.max_bytes, or serve fewer.",
        ),
    ]


def _alert(name: str, query: str, lasting: str, severity: str, summary: str, advice: str) -> dict[str, object]:
    annotations = {"summary": summary} | ({"description": advice} if advice else {})
    return {
        "alert": name,
        "expr": query,
        "for": lasting,
        "labels": {"severity": severity},
        "annotations": annotations,
    }
