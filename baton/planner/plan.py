"""The answer to which prefill:decode ratio to run, and whether to disaggregate at all: from a sweep, prices and
context classes.

Knows nothing of files, consoles or plots. Every figure is of the simulated cluster on the given trace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from baton.cost.money import per_million
from baton.planner.chart_values import chart_values
from baton.planner.reach import MOST_LOAD, Headroom, headroom, least_sufficient
from baton.planner.score import Score, Slo, by_class, is_good, score, span
from baton.planner.simulator.cluster import ClusterScenario
from baton.planner.simulator.flight import Flight
from baton.planner.sweep import Flights, RatioOutcome, Sweep, at_ratio

SECONDS_PER_HOUR = 3600.0  # seconds
MATTERS = 0.01  # attainments that lie closer are decided by latency


class ClassVerdict(msgspec.Struct, frozen=True):
    """Compares one context class on the best split cluster and on a colocated one of equal size, each within the
    whole mix.
    """

    name: str
    requests: int
    split: Score
    colocated: Score
    disaggregate: bool
    reason: str


class Price(msgspec.Struct, frozen=True):
    """Holds dollars per hour of all accelerators, and dollars per 1M tokens as ``cost.money`` defines them; None:
    there are no such tokens.

    ``per_million_good``: all dollars over only the tokens of requests that met their SLOs.
    """

    per_hour: float
    per_million_input: float | None
    per_million_output: float | None
    per_million: float | None
    per_million_good: float | None


class Plan(msgspec.Struct, frozen=True):
    """Describes the chosen cluster. ``met``: it reaches the attainment ``want``; if not, ``advice`` says the least
    that would.

    ``headroom`` is None if it isn't met. ``helm`` is YAML, "" if Baton's engine can't run such workers.
    """

    workers: int
    accelerators: int
    slo: Slo
    want: float
    met: bool
    disaggregate: bool
    chosen: RatioOutcome
    sweep: Sweep
    classes: tuple[ClassVerdict, ...]
    price: Price | None
    advice: tuple[str, ...]
    headroom: Headroom | None
    helm: str


def plan(
    found: Sweep,
    flights: Flights,
    scenario: ClusterScenario,
    slo: Slo,
    want: float,
    classes: Mapping[str, int],
    price_per_accelerator_hour: float | None = None,
) -> Plan:
    """Returns the plan: the better of the best split and the colocated cluster of a sweep, for all requests and by
    class.

    ``flights`` are the sweep's simulated requests by (prefill, decode); ``scenario`` is what was swept; ``want`` is
    the attainment asked for (0 to 1); ``classes`` maps names to most prompt tokens.
    """
    verdicts = _verdicts(found, flights, slo, classes)
    chosen = chosen_of(found)
    own = at_ratio(scenario, chosen.prefill, chosen.decode)
    accelerators = chosen.prefill * own.prefill.accelerators + chosen.decode * own.decode.accelerators
    served = flights[chosen.prefill, chosen.decode]
    met = chosen.score.attainment >= want
    room = headroom(own, slo, want) if met else None
    return Plan(
        workers=chosen.prefill + chosen.decode,
        accelerators=accelerators,
        slo=slo,
        want=want,
        met=met,
        disaggregate=chosen == found.best,
        chosen=chosen,
        sweep=found,
        classes=verdicts,
        price=_price(
            served,
            slo,
            (chosen.prefill * own.prefill.accelerators, chosen.decode * own.decode.accelerators),
            price_per_accelerator_hour,
        ),
        advice=(*_missed(own, chosen, slo, want), *_advice(found, chosen, room)),
        headroom=room,
        helm=chart_values(own, met),
    )


def chosen_of(found: Sweep) -> RatioOutcome:
    """Returns the sweep's best split, or its colocated cluster if that does better."""
    return found.best if _better(found.best.score, found.colocated.score) else found.colocated


def _better(split: Score, colocated: Score) -> bool:
    if abs(split.attainment - colocated.attainment) > MATTERS:
        return split.attainment > colocated.attainment
    return split.latency.mean < colocated.latency.mean


