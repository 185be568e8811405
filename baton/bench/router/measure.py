"""Measures what a router costs, figure by figure, in front of the paced engine, most with steps that take no time.

Knows nothing of how rows are shown. If a figure is a difference, its two terms are measured in turn.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Sequence

from baton.bench.router.cluster import BenchCluster
from baton.bench.router.direct import direct
from baton.bench.router.load import RequestOutcome, closed_loop, connected, open_loop, request
from baton.bench.rows import Row, median, spread
from baton.router.text.tokenizer import ByteTokenizer

Say = Callable[[str], None]
SLO_MS = 1000  # milliseconds to the first token within which an answer counts as good
LETTERS = "abcdefghijklmnopqrstuvwxyz     "


def text_of(tokens: int, seed: int) -> str:
    """Returns a random text of ``tokens`` letters, which the paced engine's byte tokenizer makes as many tokens."""
    return "".join(random.Random(seed).choices(LETTERS, k=tokens))


def quantile(values: Sequence[float], q: float) -> float:
    """Returns the value of ``values`` below which a share ``q`` of them lies."""
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]


async def overhead(cluster: BenchCluster, requests: int) -> list[Row]:
    """Measures how much the router adds to the TTFT of a 1k-token prompt, unloaded, at p50 and p99; returns the
    rows.
    """
    through: list[float] = []
    alone: list[float] = []
    async with direct(cluster.worker_address) as worker, connected(cluster.host, cluster.port) as ask:
        for number in range(-5, requests):
            outcome = await ask(request(text_of(1024, 2 * number), 2))
            own = await worker.ttft([256 + byte for byte in text_of(1024, 2 * number + 1).encode()], 2)
            if number >= 0:
                through.append(outcome.ttft_s * 1000)
                alone.append(own * 1000)
    rows = []
    for name, q, target in (("p50", 0.5, 5.0), ("p99", 0.99, 12.0)):
        added = quantile(through, q) - quantile(alone, q)
        rows.append(Row(f"TTFT added, {name}", added, "ms", spread=spread(through), target=target, ceiling=True))
    return rows


async def throughput(cluster: BenchCluster, rounds: int, tokens: int, streams: int = 64) -> list[Row]:
    """Measures streamed tokens per second, per second of the router's CPU time, and per event; returns the rows.

    ``streams`` answers of ``tokens`` tokens are streamed at once, ``rounds`` times.
    """
    rates: list[float] = []
    per_cpu: list[float] = []
    merged: list[float] = []
    for number in range(rounds):
        cpu, began = cluster.cpu_seconds(), time.perf_counter()
        raws = [request(f"round {number} of {i}", tokens) for i in range(streams)]
        outcomes = await closed_loop(cluster.host, cluster.port, streams, raws.__getitem__, streams)
        done = sum(o.tokens for o in outcomes)
        rates.append(done / (time.perf_counter() - began))
        merged.append(done / sum(o.events for o in outcomes))
        per_cpu.append(done / max(1e-3, cluster.cpu_seconds() - cpu))
    return [
        Row("streamed, one router, this machine", median(rates), "tok/s", spread=spread(rates), target=25_000),
        Row("streamed, per CPU second of the router", median(per_cpu), "tok/s", spread=spread(per_cpu)),
        Row("streamed, tokens in one event", median(merged), "tok", spread=spread(merged)),
    ]


async def cpu_per_request(cluster: BenchCluster, rounds: int, each: int, long: bool) -> Row:
    """Returns the row of the router's CPU milliseconds per request, for long or short prompts.

    Those of ``long`` prompts don't include tokenizing. ``each`` requests are sent in each round.
    """
    prompt, answer, clients = (100_000, 1_000, 2) if long else (1_000, 128, 8)
    spent: list[float] = []
    for number in range(rounds):
        raws = [request(text_of(prompt, number * each + i), answer) for i in range(each)]
        before = cluster.cpu_seconds()
        outcomes = await closed_loop(cluster.host, cluster.port, clients, raws.__getitem__, each)
        assert all(o.good for o in outcomes), [o.status for o in outcomes]
        spent.append((cluster.cpu_seconds() - before) / each * 1000)
    beyond = _tokenizing_ms(prompt) if long else 0.0
    name, target = (
        ("CPU per request, 100k in / 1k out", 60.0) if long else ("CPU per request, 1k in / 128 out", 8.0)
    )
    return Row(name, median(spent) - beyond, "ms", spread=spread(spent), target=target, ceiling=True)


def _tokenizing_ms(tokens: int) -> float:
    text, tokenizer = text_of(tokens, 0), ByteTokenizer(32_000)
    began = time.process_time()
    for _ in range(3):
        tokenizer.encode(text, False)
    return (time.process_time() - began) / 3 * 1000


async def memory(cluster: BenchCluster, requests: int) -> Row:
    """Returns the row of how much the router's resident memory grows from a tenth of ``requests`` to all of
    them.
    """
    tenth = max(200, requests // 10)

    def make(number: int) -> bytes:
        return request(f"short prompt {number}", 4)

    await closed_loop(cluster.host, cluster.port, 16, make, tenth)
    before = cluster.resident_bytes()
    await closed_loop(cluster.host, cluster.port, 16, make, requests - tenth)
    grown = cluster.resident_bytes() / before - 1
    return Row(f"memory growth after {requests} requests", grown * 100, "%", target=5.0, ceiling=True)


async def overload(cluster: BenchCluster, seconds: float, say: Say) -> list[Row]:
    """Measures goodput (first token within SLO_MS) at several loads; returns rows for 2 and 5 times the cluster's
    capacity.

    Each load lasts ``seconds``; a row's ratio is its goodput over the peak.
    """
    headers = f"x-slo-ttft-ms: {SLO_MS}\r\n"

    serial = itertools.count(1)

    def make(_: int, headers: str = headers) -> bytes:
        return request([next(serial) % 30_000 + 1] * 400, 32, headers)  # no prompt twice: no cache helps

    began = time.perf_counter()
    outcomes = await closed_loop(cluster.host, cluster.port, 48, lambda i: make(i, ""), 300)
    capacity = len(outcomes) / (time.perf_counter() - began)
    goodput: dict[float, float] = {}
    for load in (0.7, 0.9, 1.0, 2.0, 5.0):
        found = await open_loop(cluster.host, cluster.port, load * capacity, seconds, make)
        goodput[load] = sum(o.good and o.ttft_s <= SLO_MS / 1000 for o in found) / seconds
        say(f"  {load:g} x {capacity:.0f} requests/s: {goodput[load]:.1f} good ones a second, {_answers(found)}")
        await asyncio.sleep(1.0)
    peak = max(goodput.values())
    return [
        Row(f"goodput at {load:g}x", goodput[load], "req/s", f"peak {peak:.1f}", goodput[load] / peak, target=0.9)
        for load in (2.0, 5.0)
    ]


def _answers(found: list[RequestOutcome]) -> str:
    refused = [o.retry_after_s for o in found if o.status == 429]
    told = f"{len(refused)} refused" + (f" (come back in {median(refused):g} s)" if refused else "")
    late = sum(o.good and o.ttft_s > SLO_MS / 1000 for o in found)
    failed = sum(not o.good and o.status != 429 for o in found)
    return f"{told}, {late} late, {failed} failed"
