"""The answer to "which ratio should I run, and should I split at all": from a sweep, prices and context classes.

Knows nothing of files, consoles or plots. Every figure is of the simulated cluster on the given trace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from baton.planner.costs import WorkerCosts
from baton.planner.flight import Flight
from baton.planner.score import Score, Slo, by_class, is_good, score
from baton.planner.sweep import FULL, Flights, Ratio, Sweep
from baton.planner.traces import Trace

SECONDS_PER_HOUR = 3600.0
MATTERS = 0.01  # attainments that lie closer are decided by latency


class ClassVerdict(msgspec.Struct, frozen=True):
    """One context class, split against colocated, each within the whole mix on the same number of workers."""

    name: str
    requests: int
    split: Score
    colocated: Score
    disaggregate: bool
    reason: str


class Price(msgspec.Struct, frozen=True):
    """``per_million_good``: over output tokens of requests that met their SLOs. None where there are none."""

    per_hour: float
    per_million_input: float | None
    per_million_output: float | None
    per_million_good: float | None


class Plan(msgspec.Struct, frozen=True):
    """``met``: the wanted attainment is reached; if not, ``advice`` says the best that can be."""

    workers: int
    accelerators: int
    slo: Slo
    want: float
    met: bool
    disaggregate: bool
    chosen: Ratio
    sweep: Sweep
    classes: tuple[ClassVerdict, ...]
    price: Price | None
    advice: tuple[str, ...]
    helm: str


def plan(
    found: Sweep,
    flights: Flights,
    trace: Trace,
    slo: Slo,
    want: float,
    classes: Mapping[str, int],
    costs: tuple[WorkerCosts, WorkerCosts],
    price_per_accelerator_hour: float | None = None,
) -> Plan:
    """Choose between the best split and colocated, class by class and for all."""
    verdicts = _verdicts(found, flights, trace, slo, classes)
    split = _better(found.best.score, found.colocated.score)
    chosen = found.best if split else found.colocated
    accelerators = chosen.prefill * costs[0].accelerators + chosen.decode * costs[1].accelerators
    served = flights[chosen.prefill, chosen.decode]
    return Plan(
        workers=chosen.prefill + chosen.decode,
        accelerators=accelerators,
        slo=slo,
        want=want,
        met=chosen.score.attainment >= want,
        disaggregate=split,
        chosen=chosen,
        sweep=found,
        classes=verdicts,
        price=_price(served, slo, trace, accelerators, price_per_accelerator_hour),
        advice=tuple(_advice(found, chosen, slo, want)),
        helm=helm_values(chosen),
    )


def _better(split: Score, colocated: Score) -> bool:
    if abs(split.attainment - colocated.attainment) > MATTERS:
        return split.attainment > colocated.attainment
    return split.latency.mean < colocated.latency.mean


def _verdicts(
    found: Sweep, flights: Flights, trace: Trace, slo: Slo, classes: Mapping[str, int]
) -> tuple[ClassVerdict, ...]:
    best, workers = found.best, found.colocated.decode
    split = by_class(flights[best.prefill, best.decode], classes)
    together = by_class(flights[0, workers], classes)
    return tuple(
        _verdict(name, score(split[name], slo, trace.duration), score(together[name], slo, trace.duration))
        for name in classes
        if split[name]
    )


def _verdict(name: str, split: Score, colocated: Score) -> ClassVerdict:
    yes = _better(split, colocated)
    if abs(split.attainment - colocated.attainment) > MATTERS:
        reason = f"SLOs met by {split.attainment:.1%} split, {colocated.attainment:.1%} colocated"
    else:
        reason = (
            f"SLOs met alike; mean latency {split.latency.mean:.2f} s split, {colocated.latency.mean:.2f} s"
            f" colocated (TPOT p99 {split.tpot.p99 * 1e3:.0f} and {colocated.tpot.p99 * 1e3:.0f} ms)"
        )
    return ClassVerdict(name, split.requests, split, colocated, yes, reason)


def _price(
    flights: Sequence[Flight], slo: Slo, trace: Trace, accelerators: int, per_hour: float | None
) -> Price | None:
    if per_hour is None:
        return None
    spent = per_hour * accelerators * trace.duration / SECONDS_PER_HOUR
    served = [f for f in flights if not f.refused]
    good = sum(f.outputs for f in served if is_good(f, slo))
    return Price(
        per_hour * accelerators,
        _per_million(spent, sum(f.prompt for f in served)),
        _per_million(spent, sum(f.outputs for f in served)),
        _per_million(spent, good),
    )


def _per_million(spent: float, tokens: int) -> float | None:
    return spent / tokens * 1e6 if tokens else None


def _advice(found: Sweep, chosen: Ratio, slo: Slo, want: float) -> list[str]:
    lines = []
    s = chosen.score
    if s.attainment < want:
        lines.append(
            f"no ratio of these workers meets the SLOs for {want:.0%}: {chosen.name} reaches {s.attainment:.1%};"
            f" allow TTFT {s.ttft.p99:.2f} s and TPOT {s.tpot.p99 * 1e3:.0f} ms (its p99), or add workers"
        )
    low, high = found.plateau
    workers = found.colocated.decode
    lines.append(f"plateau {low}P{workers - low}D to {high}P{workers - high}D: within 2% of the best goodput")
    lines += [
        f"cliff ({c.side}) at {c.prefill}P{c.decode}D, {c.lost:.1%} less goodput: {c.reason}" for c in found.cliffs
    ]
    lines.append(f"what would change the answer: {_turning_point(chosen)}")
    return lines


def _turning_point(chosen: Ratio) -> str:
    """What is short, or how much more load would make something short."""
    s = chosen.score
    if s.late_first > s.late_tokens:
        return "more reuse or shorter prompts move it to fewer prefill workers"
    if s.late_tokens:
        return "shorter answers or a looser TPOT move it to more prefill workers"
    shares = {
        "prefill workers' time": chosen.prefill_busy,
        "decode workers' pages": chosen.decode_pages,
        "decode workers' seats": chosen.decode_seats,
    }
    fullest = max(shares, key=lambda name: shares[name])
    if not shares[fullest]:
        return "nothing near this load: next to nothing of these workers is used"
    more = max(1.0, FULL / shares[fullest])
    return f"about {more:.1f} times this load takes {FULL:.0%} of {fullest} ({shares[fullest]:.0%} now)"


def helm_values(ratio: Ratio) -> str:
    """Values for the chart."""
    if not ratio.prefill:
        return f"cluster:\n  colocated: true\ndecode:\n  replicas: {ratio.decode}\nprefill:\n  replicas: 0\n"
    return (
        f"cluster:\n  colocated: false\nprefill:\n  replicas: {ratio.prefill}\n"
        f"decode:\n  replicas: {ratio.decode}\n"
    )