def _verdicts(found: Sweep, flights: Flights, slo: Slo, classes: Mapping[str, int]) -> tuple[ClassVerdict, ...]:
    on_split, on_colocated = flights[found.best.prefill, found.best.decode], flights[0, found.colocated.decode]
    split, together = by_class(on_split, classes), by_class(on_colocated, classes)
    each, other = span(on_split), span(on_colocated)
    return tuple(
        _verdict(name, score(split[name], slo, each), score(together[name], slo, other))
        for name in classes
        if split[name]
    )


def _verdict(name: str, split: Score, colocated: Score) -> ClassVerdict:
    yes = _better(split, colocated)
    if split.refused == colocated.refused == split.requests:
        reason = "none of them fits a worker's KV pages"
    elif abs(split.attainment - colocated.attainment) > MATTERS:
        reason = f"SLOs met by {split.attainment:.1%} split, {colocated.attainment:.1%} colocated"
    else:
        reason = (
            f"SLOs met alike; mean latency {split.latency.mean:.2f} s split, {colocated.latency.mean:.2f} s"
            f" colocated (TPOT p99 {split.tpot.p99 * 1e3:.0f} and {colocated.tpot.p99 * 1e3:.0f} ms)"
        )
    return ClassVerdict(name, split.requests, split, colocated, yes, reason)


def _price(
    flights: Sequence[Flight], slo: Slo, accelerators: tuple[int, int], per_hour: float | None
) -> Price | None:
    """``accelerators``: of prefill and of decode workers; what they cost until the last answer ends."""
    if per_hour is None:
        return None
    prefill, decode = (per_hour * count * span(flights) / SECONDS_PER_HOUR for count in accelerators)
    served = [f for f in flights if not f.refused]
    each = per_million(prefill, decode, *_tokens(served))
    good = per_million(prefill, decode, *_tokens([f for f in served if is_good(f, slo)]))
    return Price(per_hour * sum(accelerators), each.input, each.output, each.all, good.all)


def _tokens(flights: Sequence[Flight]) -> tuple[int, int]:
    return sum(f.prompt for f in flights), sum(f.outputs for f in flights)


def _missed(scenario: ClusterScenario, chosen: RatioOutcome, slo: Slo, want: float) -> list[str]:
    """Returns sentences on the fewest workers that meet the objectives, if ``chosen`` doesn't."""
    if chosen.score.attainment >= want:
        return []
    begin = f"no ratio of these workers meets the SLOs for {want:.0%}: {chosen.name} reaches"
    begin = f"{begin} {chosen.score.attainment:.1%}"
    return [f"{begin}; {least_sufficient(scenario, slo, want, chosen.prefill + chosen.decode + 1)}"]


def _advice(found: Sweep, chosen: RatioOutcome, room: Headroom | None) -> list[str]:
    low, high = found.plateau
    workers = found.colocated.decode
    lines = [
        f"plateau {low}P{workers - low}D to {high}P{workers - high}D: at most 2% fewer good requests than the best"
    ]
    lines += [
        f"cliff ({c.side}) at {c.prefill}P{c.decode}D, {c.lost:.1%} fewer good requests: {c.reason}"
        for c in found.cliffs
    ]
    return [*lines, f"what would change the answer: {_turning_point(chosen, room)}"]


def _turning_point(chosen: RatioOutcome, room: Headroom | None) -> str:
    """Returns in words what is short, or the simulated load at which something is."""
    s = chosen.score
    if room is None:
        if s.refused >= s.requests * max(s.late_first, s.late_tokens):
            return (
                f"workers with more memory for KV: {s.refused / s.requests:.1%} of the requests fit none of these"
            )
        first = s.late_first > s.late_tokens
        if not chosen.prefill:
            return "more reuse or shorter prompts" if first else "shorter answers or a looser TPOT"
        if first:
            return "more reuse or shorter prompts move it to fewer prefill workers"
        return "shorter answers or a looser TPOT move it to more prefill workers"
    held = f"{room.load:.3g} times this load is still met by {room.attainment:.1%}"
    if room.over is None and room.load >= MOST_LOAD:
        return f"{held}; more was not tried"
    if room.over is None:
        return f"{held}; this trace is too short to show more"
    return f"{held}, {room.over:.3g} times by {room.over_attainment:.1%}: {room.reason}"
