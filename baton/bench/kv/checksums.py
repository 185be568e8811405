"""Measures what checksums cost each side of a KV handoff, by repeating a handoff with and without one side's
checksums.

Knows nothing of throughput's rows. A round is three handoffs between the same two processes: both sides hash; the
sender looks its checksums up instead; the receiver doesn't verify. Their order rotates from round to round. A cost
is the median over rounds of the difference within one, with the interval that holds the true median in 95 of 100
runs: other work on the machine widens the interval but hardly moves the figure.

The target is for the share of the handoff's wall time. A second row shows the extra CPU time of the side's process,
as a share of the busier process's; for a side that has time to spare (shm's sender only hashes while the receiver
copies) it is larger than the share of wall time.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from baton.bench.kv import setting
from baton.bench.kv.transport_bench import TransportBench
from baton.bench.rows import Row, interval, median

TARGETS = {"shm": 0.12, "tcp": 0.12, "grpc": 0.05}
ROUNDS = 8  # for each of the other rows'
SIDES = ("sender", "receiver")


class HandoffSeconds(NamedTuple):
    """The seconds of one handoff: wall time, and the CPU time of the sending and the receiving process."""

    wall: float
    sender: float
    receiver: float


async def rows(bench: TransportBench, names: tuple[str, ...], rounds: int) -> list[Row]:
    """Returns rows of what checksums cost both sides of each transport in ``names``, by wall time and by CPU
    time.
    """
    known = setting.known_checksums(bench.memory, bench.page_bytes)
    made: list[Row] = []
    for name in names:
        await _took(bench, name)
        found = [await _round(bench, name, number, known) for number in range(ROUNDS * rounds)]
        for side in SIDES:
            made += [_by_wall(name, side, found), _by_cpu(name, side, found)]
    return made


async def _round(bench: TransportBench, name: str, number: int, known: setting.Known) -> dict[str, HandoffSeconds]:
    """Returns the seconds of three handoffs, by the side that did not hash; "" is the one in which both did."""
    kinds = ("", *SIDES)
    turned = kinds[number % 3 :] + kinds[: number % 3]
    return {without: await _without(without, bench, name, known) for without in turned}


async def _without(side: str, bench: TransportBench, name: str, known: setting.Known) -> HandoffSeconds:
    if side == "receiver":
        bench.ask("skip")
        try:
            return await _took(bench, name)
        finally:
            bench.ask("hash")
    if side == "sender":
        with setting.looked_up(known):
            return await _took(bench, name)
    return await _took(bench, name)


async def _took(bench: TransportBench, name: str) -> HandoffSeconds:
    theirs, ours = bench.receiver_cpu(), time.process_time()
    wall = await bench.handoff(name, bench.pages)
    return HandoffSeconds(wall, time.process_time() - ours, bench.receiver_cpu() - theirs)


def _by_wall(name: str, side: str, found: list[dict[str, HandoffSeconds]]) -> Row:
    shares = [1 - took[side].wall / took[""].wall for took in found]
    return _row(f"{name}: checksums at the {side}", shares, "the handoff's time", TARGETS[name])


def _by_cpu(name: str, side: str, found: list[dict[str, HandoffSeconds]]) -> Row:
    at = 1 + SIDES.index(side)
    shares = [(took[""][at] - took[side][at]) / max(took[""].sender, took[""].receiver) for took in found]
    return _row(f"{name}: checksums at the {side}, CPU time", shares, "the busier side's CPU time", 0.0)


def _row(name: str, shares: list[float], peer: str, target: float) -> Row:
    share, (low, high) = median(shares), interval(shares)
    return Row(name, share * 100, "%", peer, share, target=target, ceiling=True, low=low * 100, high=high * 100)
