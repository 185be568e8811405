"""Scores of a simulated run: which SLOs were met. Pure.

Knows nothing of how requests were moved. Good: every SLO met. A refused request is never good; an answer of one
token has no TPOT, so it is judged by TTFT alone and counted apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from baton.planner.figures import Distribution, distribution
from baton.planner.simulator.flight import Flight


class Slo(msgspec.Struct, frozen=True):
    """Holds the most seconds that each request may take to the first token, and per token after it."""

    ttft_s: float
    tpot_s: float


class Score(msgspec.Struct, frozen=True):
    """Holds the score of a run: shares are of all requests; times are of those served, in seconds."""

    requests: int
    good: int  # requests that met every SLO
    refused: int
    one_token: int  # answers of one token, without TPOT
    attainment: float  # share of good requests
    goodput: float  # good requests per second of the run, which lasts until its last answer ends
    late_first: float  # share with a late first token
    late_tokens: float  # share with a TPOT over the SLO
    ttft: Distribution
    tpot: Distribution
    latency: Distribution


def ttft(flight: Flight) -> float:
    """Returns the seconds from arrival to the first token."""
    return flight.first_token - flight.arrival


def tpot(flight: Flight) -> float:
    """Returns the seconds per token after the first; 0 for an answer of one token."""
    return (flight.last_token - flight.first_token) / (flight.outputs - 1) if flight.outputs > 1 else 0.0


def is_good(flight: Flight, slo: Slo) -> bool:
    """Returns whether the request was served and met every SLO."""
    return not flight.refused and ttft(flight) <= slo.ttft_s and tpot(flight) <= slo.tpot_s


def span(flights: Sequence[Flight]) -> float:
    """Returns the seconds that a finished run lasted: from its first arrival to its last one, or to the end of its
    last answer where that is later; 0 for no requests.
    """
    if not flights:
        return 0.0
    return max(max(f.arrival, f.last_token) for f in flights) - min(f.arrival for f in flights)


def score(flights: Sequence[Flight], slo: Slo, seconds: float) -> Score:
    """Returns the score of these requests of a finished run that lasted ``seconds`` (``span`` of all its
    requests).
    """
    served = [f for f in flights if not f.refused]
    good, count = sum(is_good(f, slo) for f in flights), max(1, len(flights))
    return Score(
        requests=len(flights),
        good=good,
        refused=len(flights) - len(served),
        one_token=sum(f.outputs == 1 for f in served),
        attainment=good / count,
        goodput=good / seconds if seconds else 0.0,
        late_first=sum(ttft(f) > slo.ttft_s for f in served) / count,
        late_tokens=sum(tpot(f) > slo.tpot_s for f in served) / count,
        ttft=distribution([ttft(f) for f in served]),
        tpot=distribution([tpot(f) for f in served if f.outputs > 1]),
        latency=distribution([f.last_token - f.arrival for f in served]),
    )


def by_class(flights: Sequence[Flight], classes: Mapping[str, int]) -> dict[str, list[Flight]]:
    """Returns the requests by context class: the first of ``classes`` (name -> most prompt tokens) that they fit,
    else the largest.
    """
    groups: dict[str, list[Flight]] = {name: [] for name in classes}
    limits = sorted(classes.items(), key=lambda item: item[1])
    for flight in flights:
        name = next((name for name, most in limits if flight.prompt <= most), limits[-1][0])
        groups[name].append(flight)
    return groups
