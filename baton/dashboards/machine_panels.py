"""The panels of the Grafana dashboard about machines: engines, KV, cost.

Knows nothing of Grafana's JSON.
"""

from __future__ import annotations

from baton.cluster.metering.metrics import ROUTER as R
from baton.cluster.metering.metrics import WORKER as W
from baton.dashboards import queries as q
from baton.dashboards.panels import ALL_WORKERS, Panel, PanelQuery

MACHINES: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Engines",
        (
            Panel(
                "Time in steps",
                (PanelQuery(q.rate(W["busy_seconds"], "worker", ALL_WORKERS), "{{worker}}"),),
                "percentunit",
                most=1,
            ),
            Panel(
                "MFU",
                (
                    PanelQuery(q.of_ceiling(W["flops"], W["peak_flops"]), "{{worker}}"),
                    PanelQuery(q.level(W["mfu"], "worker", ALL_WORKERS), "{{worker}}, last seconds"),
                ),
                "percentunit",
                about="Against the ceiling that the worker measured at its start; idle time counts.",
            ),
            Panel(
                "MBU",
                (
                    PanelQuery(q.of_ceiling(W["bytes_read"], W["peak_bytes"]), "{{worker}}"),
                    PanelQuery(q.level(W["mbu"], "worker", ALL_WORKERS), "{{worker}}, last seconds"),
                ),
                "percentunit",
            ),
            Panel(
                "Tokens computed",
                (
                    PanelQuery(q.rate(W["prefill_tokens"], "worker", ALL_WORKERS), "{{worker}} read"),
                    PanelQuery(q.rate(W["decode_tokens"], "worker", ALL_WORKERS), "{{worker}} written"),
                ),
                "short",
            ),
            Panel(
                "Step", (PanelQuery(q.level(W["step_seconds"], "worker", ALL_WORKERS), "{{worker}} median"),), "s"
            ),
            Panel(
                "Added by adapters to a step",
                (
                    PanelQuery(q.level(W["adapter_row_seconds"], "worker", ALL_WORKERS), "{{worker}} a row"),
                    PanelQuery(q.level(W["adapter_seconds"], "worker", ALL_WORKERS), "{{worker}} an adapter"),
                ),
                "s",
                about="Fitted to steps with LoRA adapters and without.",
            ),
            Panel(
                "Steps and preemptions",
                (
                    PanelQuery(q.rate(W["steps"], "worker", ALL_WORKERS), "{{worker}} steps"),
                    PanelQuery(q.rate(W["steps_ahead"], "worker", ALL_WORKERS), "{{worker}} planned ahead"),
                    PanelQuery(q.rate(W["rows_discarded"], "worker", ALL_WORKERS), "{{worker}} rows discarded"),
                    PanelQuery(q.rate(W["preemptions"], "worker", ALL_WORKERS), "{{worker}} preemptions"),
                ),
                "ops",
            ),
            Panel(
                "Drafted tokens",
                (
                    PanelQuery(q.rate(W["draft_tokens"], "worker", ALL_WORKERS), "{{worker}} verified"),
                    PanelQuery(q.rate(W["draft_tokens_accepted"], "worker", ALL_WORKERS), "{{worker}} accepted"),
                    PanelQuery(q.rate(W["draft_read_ahead"], "worker", ALL_WORKERS), "{{worker}} read ahead"),
                ),
                "ops",
                about="Where worker.speculation is on.",
            ),
            Panel(
                "Drafts",
                (
                    PanelQuery(q.rate(W["drafts"], "worker", ALL_WORKERS), "{{worker}} drafts verified"),
                    PanelQuery(
                        q.rate(W["draft_seconds"], "worker", ALL_WORKERS), "{{worker}} seconds spent on drafts"
                    ),
                ),
                "ops",
            ),
            Panel(
                "Speed-up by drafts",
                (PanelQuery(q.of_arms(W["speculation_tokens"], W["speculation_seconds"]), "{{worker}}"),),
                "short",
                about="Tokens per second over those of the steps that draft nothing (speculation_control_share).",
            ),
            Panel(
                "Tokens a step",
                (
                    PanelQuery(
                        f"1 + {q.rate(W['draft_tokens_accepted'], 'worker', ALL_WORKERS)} / "
                        f"{q.rate(W['sequence_steps'], 'worker', ALL_WORKERS)}",
                        "{{worker}}",
                    ),
                    PanelQuery(
                        f"{q.rate(W['draft_tokens_accepted'], 'worker', ALL_WORKERS)} / "
                        f"{q.rate(W['drafts'], 'worker', ALL_WORKERS)}",
                        "{{worker}} accepted of a draft",
                    ),
                ),
                "short",
                about="Of each sequence, where worker.speculation is on.",
            ),
            Panel(
                "Acceptance by position in the draft",
                (PanelQuery(q.share(W["draft_stood"], W["draft_judged"], "position"), "{{position}}"),),
                "percentunit",
                most=1,
            ),
            Panel(
                "Rows of experts by rank",
                (
                    PanelQuery(q.rate(W["expert_rows"], "worker, rank", ALL_WORKERS), "{{worker}} rank {{rank}}"),
                    PanelQuery(q.level(W["expert_imbalance"], "worker", ALL_WORKERS), "{{worker}} imbalance"),
                ),
                "ops",
                about="Where ranks have experts of their own (worker.ep, or tp of a model with experts).",
            ),
            Panel(
                "Copies of busy experts",
                (
                    PanelQuery(q.level(W["expert_copies"], "worker", ALL_WORKERS), "{{worker}} copies"),
                    PanelQuery(q.rate(W["expert_moves"], "worker", ALL_WORKERS), "{{worker}} moves/s"),
                    PanelQuery(
                        q.level(W["expert_rank_imbalance"], "worker, placement", ALL_WORKERS),
                        "{{worker}} imbalance {{placement}}",
                    ),
                ),
                "short",
                about="With worker.expert_replicas: how uneven ranks are with copies (placed) and without (home).",
            ),
            Panel(
                "Power of hosts",
                (
                    PanelQuery(
                        f"max by (host, source) (rate({W['energy'].series}[{q.WINDOW}]))", "{{host}} {{source}}"
                    ),
                ),
                "watt",
                about="Where the platform tells; each host once.",
            ),
            Panel(
                "Certificates: time left",
                (
                    PanelQuery(
                        f"{q.level(W['certificate'], 'worker', ALL_WORKERS, how='min')} - time()", "{{worker}}"
                    ),
                    PanelQuery(f"{q.level(R['certificate'], 'kind', how='min')} - time()", "router, {{kind}}"),
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
                (PanelQuery(q.level(W["cache_usage"], "worker", ALL_WORKERS), "{{worker}}"),),
                "percentunit",
                most=1,
            ),
            Panel("Pages", (PanelQuery(q.level(W["pages"], "role, state"), "{{role}} {{state}}"),), stacked=True),
            Panel(
                "Prefix hits",
                (
                    PanelQuery(q.share(R["cached_tokens"], R["prompt_tokens"]), "seen"),
                    PanelQuery(q.share(R["best_cached_tokens"], R["prompt_tokens"]), "best possible"),
                    PanelQuery(q.share(W["prefix_hits"], W["prefix_queries"], "role"), "{{role}} caches"),
                ),
                "percentunit",
                most=1,
            ),
            Panel(
                "Shipped, by pair",
                (PanelQuery(q.rate(W["pair_bytes"], "worker, peer"), "{{worker}} to {{peer}}"),),
                "Bps",
            ),
            Panel(
                "Handoffs that failed",
                (
                    PanelQuery(
                        q.rate(W["transfers"], "worker, peer, outcome", 'outcome!="ok"'),
                        "{{worker}} to {{peer}}: {{outcome}}",
                    ),
                    PanelQuery(q.rate(W["refusals"], "worker, error"), "{{worker}} refused: {{error}}"),
                ),
                "ops",
            ),
            Panel(
                "Exposed transfer",
                tuple(PanelQuery(q.quantile(p, W["transfer_seconds"]), f"p{p * 100:g}") for p in (0.5, 0.99)),
                "s",
            ),
            Panel(
                "Blocks",
                (
                    PanelQuery(q.rate(W["transfer_blocks"]), "shipped"),
                    PanelQuery(q.rate(W["fetched_blocks"]), "fetched"),
                ),
                "ops",
            ),
            Panel(
                "Bytes",
                (
                    PanelQuery(q.rate(W["transfer_bytes"]), "shipped"),
                    PanelQuery(q.rate(W["received_bytes"], "host"), "received by {{host}}"),
                    PanelQuery(q.rate(W["fetched_bytes"]), "fetched"),
                ),
                "Bps",
            ),
            Panel(
                "Lower tiers",
                (
                    PanelQuery(q.rate(W["tier_events"], "tier, event"), "{{tier}} {{event}}"),
                    PanelQuery(q.level(W["tier_blocks"], "tier"), "{{tier}} blocks"),
                ),
            ),
            Panel(
                "Ways of transport",
                (
                    PanelQuery(
                        q.level(W["links"], "worker, peer, transport"), "{{worker}} to {{peer}}: {{transport}}"
                    ),
                    PanelQuery(q.rate(W["fallbacks"], "reason"), "fallback: {{reason}}"),
                ),
                kind="table",
                width=12,
            ),
            Panel(
                "Measured speed of each pair",
                (
                    PanelQuery(
                        q.level(W["link_speed"], "worker, peer, transport"), "{{worker}} to {{peer}}: {{transport}}"
                    ),
                ),
                "Bps",
                width=6,
            ),
            Panel(
                "Leases swept",
                (PanelQuery(f"sum (increase({W['leases_swept'].series}[1h]))", "last hour"),),
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
                    PanelQuery(q.per_million_of_all(), "{{namespace}} all workers, input and output tokens"),
                    PanelQuery(
                        q.per_million("prefill", R["prompt_tokens"]), "{{namespace}} prefill workers, input tokens"
                    ),
                    PanelQuery(
                        q.per_million("decode", R["output_tokens"]), "{{namespace}} decode workers, output tokens"
                    ),
                ),
                "currencyUSD",
            ),
            Panel(
                "Dollars per hour",
                (PanelQuery(q.level(R["price"], "role", how="max"), "{{role}}"),),
                "currencyUSD",
                stacked=True,
            ),
        ),
    ),
)
