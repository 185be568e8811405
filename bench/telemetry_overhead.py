"""Measures what telemetry costs: throughput of router and workers with all of it, over the same without any, in
pairs.

    .venv/bin/python bench/telemetry_overhead.py [--pairs 8] [--rounds 2] [--loads streamed …] [--null]
                                                 [--json FILE]

Two equal clusters of real processes stand side by side. With: every metric counted, /metrics of the router and of
each worker scraped every five seconds (Prometheus' default is 15), the live figures kept, the trace recorded, and a
dashboard open, which gets an event a second; it is open before the clock starts. Without: telemetry.enabled is
false, and nobody asks for anything. A round is four loads of some seconds: with, without, without, with, or the
other way round, so that a machine that slows down or speeds up does so for both. It gives one ratio of throughput,
and ratios of the CPU time that a cluster's processes took, in all and each. Two clusters that are alike still
differ by a few percent for as long as they live (their engines, which telemetry doesn't touch, show it), so the
pair is made anew, and a pair counts as one: shown is the pairs' median, with the interval that holds the true one
in 95 of 100.

Two of the loads are strict: workers whose forward pass is free, so that all that is measured is overhead. The third
is the engine that operators have: the demo model on the CPU engine, one prefill and one decode worker.
``--null`` compares the second cluster with its like: what the method can't tell apart. Needs a quiet machine.
Spans are not part of it: they are off without an endpoint.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import msgspec
from rich.console import Console

from baton.bench.router.cluster import PROFILE
from baton.bench.router.load import closed_loop, request
from baton.bench.rows import Row, interval, median, spread, table
from baton.cluster.served_model import DEMO
from baton.launch.fleet import Fleet

TARGET = 0.98
SCRAPE_S = 5.0
LOAD_S = 3.0  # a load goes on for as long: several of the dashboard's events are in it, as they are in each second
TURNS = 1000  # of a load within that time
SLOTS = ("prefill-0", "decode-0")
ALL = "all"
Load = Callable[[Fleet, int], Awaitable[int]]


class Kind(NamedTuple):
    """A load, on which engine it runs, and the unit of what it does."""

    name: str
    unit: str
    engine: str
    load: Load


class Compared(msgspec.Struct):
    """One load's rounds on a pair of clusters, or all pairs: with over without.

    ``rates``: with and without. ``cpu``: of CPU time for the same work, by process and of "all".
    """

    name: str
    unit: str
    rates: tuple[float, float]
    ratios: list[float]
    cpu: dict[str, list[float]]

    @property
    def row(self) -> Row:
        """Returns the load's row of the table."""
        (with_it, without), (low, high) = self.rates, interval(self.ratios)
        return Row(
            self.name, with_it, self.unit, peer=f"without: {without:.4g}", ratio=median(self.ratios),
            spread=spread(self.ratios), target=TARGET, low=low * without, high=high * without,
        )  # fmt: skip


# ---- what is asked of a cluster ------------------------------------------------------------------------


async def streamed(running: Fleet, number: int) -> int:
    """Tokens of many long answers at once: what a token costs."""
    raws = [request(f"round {number} of {i}", 1024) for i in range(32)]
    return sum(o.tokens for o in await closed_loop(running.host, running.port, 32, raws.__getitem__, 32))


async def answered(running: Fleet, number: int) -> int:
    """Requests whose prompt of 1,000 tokens is handed over: what a request costs."""
    rng = random.Random(number)
    raws = [request([rng.randrange(3, 32000) for _ in range(1000)], 16) for _ in range(200)]
    return await _all_good(running, 16, raws)


async def written(running: Fleet, number: int) -> int:
    """Tokens of answers that a model really writes, after prompts of 300 tokens that are handed over."""
    rng = random.Random(number)
    raws = [request([rng.randrange(3, 4096) for _ in range(300)], 64) for _ in range(24)]
    return 64 * await _all_good(running, 8, raws)


