"""What the Grafana dashboard shows of machines: engines, KV, cost. Knows nothing of Grafana's JSON."""

from __future__ import annotations

from baton.cluster.metrics import ROUTER as R
from baton.cluster.metrics import WORKER as W
from baton.dashboards import queries as q
from baton.dashboards.panels import ALL_WORKERS, Line, Panel

MACHINES: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Engines",
        (
            Panel(
                "Time in steps",
                (Line(q.rate(W["busy_seconds"], "worker", ALL_WORKERS), "{{worker}}"),),
                "percentunit",
                most=1,
            ),
            Panel(
                "MFU",
                (
                    Line(q.of_ceiling(W["flops"], W["peak_flops"]), "{{worker}}"),
                    Line(q.level(W["mfu"], "worker", ALL_WORKERS), "{{worker}}, last seconds"),
                ),
                "percentunit",
                about="Against the ceiling that the worker measured at its start; idle time counts.",
            ),
            Panel(
                "MBU",
                (
                    Line(q.of_ceiling(W["bytes_read"], W["peak_bytes"]), "{{worker}}"),
                    Line(q.level(W["mbu"], "worker", ALL_WORKERS), "{{worker}}, last seconds"),
                ),
                "percentunit",
            ),
            Panel(
                "Tokens computed",
                (
                    Line(q.rate(W["prefill_tokens"], "worker", ALL_WORKERS), "{{worker}} read"),
                    Line(q.rate(W["decode_tokens"], "worker", ALL_WORKERS), "{{worker}} written"),
                ),
                "short",
            ),
            Panel("Step", (Line(q.level(W["step_seconds"], "worker", ALL_WORKERS), "{{worker}} median"),), "s"),
            Panel(
                "Steps and preemptions",
                (
                    Line(q.rate(W["steps"], "worker", ALL_WORKERS), "{{worker}} steps"),
                    Line(q.rate(W["preemptions"], "worker", ALL_WORKERS), "{{worker}} preemptions"),
                ),
                "ops",
            ),
            Panel(
                "Power of hosts",
                (Line(f"max by (host, source) (rate({W['energy'].series}[{q.WINDOW}]))", "{{host}} {{source}}"),),
                "watt",
                about="Where the platform tells; each host once.",
            ),
            Panel(
                "Certificates: time left",
                (
                    Line(f"{q.level(W['certificate'], 'worker', ALL_WORKERS, how='min')} - time()", "{{worker}}"),
                    Line(f"{q.level(R['certificate'], 'kind', how='min')} - time()", "router, {{kind}}"),
                ),
                "s",
                about="Renewed ones are taken up without a restart.",
            ),
        ),
    ),
    (
        "KV",
        (
            Panel(
                "KV in use",
                (Line(q.level(W["cache_usage"], "worker", ALL_WORKERS), "{{worker}}"),),
                "percentunit",
                most=1,
            ),
            Panel("Pages", (Line(q.level(W["pages"], "role, state"), "{{role}} {{state}}"),), stacked=True),
            Panel(
                "Prefix hits",
                (
                    Line(q.share(R["cached_tokens"], R["prompt_tokens"]), "seen"),
                    Line(q.share(R["best_cached_tokens"], R["prompt_tokens"]), "best possible"),
                    Line(q.share(W["prefix_hits"], W["prefix_queries"], "role"), "{{role}} caches"),
                ),
                "percentunit",
                most=1,
            ),
            Panel(
                "Shipped, by pair",
                (Line(q.rate(W["pair_bytes"], "worker, peer"), "{{worker}} to {{peer}}"),),
                "Bps",
            ),
            Panel(
                "Handoffs that failed",
                (
                    Line(
                        q.rate(W["transfers"], "worker, peer, outcome", 'outcome!="ok"'),
                        "{{worker}} to {{peer}}: {{outcome}}",
                    ),
                    Line(q.rate(W["refusals"], "worker, error"), "{{worker}} refused: {{error}}"),
                ),
                "ops",
            ),
            Panel(
                "Exposed transfer",
                tuple(Line(q.quantile(p, W["transfer_seconds"]), f"p{p * 100:g}") for p in (0.5, 0.99)),
                "s",
            ),
            Panel(
                "Blocks",
                (Line(q.rate(W["transfer_blocks"]), "shipped"), Line(q.rate(W["fetched_blocks"]), "fetched")),
                "ops",
            ),
            Panel(
                "Bytes",
                (Line(q.rate(W["transfer_bytes"]), "shipped"), Line(q.rate(W["fetched_bytes"]), "fetched")),
                "Bps",
            ),
            Panel(
                "Lower tiers",
                (
                    Line(q.rate(W["tier_events"], "tier, event"), "{{tier}} {{event}}"),
                    Line(q.level(W["tier_blocks"], "tier"), "{{tier}} blocks"),
                ),
            ),
            Panel(
                "Ways of transport",
                (
                    Line(q.level(W["links"], "worker, peer, transport"), "{{worker}} to {{peer}}: {{transport}}"),
                    Line(q.rate(W["fallbacks"], "reason"), "fallback: {{reason}}"),
                ),
                kind="table",
                width=12,
            ),
            Panel(
                "Measured speed of each pair",
                (
                    Line(
                        q.level(W["link_speed"], "worker, peer, transport"), "{{worker}} to {{peer}}: {{transport}}"
                    ),
                ),
                "Bps",
                width=6,
            ),
            Panel(
                "Leases swept",
                (Line(f"sum (increase({W['leases_swept'].series}[1h]))", "last hour"),),
                kind="stat",
                width=6,
                about="Leases that only the time limit ended. Not 0: look at the network between workers.",
            ),
        ),
    ),
    (
        "Cost",
        (
            Panel(
                "Dollars per 1M tokens",
                (
                    Line(q.per_million_of_all(), "all workers, input and output tokens"),
                    Line(q.per_million("prefill", R["prompt_tokens"]), "prefill workers, input tokens"),
                    Line(q.per_million("decode", R["output_tokens"]), "decode workers, output tokens"),
                ),
                "currencyUSD",
            ),
            Panel(
                "Dollars per hour",
                (Line(q.level(R["price"], "role", how="max"), "{{role}}"),),
                "currencyUSD",
                stacked=True,
            ),
        ),
    ),
)
