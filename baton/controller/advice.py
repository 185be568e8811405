"""The SLOs that the controller decides by, and the advice and counts that come of a decision. Pure.

Knows nothing of Redis or of who reads.
"""

from __future__ import annotations

from baton.cluster.advice import Advice, RatioPoint
from baton.cluster.config import BatonConfig
from baton.controller.dial import DialAnswer
from baton.controller.ratio_decision import RatioDecision, RatioObservation
from baton.controller.replica_decision import ReplicaDecision


def slos(config: BatonConfig) -> tuple[float, float]:
    """Returns the strictest TTFT and TPOT SLOs of the context classes, in seconds; the controller's own if no class
    has one.
    """
    named = config.router.context_classes
    ttft = min((c.slo_ttft_s for c in named if c.slo_ttft_s), default=config.controller.ttft_s)
    tpot = min((c.slo_tpot_s for c in named if c.slo_tpot_s), default=config.controller.tpot_s)
    return ttft, tpot


def advice_of(
    at: float, mode: str, looked: RatioObservation, decision: RatioDecision, dialled: DialAnswer | None
) -> Advice:
    """Returns the advice of one look at the cluster; ``at`` is in Unix seconds.

    Goodput by ratio is left out if advice is withheld, or ``dialled`` was simulated for another number of workers.
    """
    points: tuple[RatioPoint, ...] = ()
    interval = plateau = None
    if dialled is not None and not decision.withheld and sum(dialled.best) == looked.prefill + looked.decode:
        points, interval, plateau = dialled.points, dialled.interval, dialled.plateau
    now = decision.now
    return Advice(
        at=at,
        mode=mode,
        prefill=looked.prefill,
        decode=looked.decode,
        reason=decision.reason,
        recommended=decision.best,
        interval=interval,
        plateau=plateau,
        goodput_by_ratio=points,
        pressure=None if now is None else (now.prefill, now.decode),
        twin_error=looked.twin,
        withheld=decision.withheld,
    )


def kinds_of(decision: RatioDecision, replicas: ReplicaDecision, mode: str) -> tuple[str, ...]:
    """Returns the kinds of decision to count for a look: those made in mode "auto", else "advise"; "hold" if there
    are none.
    """
    done = tuple(kind for kind in (decision.kind, replicas.kind) if kind != "hold")
    return (done if mode == "auto" else ("advise",)) if done else ("hold",)


def joined_reasons(*reasons: str) -> str:
    """Returns the reasons that aren't empty, separated by "; "."""
    return "; ".join(filter(None, reasons))