async def _all_good(running: Fleet, clients: int, raws: list[bytes]) -> int:
    outcomes = await closed_loop(running.host, running.port, clients, raws.__getitem__, len(raws))
    assert all(o.good for o in outcomes), [o.status for o in outcomes if not o.good]
    return len(outcomes)


KINDS = {
    "streamed": Kind("streamed tokens, free engine", "tok/s", "free", streamed),
    "answered": Kind("requests of 1,000 tokens handed over, free engine", "req/s", "free", answered),
    "written": Kind("tokens of the demo model, CPU engine, 1P1D", "tok/s", "cpu", written),
}


# ---- the two clusters ----------------------------------------------------------------------------------


def fleet(folder: Path, telemetry: bool, engine: str = "free") -> Fleet:
    """One prefill and one decode worker, of the demo model or such as compute in no time."""
    worker: dict[str, Any] = {"device": "cpu", "model": str(DEMO)}
    if engine == "free":
        profile = folder / "free.toml"
        profile.write_text(PROFILE.format(about="a benchmark's", pages=16384, fixed=0.0, prefill=0.0, chunk=2048))
        worker = {"device": f"paced:{profile}", "max_batch": 256}
    return Fleet(
        cluster={"prefill": 1, "decode": 1},
        router={"trace_file": str(folder / "trace.jsonl")} if telemetry else {},
        worker=worker | {"metrics": telemetry},
        telemetry={"enabled": telemetry, "prefill_dollars_per_hour": 1.0, "decode_dollars_per_hour": 1.0},
    )


class Watch:
    """A Prometheus that scrapes and a dashboard that is open while a cluster is measured; else its clock stands."""

    def __init__(self, running: Fleet) -> None:
        pages = [f"http://{running.record(slot).metrics_address}/metrics" for slot in SLOTS]
        self._running, self._pages = running, [running.url + "/metrics", *pages]
        self._left = SCRAPE_S / 2

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Look on, while the block runs."""
        reader, writer = await asyncio.open_connection(self._running.host, self._running.port)
        writer.write(b"GET /v1/cluster/stream HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await reader.readuntil(b"data: ")
        tasks = [asyncio.create_task(self._scrape()), asyncio.create_task(_read_on(reader))]
        began = time.perf_counter()
        try:
            yield
        finally:
            self._left -= time.perf_counter() - began
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            writer.close()

    async def _scrape(self) -> None:
        while True:
            await asyncio.sleep(max(0.0, self._left))
            self._left += SCRAPE_S
            for page in self._pages:
                await asyncio.to_thread(_fetch, page)


def _fetch(page: str) -> bytes:
    with urllib.request.urlopen(page, timeout=5) as answer:
        return bytes(answer.read())


async def _read_on(reader: asyncio.StreamReader) -> None:
    while await reader.read(1 << 16):
        pass


class Side:
    """One of the two clusters."""

    def __init__(self, running: Fleet) -> None:
        self.running = running
        self._watch = Watch(running) if running.config.telemetry.enabled else None

    async def measure(self, load: Load, number: int) -> tuple[float, Counter[str]]:
        """Runs ``load``; returns its rate per second, and the CPU seconds that it took, by process."""
        async with self._watch.open() if self._watch else contextlib.nullcontext():
            threads, began = _threads(self.running), time.perf_counter()
            done, seconds, turn = 0, 0.0, 0
            while seconds < LOAD_S:
                done += await load(self.running, number * TURNS + turn)
                seconds, turn = time.perf_counter() - began, turn + 1
            after = _threads(self.running)
        spent = Counter[str]()
        for (process, task), ns in after.items():
            for name in (process, ALL):
                spent[name] += (ns - threads.get((process, task), 0)) / 1e9 / done  # type: ignore[assignment]
        return done / seconds, spent


def _threads(running: Fleet) -> dict[tuple[str, str], int]:
    """Nanoseconds that each thread of the router and of both workers' processes has run, by process and thread."""
    assert running.router is not None
    pids = {"router": running.router.pid}
    for record in map(running.record, SLOTS):
        pids |= {record.slot: record.pid, f"{record.slot}'s engine": record.engine_pid}
    found = {}
    for name, pid in pids.items():
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # it has ended
                found[name, task.name] = int((task / "schedstat").read_text().split()[0])
    return found


