"""What telemetry costs: throughput of router and workers with all of it, over the same without any, in pairs.

    .venv/bin/python bench/telemetry_overhead.py [--rounds 9] [--null] [--json FILE]

Two equal clusters of real processes stand side by side, workers whose forward pass is free, so that what is
measured is all overhead. With: every metric counted, /metrics of the router and of each worker scraped every five
seconds (Prometheus' default is 15), the live figures kept, the trace recorded, and a dashboard open. Without:
telemetry.enabled is false, and nobody asks for anything. Each round loads both in turn, in changing order, and is
one ratio; the median and all of them are printed, and beside them the ratio of CPU time that the processes
took, which a busy machine disturbs less. ``--null`` compares the second with itself: what the method can't tell
apart. Needs a quiet machine. Spans are not part of it: they are off without an endpoint.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from rich.console import Console

from baton.console.kvbench.rows import Row, median, paired, spread, table
from baton.console.routerbench.cluster import PROFILE
from baton.console.routerbench.load import closed_loop, request
from baton.deploy.fleet import Fleet

TARGET = 0.98
STREAMS, TOKENS = 32, 1024
CLIENTS, REQUESTS, PROMPT, ANSWER = 16, 400, 1000, 16
SCRAPE_S = 5.0
Rate = Callable[[Fleet, int], Awaitable[float]]


def fleet(folder: Path, telemetry: bool) -> Fleet:
    """One prefill and one decode worker that compute in no time."""
    profile = folder / "free.toml"
    profile.write_text(PROFILE.format(about="a benchmark's", pages=16384, fixed=0.0, prefill=0.0, chunk=2048))
    router = {"trace_file": str(folder / "trace.jsonl")} if telemetry else {}
    return Fleet(
        cluster={"prefill": 1, "decode": 1},
        router=router,
        worker={"device": f"paced:{profile}", "max_batch": 256, "metrics": telemetry},
        telemetry={"enabled": telemetry, "prefill_dollars_per_hour": 1.0, "decode_dollars_per_hour": 1.0},
    )


@asynccontextmanager
async def watched(running: Fleet) -> AsyncIterator[None]:
    """A dashboard is open and a Prometheus scrapes, while the block runs."""
    pages = [running.url + "/metrics"]
    pages += [f"http://{running.record(slot).metrics_address}/metrics" for slot in ("prefill-0", "decode-0")]
    tasks = [asyncio.create_task(_scrape(pages)), asyncio.create_task(_dashboard(running))]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _scrape(pages: list[str]) -> None:
    while True:
        for page in pages:
            await asyncio.to_thread(lambda page=page: urllib.request.urlopen(page, timeout=5).read())
        await asyncio.sleep(SCRAPE_S)


async def _dashboard(running: Fleet) -> None:
    reader, writer = await asyncio.open_connection(running.host, running.port)
    writer.write(b"GET /v1/cluster/stream HTTP/1.1\r\nhost: b\r\n\r\n")
    with contextlib.closing(writer):
        while await reader.read(1 << 16):
            pass


async def streamed(running: Fleet, number: int) -> float:
    """Tokens per second of many long answers: what a token costs."""
    raws = [request(f"round {number} of {i}", TOKENS) for i in range(STREAMS)]
    began = time.perf_counter()
    outcomes = await closed_loop(running.host, running.port, STREAMS, raws.__getitem__, STREAMS)
    return sum(o.tokens for o in outcomes) / (time.perf_counter() - began)


async def answered(running: Fleet, number: int) -> float:
    """Requests per second of prompts that are handed over: what a request costs."""
    first = 1000 + number * REQUESTS
    raws = [request(list(range(first + i, first + i + PROMPT)), ANSWER) for i in range(REQUESTS)]
    began = time.perf_counter()
    outcomes = await closed_loop(running.host, running.port, CLIENTS, raws.__getitem__, REQUESTS)
    assert all(o.good for o in outcomes), [o.status for o in outcomes if not o.good]
    return REQUESTS / (time.perf_counter() - began)


class Side:
    """One of the two clusters: its rates, round by round, and the CPU seconds that they took."""

    def __init__(self, running: Fleet, is_watched: bool) -> None:
        self.running, self._is_watched = running, is_watched
        self.rates: list[float] = []
        self.cpu_s = 0.0

    async def measure(self, rate: Rate, number: int) -> None:
        """One round."""
        async with watched(self.running) if self._is_watched else contextlib.nullcontext():
            before = cpu_seconds(self.running)
            self.rates.append(await rate(self.running, number))
            self.cpu_s += cpu_seconds(self.running) - before


def cpu_seconds(running: Fleet) -> float:
    """Of the router and both workers' processes, so far."""
    assert running.router is not None
    records = [running.record(slot) for slot in ("prefill-0", "decode-0")]
    pids = [running.router.pid, *(r.pid for r in records), *(r.engine_pid for r in records)]
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


async def compare(
    name: str, unit: str, rate: Rate, on: Fleet, off: Fleet, rounds: int
) -> tuple[Row, list[float], float]:
    """One row, every round's ratio, and the ratio of CPU time for the same work."""
    with_it, without = Side(on, on.config.telemetry.enabled), Side(off, False)
    for side in (with_it, without):
        await rate(side.running, 0)  # connections, caches, first use
    for number in range(1, rounds + 1):
        for side in (with_it, without) if number % 2 else (without, with_it):
            await side.measure(rate, number)
    ratios = [a / b for a, b in zip(with_it.rates, without.rates, strict=True)]
    row = Row(
        name,
        median(with_it.rates),
        unit,
        peer=f"without: {median(without.rates):.4g}",
        ratio=paired(with_it.rates, without.rates),
        spread=spread(ratios),
        target=TARGET,
    )
    return row, ratios, with_it.cpu_s / max(without.cpu_s, 1e-9)


def main() -> int:
    """Print the rows; exit status 1 when one misses."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--null", action="store_true", help="without against without")
    parser.add_argument("--json", help="write the rows to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bt-") as folder:
        with fleet(Path(folder), not arguments.null) as on, fleet(Path(folder), False) as off:
            loads = (
                ("streamed tokens", "tok/s", streamed),
                ("requests, 1,000 tokens handed over", "req/s", answered),
            )
            found = [asyncio.run(compare(*load, on, off, arguments.rounds)) for load in loads]
    rows = [row for row, _, _ in found]
    Console(width=140).print(table(rows))
    for row, ratios, cpu in found:
        print(f"{row.name}: ratios {', '.join(f'{r:.3f}' for r in sorted(ratios))}; CPU time {cpu:.3f}")
    if arguments.json:
        content = [
            {"name": row.name, "with": row.value, "ratio": row.ratio, "ratios": ratios, "cpu": cpu}
            for row, ratios, cpu in found
        ]
        Path(arguments.json).write_text(json.dumps(content, indent=1) + "\n")
    return int(not all(row.reached for row in rows))


if __name__ == "__main__":
    sys.exit(main())
