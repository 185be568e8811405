"""What the controller tells of a look: advice for readers, kinds for the count; and the SLOs it looks with. Pure.

Knows nothing of Redis or of who reads.
"""

from __future__ import annotations

from baton.cluster.advice import Advice, RatioPoint
from baton.cluster.config import BatonConfig
from baton.controller.dial import DialAnswer
from baton.controller.ratio_decision import RatioDecision, RatioObservation
from baton.controller.replica_decision import ReplicaDecision


def slos(config: BatonConfig) -> tuple[float, float]:
    """Returns the strictest TTFT and TPOT of the context classes; the controller's own where none is named."""
    named = config.router.context_classes
    ttft = min((c.slo_ttft_s for c in named if c.slo_ttft_s), default=config.controller.ttft_s)
    tpot = min((c.slo_tpot_s for c in named if c.slo_tpot_s), default=config.controller.tpot_s)
    return ttft, tpot


def advice_of(
    at: float, mode: str, looked: RatioObservation, decision: RatioDecision, dialled: DialAnswer | None
) -> Advice:
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
    """Returns what came of a look, for the count: "advise" is what would have been done."""
    done = tuple(kind for kind in (decision.kind, replicas.kind) if kind != "hold")
    return (done if mode == "auto" else ("advise",)) if done else ("hold",)


def joined(*reasons: str) -> str:
    return "; ".join(filter(None, reasons))