# ---- rounds --------------------------------------------------------------------------------------------


async def compare(kind: Kind, on: Fleet, off: Fleet, rounds: int) -> Compared:
    """All rounds of one load."""
    sides = Side(on), Side(off)
    for side in sides:
        await kind.load(side.running, 0)  # connections, caches, first use
    found: list[list[tuple[float, Counter[str]]]] = [[], []]
    for number in range(1, rounds + 1):
        first = number % 2
        for turn, which in enumerate((first, 1 - first, 1 - first, first)):
            found[which].append(await sides[which].measure(kind.load, 4 * number + turn // 2))
    ratios, cpu = [], dict[str, list[float]]()
    for at in range(0, 2 * rounds, 2):
        (a, b), (c, d) = found[0][at : at + 2], found[1][at : at + 2]
        ratios.append((1 / c[0] + 1 / d[0]) / (1 / a[0] + 1 / b[0]))
        for name, without_it in (c[1] + d[1]).items():
            cpu.setdefault(name, []).append((a[1] + b[1])[name] / without_it)
    with_it, without = (median([rate for rate, _ in side]) for side in found)
    return Compared(kind.name, kind.unit, (with_it, without), ratios, cpu)


def joined(pairs: list[Compared]) -> Compared:
    """One load on all pairs of clusters, each of which counts as one ratio."""
    first = pairs[0]
    with_it, without = (median(rates) for rates in zip(*(p.rates for p in pairs), strict=True))
    cpu = {name: [fmean(p.cpu[name]) for p in pairs] for name in first.cpu}
    return Compared(first.name, first.unit, (with_it, without), [fmean(p.ratios) for p in pairs], cpu)


def run(kinds: list[Kind], pairs: int, rounds: int, null: bool) -> list[Compared]:
    """Each engine's pairs of clusters, and the loads for them."""
    found: dict[Kind, list[Compared]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory(prefix="bt-") as folder:
        for number in range(pairs):
            for engine in dict.fromkeys(kind.engine for kind in kinds):
                with contextlib.ExitStack() as stack:
                    order = (True, False) if number % 2 else (False, True)
                    made = {on: stack.enter_context(fleet(Path(folder), on and not null, engine)) for on in order}
                    for kind in kinds:
                        if kind.engine == engine:
                            found[kind].append(asyncio.run(compare(kind, made[True], made[False], rounds)))
    return [joined(each) for each in found.values()]


def told(found: Compared) -> str:
    """Lines beside the table's."""
    cpu = "".join(f"\n    CPU time of {name}: {_span(ratios)}" for name, ratios in sorted(found.cpu.items()))
    return f"{found.name}: {len(found.ratios)} ratios, {_span(found.ratios)}{cpu}"


def _span(ratios: list[float]) -> str:
    low, high = interval(ratios)
    return f"{median(ratios):.3f} ({low:.3f} to {high:.3f})"


def main() -> int:
    """Prints the rows; returns exit status 1 if one misses its target."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=8, help="of clusters")
    parser.add_argument("--rounds", type=int, default=2, help="on each pair")
    parser.add_argument("--loads", nargs="*", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--null", action="store_true", help="without against without")
    parser.add_argument("--json", help="write the rows to this file")
    arguments = parser.parse_args()
    found = run([KINDS[name] for name in arguments.loads], arguments.pairs, arguments.rounds, arguments.null)
    Console(width=140).print(table([f.row for f in found]))
    for one in found:
        print(told(one))
    if arguments.json:
        rows = [msgspec.to_builtins(one) | {"row": msgspec.to_builtins(one.row)} for one in found]
        Path(arguments.json).write_text(json.dumps(rows, indent=1) + "\n")
    return int(not all(f.row.reached for f in found))


if __name__ == "__main__":
    sys.exit(main())
