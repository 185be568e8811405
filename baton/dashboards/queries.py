"""PromQL queries over the metric definitions, so that no query can name an undefined metric.

Knows nothing of panels or alerts.
"""

from __future__ import annotations

from baton.cluster.metering.metrics import ROUTER, Metric

WINDOW = "$__rate_interval"
# Labels that tell clusters on one Prometheus apart, because it gives them to all series of a cluster's routers.
CLUSTER = "namespace, job"


def rate(metric: Metric, by: str = "", where: str = "", window: str = WINDOW) -> str:
    """Returns the query of a counter's rate per second, summed by the labels ``by`` over series that match
    ``where``.
    """
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (rate({metric.series}{_where(where)}[{window}]))"


def grew(metric: Metric, where: str = "", window: str = WINDOW) -> str:
    """Returns the query of the series of a counter that grew within ``window``. One that appears counts as well: a
    label's counter is exported from its first event on, so it begins at 1.
    """
    series = f"{metric.series}{_where(where)}"
    return f"increase({series}[{window}]) > 0 or ({series} unless {series} offset {window}) > 0"


def level(metric: Metric, by: str = "", where: str = "", how: str = "sum") -> str:
    """Returns the query of a gauge's present value, aggregated by ``how`` over the labels ``by``."""
    grouped = f" by ({by})" if by else ""
    return f"{how}{grouped} ({metric.series}{_where(where)})"


def quantile(q: float, metric: Metric, by: str = "", where: str = "", window: str = WINDOW) -> str:
    """Returns the query of the quantile ``q`` (0 to 1) of a histogram."""
    labels = f"le, {by}" if by else "le"
    buckets = f"sum by ({labels}) (rate({metric.series}_bucket{_where(where)}[{window}]))"
    return f"histogram_quantile({q}, {buckets})"


def mean(metric: Metric, by: str = "", where: str = "", window: str = WINDOW) -> str:
    """Returns the query of a histogram's mean."""
    grouped = f" by ({by})" if by else ""
    parts = (f"sum{grouped} (rate({metric.series}_{part}{_where(where)}[{window}]))" for part in ("sum", "count"))
    return " / ".join(parts)


def attainment(by: str = "", window: str = WINDOW, slo: str = "all") -> str:
    """Returns the query of the share of judged requests that met their SLOs; ``slo`` is all, ttft or tpot."""
    met = rate(ROUTER["slo"], by, f'slo="{slo}", verdict="met"', window)
    judged = rate(ROUTER["slo"], by, f'slo="{slo}", verdict=~"met|missed"', window)
    return f"{met} / {judged}"


def goodput(by: str = "", window: str = WINDOW) -> str:
    """Returns the query of requests per second that met every SLO."""
    return rate(ROUTER["slo"], by, 'slo="all", verdict="met"', window)


def per_million(role: str, tokens: Metric, window: str = WINDOW) -> str:
    """Returns the query, by cluster, of one role's dollars per 1M ``tokens``; without prefill workers it is empty
    (see ``cost.money``).
    """
    price, apart = (level(ROUTER["price"], CLUSTER, f'role="{r}"', how="max") for r in (role, "prefill"))
    return f"({price} / 3600 / {rate(tokens, CLUSTER, window=window)} * 1e6) and ({apart} > 0)"


def per_million_of_all(window: str = WINDOW) -> str:
    """Returns the query, by cluster, of all workers' dollars per 1M tokens, input and output together (see
    ``cost.money``).
    """
    price = f"sum by ({CLUSTER}) ({level(ROUTER['price'], f'{CLUSTER}, role', how='max')})"
    tokens = " + ".join(rate(ROUTER[name], CLUSTER, window=window) for name in ("prompt_tokens", "output_tokens"))
    return f"{price} / 3600 / ({tokens}) * 1e6"


def share(part: Metric, whole: Metric, by: str = "", window: str = WINDOW) -> str:
    """Returns the query of one counter's rate divided by another's."""
    return f"{rate(part, by, window=window)} / {rate(whole, by, window=window)}"


def of_arms(amount: Metric, seconds: Metric, window: str = WINDOW) -> str:
    """Returns the query, by worker, of ``amount`` per second with drafts divided by that without (label
    ``arm``).
    """

    def pace(arm: str) -> str:
        parts = (f'sum by (worker) (rate({m.series}{{arm="{arm}"}}[{window}]))' for m in (amount, seconds))
        return "(" + " / ".join(parts) + ")"

    return f"{pace('drafts')} / {pace('control')}"


def of_ceiling(work: Metric, ceiling: Metric, window: str = WINDOW) -> str:
    """Returns the query, by worker, of the rate of ``work`` divided by its measured maximum."""
    return f"{rate(work, 'worker', window=window)} / {level(ceiling, 'worker', how='max')}"


def _where(text: str) -> str:
    return f"{{{text}}}" if text else ""
