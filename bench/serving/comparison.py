"""Servers turn about under the same loads, and the rows that say how they compare. Knows no engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from baton.bench.rows import Row, median, paired, spread
from bench.serving.client import Ask, ClientTimes, ServingLoad, run

REST_S = 1.0  # between two servers: what was hung up on ends, so that nobody works while another is measured
WARM, WARM_S = ServingLoad(2, 64, 8), 1.0
Found = dict[str, list[ClientTimes]]  # by server, per round


class Figure(NamedTuple):
    """Describes a figure of a load: its name and unit, whether less is better, and how it is read from what
    clients saw.
    """

    name: str
    unit: str
    less_is_better: bool
    value: Callable[[ClientTimes], float]


RATE = Figure("tokens of answers", "tok/s", False, lambda seen: seen.rate)
GAP = Figure("p99 between tokens", "ms", True, lambda seen: 1e3 * seen.gap)
FIRST = Figure("mean TTFT", "ms", True, lambda seen: 1e3 * seen.first)


def warm_up(servers: Mapping[str, Ask]) -> None:
    """Asks each server for a little, so that what is made at a first request is made."""
    for name, ask in servers.items():
        asyncio.run(run(ask, WARM, WARM_S, f"{name} warms up"))


def turn_about(servers: Mapping[str, Ask], load: ServingLoad, seconds: float, rounds: int) -> Found:
    """Returns what each server's clients saw per round."""
    found: Found = {name: [] for name in servers}
    for number in range(rounds):
        for name, ask in servers.items():
            seen = asyncio.run(run(ask, load, seconds, f"{name} {load.name} {number}"))
            time.sleep(REST_S)
            found[name].append(seen)
            print(f"{load.name}, {name}: {seen.rate:.1f} tok/s, TTFT {1e3 * seen.first:.0f} ms, "
                  f"p99 {1e3 * seen.gap:.0f} ms", flush=True)  # fmt: skip
    return found


def rows(
    load: ServingLoad, found: Found, own: str, peer: str, targets: Sequence[tuple[Figure, float]]
) -> Iterator[Row]:
    """Yields how ``own`` compares with ``peer``: a ratio says how many times better it is (0 as target: none)."""
    for figure, target in targets:
        mine, theirs = [figure.value(seen) for seen in found[own]], [figure.value(seen) for seen in found[peer]]
        ratio = paired(theirs, mine) if figure.less_is_better else paired(mine, theirs)
        shown = f"{peer}: {median(theirs):.4g} {figure.unit}"
        yield Row(
            f"{load.name}, {figure.name} ({own})", median(mine), figure.unit, shown, ratio, spread(mine), target
        )
