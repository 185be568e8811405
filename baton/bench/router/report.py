"""Runs the router's benchmark and shows the results as a table and, on request, as JSON.

Knows nothing of measuring.
"""

from __future__ import annotations

from collections.abc import Iterator

import uvloop
from rich.console import Console

from baton.bench import rows
from baton.bench.router import measure
from baton.bench.router.cluster import BenchCluster
from baton.process.output_files import require_place, write_file

FIGURES = ("ttft", "throughput", "cpu", "cpu-long", "memory", "overload")


def show(figures: tuple[str, ...], rounds: int, requests: int, seconds: float, json_file: str | None) -> int:
    """Measures the named ``figures`` (of FIGURES), prints a table and writes ``json_file`` if given; returns exit
    status 0.
    """
    require_place(json_file)
    console = Console(highlight=False, width=130)
    found = list(run(figures, rounds, requests, seconds, console))
    console.print(rows.table(found))
    if json_file:
        write_file(json_file, rows.to_json(found).encode() + b"\n")
    return 0


def run(
    figures: tuple[str, ...], rounds: int, requests: int, seconds: float, console: Console
) -> Iterator[rows.Row]:
    """Yields the rows of the named ``figures`` as they are measured."""
    say = console.print
    with BenchCluster(decode=1) as cluster:
        if "ttft" in figures:
            yield from uvloop.run(measure.overhead(cluster, 100 * rounds))
        if "cpu" in figures:
            yield uvloop.run(measure.cpu_per_request(cluster, rounds, 100, long=False))
        if "throughput" in figures:
            yield from uvloop.run(measure.throughput(cluster, rounds, 512))
        if "cpu-long" in figures:
            yield uvloop.run(measure.cpu_per_request(cluster, rounds, 4, long=True))
        if "memory" in figures:
            yield uvloop.run(measure.memory(cluster, requests))
    if "overload" in figures:
        with BenchCluster(decode=2, prefill=1, fixed=0.02, prefill_s=5e-5, max_queue=4096) as cluster:
            yield from uvloop.run(measure.overload(cluster, seconds, say))
