"""Prediction errors: what was predicted of recent answers against what was observed of them. Pure.

Knows nothing of where either came from. Errors are of medians, so that one hiccup is no verdict, and are relative
to what was observed, or to a part of the SLO where that is more: 2 ms are no error where 2 s are allowed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median

from baton.cluster.advice import TwinError
from baton.cluster.traffic import PredictedAnswer

FLOOR = 0.05  # of the SLO


def twin_error(
    twins: Iterable[PredictedAnswer],
    ttft_s: float,
    tpot_s: float,
    bound: float,
    predicted_rate: float | None = None,
    observed_rate: float | None = None,
    predicted_tpot: Sequence[float] = (),
) -> TwinError:
    """Returns the relative errors of predicted TTFT, TPOT and rate; ``ttft_s`` and ``tpot_s`` are SLOs, rates are
    in output tokens/s.

    ``predicted_tpot`` are predictions from the load at each look; if given, they replace those made when answers
    were placed.
    """
    seen = list(twins)
    if predicted_tpot:
        expected = median(predicted_tpot)
        seen = [PredictedAnswer(t.predicted_ttft, t.ttft, expected, t.tpot) for t in seen]
    first = [(t.predicted_ttft, t.ttft) for t in seen if t.predicted_ttft is not None and t.ttft is not None]
    steps = [(t.predicted_tpot, t.tpot) for t in seen if t.predicted_tpot is not None and t.tpot is not None]
    rate = None
    if predicted_rate is not None and observed_rate:
        rate = (predicted_rate - observed_rate) / observed_rate
    return TwinError(_off(first, ttft_s), _off(steps, tpot_s), rate, bound, len(first))


def _off(pairs: Sequence[tuple[float, float]], slo_s: float) -> float | None:
    if not pairs:
        return None
    predicted, observed = median(p for p, _ in pairs), median(o for _, o in pairs)
    return (predicted - observed) / max(observed, FLOOR * slo_s)
