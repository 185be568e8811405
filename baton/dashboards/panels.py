"""The panels of the Grafana dashboard about requests, row by row; those about machines are in ``machine_panels``.

Knows nothing of Grafana's JSON.
"""

from __future__ import annotations

from typing import NamedTuple

from baton.cluster.metering.metrics import ROUTER as R
from baton.cluster.metering.metrics import WORKER as W
from baton.dashboards import queries as q

ALL_WORKERS = 'worker=~"$worker"'
ACCEPTED = 'outcome="accepted"'
PERCENTILES = (0.5, 0.95, 0.99)  # shares of requests: the median, and the two tails that SLOs name


class PanelQuery(NamedTuple):
    """Holds one PromQL query of a panel and the legend of its series; ``exemplar`` shows exemplars."""

    query: str
    legend: str = ""
    exemplar: bool = False


class Panel(NamedTuple):
    """Describes one panel: its title and queries; ``unit`` is Grafana's name of one, ``about`` the description."""

    title: str
    lines: tuple[PanelQuery, ...]
    unit: str = "short"
    about: str = ""
    kind: str = "timeseries"  # timeseries, stat or table
    width: int = 8  # of 24 columns
    stacked: bool = False
    most: float | None = None  # the axis's maximum


CLIENTS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "What clients get",
        (
            Panel(
                "Goodput",
                (PanelQuery(q.goodput("context_class"), "{{context_class}}"),),
                "reqps",
                stacked=True,
                about="Requests per second that met every SLO. One-token answers have no TPOT and are not judged.",
            ),
            Panel(
                "SLO attainment",
                (PanelQuery(q.attainment("context_class"), "{{context_class}}"),),
                "percentunit",
                most=1,
                about="Of judged requests; refused and failed ones are missed.",
            ),
            Panel(
                "Requests by outcome",
                (PanelQuery(q.rate(R["requests"], "outcome"), "{{outcome}}"),),
                "reqps",
                stacked=True,
            ),
            Panel(
                "Attainment by SLO",
                tuple(PanelQuery(q.attainment(slo=s), s) for s in ("ttft", "tpot")),
                "percentunit",
                most=1,
            ),
            Panel(
                "Turned away",
                (
                    PanelQuery(q.rate(R["refused"], "cause"), "{{cause}}"),
                    PanelQuery(q.rate(R["retries"], "cause"), "retry: {{cause}}"),
                    PanelQuery(q.rate(R["loop_stalls"], ""), "router's loop stood still"),
                    PanelQuery(q.rate(R["task_failures"], "task"), "router's task failed: {{task}}"),
                    PanelQuery(q.rate(W["task_failures"], "worker, task"), "{{worker}}'s task failed: {{task}}"),
                ),
                "reqps",
                about="Calls without a good key or over its rate, second tries, stalls of a router's event loop, "
                "failures of background tasks (which begin again).",
            ),
            Panel(
                "Tokens",
                (PanelQuery(q.rate(R["prompt_tokens"]), "in"), PanelQuery(q.rate(R["output_tokens"]), "out")),
                "short",
            ),
            Panel(
                "Acceptance of drafts by class",
                (
                    PanelQuery(
                        f"{q.rate(R['prediction_tokens'], 'context_class', ACCEPTED)} / "
                        f"{q.rate(R['prediction_tokens'], 'context_class')}",
                        "{{context_class}}",
                    ),
                ),
                "percentunit",
                about="Where worker.speculation is on.",
                most=1,
            ),
        ),
    ),
    (
        "Latency",
        (
            *(
                Panel(
                    title,
                    tuple(
                        PanelQuery(
                            q.quantile(p, metric, "context_class"), f"{{{{context_class}}}} p{p * 100:g}", p == 0.99
                        )
                        for p in PERCENTILES
                    ),
                    "s",
                )
                for title, metric in (
                    ("Time to first token", R["ttft"]),
                    ("Time per output token", R["tpot"]),
                    ("Between tokens", R["itl"]),
                    ("End to end", R["duration"]),
                    ("Longest gap", R["longest_gap"]),
                )
            ),
            Panel(
                "Prompt and answer length",
                (
                    PanelQuery(q.mean(R["prompt_length"], "context_class"), "{{context_class}} prompt"),
                    PanelQuery(q.mean(R["output_length"], "context_class"), "{{context_class}} answer"),
                ),
                "short",
            ),
            Panel(
                "Where the time goes (mean)",
                (PanelQuery(q.mean(R["station"], "station"), "{{station}}"),),
                "s",
                width=12,
                stacked=True,
                about="Stations of a request's way; transfer is what no computation hides.",
            ),
            Panel(
                "Stations, p99",
                (PanelQuery(q.quantile(0.99, R["station"], "station"), "{{station}}"),),
                "s",
                width=12,
            ),
        ),
    ),
    (
        "Queues and pools",
        (
            Panel(
                "In the router",
                (
                    PanelQuery(q.level(R["queued"], "context_class"), "waiting {{context_class}}"),
                    PanelQuery(q.level(R["running"], "context_class"), "running {{context_class}}"),
                ),
            ),
            Panel(
                "Workers that can be reached", (PanelQuery(q.level(R["workers"], "role", how="max"), "{{role}}"),)
            ),
            Panel(
                "Redis away",
                (
                    PanelQuery(q.level(R["redis_away"], how="max"), "a router"),
                    PanelQuery(q.level(W["redis_away"], "worker", ALL_WORKERS, how="max"), "{{worker}}"),
                ),
                about="1 while the last look or heartbeat failed: workers are kept as last seen, new ones unseen.",
            ),
            Panel(
                "Workers that can't hand over",
                (PanelQuery(q.level(R["handover_obstacles"], "cause", how="max"), "{{cause}}"),),
                about="Pairs, or workers without a partner of their weights; `baton workers` names them.",
            ),
            Panel(
                "Ways taken", (PanelQuery(q.rate(R["decisions"], "way, worker"), "{{way}} {{worker}}"),), "reqps"
            ),
            Panel(
                "In the batch, of what fits",
                (PanelQuery(q.level(W["batch_fill"], "worker", ALL_WORKERS), "{{worker}}"),),
                "percentunit",
            ),
            Panel(
                "Waiting at workers",
                (
                    PanelQuery(q.level(W["waiting"], "worker", ALL_WORKERS), "{{worker}}"),
                    PanelQuery(q.level(W["running"], "worker", ALL_WORKERS), "running {{worker}}"),
                ),
            ),
            Panel(
                "Prompt tokens that wait",
                (PanelQuery(q.level(W["waiting_tokens"], "worker", ALL_WORKERS), "{{worker}}"),),
            ),
        ),
    ),
    (
        "Adapters",
        (
            Panel(
                "Requests by adapter",
                (PanelQuery(q.rate(R["adapter_requests"], "adapter"), "{{adapter}}"),),
                "reqps",
                stacked=True,
                about="Requests that ended on a LoRA adapter; names beyond the first 64 are told as other.",
            ),
            Panel(
                "Tokens by adapter",
                (PanelQuery(q.rate(R["adapter_tokens"], "adapter"), "{{adapter}}"),),
                "short",
                stacked=True,
            ),
            Panel(
                "Loads",
                (
                    PanelQuery(q.rate(R["adapter_loads"], "outcome"), "{{outcome}} per second"),
                    PanelQuery(q.quantile(0.95, R["adapter_load_seconds"]), "p95 seconds"),
                    PanelQuery(q.level(R["adapters_served"], how="max"), "served"),
                ),
                about="Many loads beside few adapters served: workers hold too few (adapters.max_loaded).",
            ),
        ),
    ),
    (
        "The ratio's controller",
        (
            Panel(
                "Fullness of the roles",
                (PanelQuery(q.level(R["control_pressure"], "role", how="max"), "{{role}}"),),
                "percentunit",
                about="1: as much as the role carries within its SLO; queues count as work.",
            ),
            Panel(
                "Decisions",
                (
                    PanelQuery(q.rate(R["control_decisions"], "kind"), "{{kind}} per second"),
                    PanelQuery(q.level(R["control_age"], how="min"), "seconds since the last look"),
                ),
            ),
            Panel(
                "Twin error",
                (PanelQuery(q.level(R["control_error"], "figure", how="max"), "{{figure}}"),),
                "percentunit",
                about="Predicted against observed; above its bound the controller gives no advice.",
            ),
        ),
    ),
)
