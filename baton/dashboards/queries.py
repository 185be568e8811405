"""PromQL of the metric definitions: a name that isn't defined can't be asked for.

Knows nothing of panels or alerts.
"""

from __future__ import annotations

from baton.cluster.metering.metrics import ROUTER, Metric

WINDOW = "$__rate_interval"


def rate(metric: Metric, by: str = "", where: str = "", window: str = WINDOW) -> str:
    """Returns a query of a rate per second, added up ``by`` labels."""
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (rate({metric.series}{_where(where)}[{window}]))"


def level(metric: Metric, by: str = "", where: str = "", how: str = "sum") -> str:
    """Returns a query of a gauge now, joined ``by`` labels."""
    grouped = f" by ({by})" if by else ""
    return f"{how}{grouped} ({metric.series}{_where(where)})"


def quantile(q: float, metric: Metric, by: str = "", where: str = "", window: str = WINDOW) -> str:
    """Returns a query of a quantile of a histogram of seconds."""
    labels = f"le, {by}" if by else "le"
    buckets = f"sum by ({labels}) (rate({metric.series}_bucket{_where(where)}[{window}]))"
    return f"histogram_quantile({q}, {buckets})"


def mean(metric: Metric, by: str = "", where: str = "", window: str = WINDOW) -> str:
    """Returns a query of the mean of a histogram."""
    grouped = f" by ({by})" if by else ""
    parts = (f"sum{grouped} (rate({metric.series}_{part}{_where(where)}[{window}]))" for part in ("sum", "count"))
    return " / ".join(parts)


def attainment(by: str = "", window: str = WINDOW, slo: str = "all") -> str:
    """Returns the share of judged requests that met their SLOs."""
    met = rate(ROUTER["slo"], by, f'slo="{slo}", verdict="met"', window)
    judged = rate(ROUTER["slo"], by, f'slo="{slo}", verdict=~"met|missed"', window)
    return f"{met} / {judged}"


def goodput(by: str = "", window: str = WINDOW) -> str:
    """Requests per second that met every SLO."""
    return rate(ROUTER["slo"], by, 'slo="all", verdict="met"', window)


def per_million(role: str, tokens: Metric, window: str = WINDOW) -> str:
    """Dollars per 1M tokens of one role's workers, where there are prefill workers (``cost.money``)."""
    price, apart = (level(ROUTER["price"], where=f'role="{r}"', how="max") for r in (role, "prefill"))
    return f"({price} / 3600 / {rate(tokens, window=window)} * 1e6) and ({apart} > 0)"


def per_million_of_all(window: str = WINDOW) -> str:
    """Dollars of all workers per 1M tokens, prompts' and answers' together (``cost.money``)."""
    price = f"sum ({level(ROUTER['price'], 'role', how='max')})"
    tokens = " + ".join(rate(ROUTER[name], window=window) for name in ("prompt_tokens", "output_tokens"))
    return f"{price} / 3600 / ({tokens}) * 1e6"


def share(part: Metric, whole: Metric, by: str = "", window: str = WINDOW) -> str:
    """Returns a query of one counter's rate over another's."""
    return f"{rate(part, by, window=window)} / {rate(whole, by, window=window)}"


def of_arms(amount: Metric, seconds: Metric, window: str = WINDOW) -> str:
    """Returns a query of an amount per second with drafts over that without, by worker."""

    def pace(arm: str) -> str:
        parts = (f'sum by (worker) (rate({m.series}{{arm="{arm}"}}[{window}]))' for m in (amount, seconds))
        return "(" + " / ".join(parts) + ")"

    return f"{pace('drafts')} / {pace('control')}"


def of_ceiling(work: Metric, ceiling: Metric, window: str = WINDOW) -> str:
    """Returns a query of what workers do over what they could, by worker."""
    return f"{rate(work, 'worker', window=window)} / {level(ceiling, 'worker', how='max')}"


def _where(text: str) -> str:
    return f"{{{text}}}" if text else ""
