"""Servers turn about under the same loads, and the rows that say how they compare. Knows no engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

from baton.bench.rows import Row, median, paired, spread
from bench.serving.client import Ask, ClientTimes, ServingLoad, run

REST_S = 1.0  # between two servers: what was hung up on ends, so that nobody works while another is measured
WARM, WARM_S = ServingLoad(2, 64, 8), 1.0
Found = dict[str, list[ClientTimes]]  # by server, per round
Server = Callable[[], AbstractContextManager[Ask]]  # starts it, and stops it when it is left


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
            found[name].append(_seen(name, ask, load, seconds, number))
    return found


def one_up_at_a_time(
    servers: Mapping[str, Server], loads: Sequence[ServingLoad], seconds: float, rounds: int
) -> list[Found]:
    """Returns what each server's clients saw per round of each load.

    A server is started for its turn of a round and stopped after it, so that nothing of another one runs beside
    it. It is asked for half of ``seconds`` of each load first: memory that is touched for the first time counts in
    no figure.
    """
    found: list[Found] = [{name: [] for name in servers} for _ in loads]
    for number in range(rounds):
        for name, server in servers.items():
            with server() as ask:
                for seen, load in zip(found, loads, strict=True):
                    asyncio.run(run(ask, load, seconds / 2, f"{name} {load.name} {number} warms up"))
                    time.sleep(REST_S)
                    seen[name].append(_seen(name, ask, load, seconds, number))
    return found


def _seen(name: str, ask: Ask, load: ServingLoad, seconds: float, number: int) -> ClientTimes:
    seen = asyncio.run(run(ask, load, seconds, f"{name} {load.name} {number}"))
    time.sleep(REST_S)
    print(f"{load.name}, {name}: {seen.rate:.1f} tok/s, TTFT {1e3 * seen.first:.0f} ms, "
          f"p99 {1e3 * seen.gap:.0f} ms", flush=True)  # fmt: skip
    return seen


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
