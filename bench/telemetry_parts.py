"""Measures what telemetry takes of a router's CPU, by part: microseconds per request, each part as the router
calls it.

    .venv/bin/python -m bench.telemetry_parts [--requests 3000] [--tokens 1000] [--repeats 3]

One process, no network: each request is metered with three pieces, recorded, and passes the gauges; answers are
folded every ``A_LOOK`` requests as for a dashboard, and lines of the trace written every ``A_WRITE``. Shown is the
least of the repeats, once with the code and its data hot, and once with the caches swept by 8 MB before each part,
as the rest of a request does it. ``bench.telemetry_overhead`` has whole clusters; this says where the time goes.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
from prometheus_client import CollectorRegistry
from rich.console import Console
from rich.table import Table

from baton.cluster.config import RouterConfig
from baton.cluster.metering.telemetry import RouterMetrics
from baton.cluster.prefix_index import truncated
from baton.kv.layout.prefix import block_hashes
from baton.protos.nouns import Sampling
from baton.router.answer.generation import Generation, GenerationOptions
from baton.router.answer.metering import TallyMetering
from baton.router.compose.surfaces import make_metering
from baton.router.observe.live import LiveStats
from baton.router.request.environment import Environment
from baton.router.request.request import ChoiceStream, ChoiceSummary
from baton.router.text.catalog import ModelEntry

PIECES = (1, 7, 8)  # tokens
STATIONS = ("queue", "ttft", "prefill_queue", "prefill", "transfer", "first_decode", "decode")
A_LOOK, A_WRITE = 230, 57  # requests, where some 230 come in a second
SWEPT_BYTES = 8 << 20
ENTRY = ModelEntry("a-model", 1 << 20, 32000, (1,))
PARTS = {
    "begin": "a meter for the answer",
    "way": "gauges and counters on its way",
    "pieces": "its pieces' times",
    "end": "its end, and what its line in the trace is made of",
    "line": "the line",
    "fold": "its share of folding, of what an endless cache would have held too",
}


class Clock:
    """Sums time by part: as a context manager, for the part that was named last.

    ``cold`` sweeps the caches before each.
    """

    def __init__(self, cold: bool) -> None:
        self.spent = Counter[str]()
        self._junk = np.zeros(SWEPT_BYTES // 8, np.int64) if cold else None
        self._name, self._began = "", 0

    def part(self, name: str) -> Clock:
        """Names the part to which the next block's time counts; returns this clock."""
        if self._junk is not None:
            self._junk += 1
        self._name = name
        return self

    def __enter__(self) -> None:
        self._began = time.perf_counter_ns()

    def __exit__(self, *_: object) -> None:
        self.spent[self._name] += time.perf_counter_ns() - self._began


def made(folder: Path) -> TallyMetering:
    """Returns what a router measures with."""
    config, metrics = RouterConfig(trace_file=str(folder / "trace.jsonl")), RouterMetrics(CollectorRegistry())
    metering = make_metering(config, metrics, LiveStats(time.monotonic, metrics.asked.now), Environment())
    assert isinstance(metering, TallyMetering)
    return metering


def one(metering: TallyMetering, clock: Clock, rng: random.Random, tokens: int) -> None:
    """A request, from its opening to its end."""
    prompt = tuple(rng.randrange(3, 32000) for _ in range(tokens))
    chain = truncated(block_hashes(b"root", prompt))
    stream = ChoiceStream(0, ChoiceSummary(tokens, context_class="short", stations={}))
    generation = Generation(
        rng.randbytes(16).hex(), ENTRY, GenerationOptions({}), (prompt,), (Sampling(),), time.monotonic()
    )
    summary, metrics = stream.summary, metering.tallies.metrics
    with clock.part("begin"):
        (meter,) = metering.meters(generation, [stream], 0)
    with clock.part("way"):
        summary.chain = chain
        with metrics.sum("queued", ENTRY.model_id, "short"):
            pass
        metrics.sum("decisions", "prefill", "prefill-0").added += 1
        with metrics.sum("running", ENTRY.model_id, "short"):
            pass
    summary.stations |= {name: rng.random() / 50 for name in STATIONS}
    for piece in PIECES:
        with clock.part("pieces"):
            meter.took(piece)
    with clock.part("end"):
        meter.ended("length")


async def measured(requests: int, tokens: int, cold: bool) -> dict[str, float]:
    """Microseconds per request, by part. Under a loop, as lines are written together there."""
    clock, rng = Clock(cold), random.Random(1)
    with tempfile.TemporaryDirectory(prefix="bt-") as folder:
        metering = made(Path(folder))
        assert metering.tallies.recorder is not None
        for number in range(1, requests + 1):
            one(metering, clock, rng, tokens)
            if number % A_WRITE == 0:
                with clock.part("line"):
                    metering.tallies.recorder.write()
            if number % A_LOOK == 0:
                with clock.part("fold"):
                    metering.tallies.metrics.asked.now()
        metering.tallies.recorder.close()
    return {name: clock.spent[name] / 1e3 / requests for name in PARTS}


def least(requests: int, tokens: int, repeats: int, cold: bool) -> dict[str, float]:
    """Returns the least of ``repeats`` measurements, by part, with the garbage collector off."""
    gc.disable()
    try:
        found = [asyncio.run(measured(requests, tokens, cold)) for _ in range(repeats)]
    finally:
        gc.enable()
    return {name: min(each[name] for each in found) for name in PARTS}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--tokens", type=int, default=1000, help="of each prompt")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    hot, cold = (least(arguments.requests, arguments.tokens, arguments.repeats, c) for c in (False, True))
    table = Table("part", "hot", "cold", title="microseconds per request")
    for name, text in PARTS.items():
        table.add_row(text, f"{hot[name]:.2f}", f"{cold[name]:.2f}")
    table.add_row("together", f"{sum(hot.values()):.1f}", f"{sum(cold.values()):.1f}")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
