"""The sending process of the KV benchmark: handoffs over each transport, and their bare peers, in turn, in one run.

Knows nothing of clusters. Each round measures each thing once, so that a slow moment of the machine affects all
alike; ratios are taken within a round.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict

import uvloop

from baton.bench.kv import checksums, exposed, setting
from baton.bench.kv.transport_bench import TRANSPORTS, TransportBench
from baton.bench.rows import Row, median, paired, spread
from baton.kv.transport.auto import AUTO

TARGETS = {"shm": ("memcpy", 0.6), "tcp": ("bare recv_into", 0.7), "grpc": ("best bare gRPC stream", 0.8)}
FIXED_ROUNDS = 40  # handoffs of one block, because a fixed cost of a millisecond needs many to be seen


def run(rounds: int, total_bytes: int, page_bytes: int, small_page_bytes: int) -> list[Row]:
    """Runs the transports' benchmark with both page sizes and returns its rows."""
    return uvloop.run(_run(rounds, total_bytes, page_bytes, small_page_bytes))


async def _run(rounds: int, total_bytes: int, page_bytes: int, small_page_bytes: int) -> list[Row]:
    rows: list[Row] = []
    costs: list[Row] = []
    for size, label in ((page_bytes, ""), (small_page_bytes, f", {small_page_bytes >> 10} KiB pages")):
        bench = TransportBench(size, total_bytes)
        rows += await _throughput(bench, rounds, label)
        if label:
            rows += await _fixed_cost(bench)
        else:
            rows += await exposed.rows(bench, (AUTO, *TRANSPORTS), rounds)
            costs = await checksums.rows(bench, TRANSPORTS, rounds)
        await bench.close()
    return [*rows, *costs]


async def _throughput(bench: TransportBench, rounds: int, label: str) -> list[Row]:
    took: dict[str, list[float]] = defaultdict(list)
    cpu: dict[str, list[float]] = defaultdict(list)
    for number in range(rounds + 1):  # the first warms up: page tables, TCP windows, allocators
        for name in TRANSPORTS:
            before, mine = bench.receiver_cpu(), time.process_time()
            seconds = await bench.handoff(name, bench.pages)
            cpu[name].append(max(bench.receiver_cpu() - before, time.process_time() - mine))
            took[name].append(seconds)
        took[setting.TLS].append(await bench.handoff(setting.TLS, bench.pages))
        took["memcpy"].append(bench.memcpy())
        took["bare recv_into"].append(await asyncio.to_thread(bench.bare_tcp))
        took["bare gRPC, asyncio"].append(await bench.bare_aio())
        took["bare gRPC, threads"].append(await asyncio.to_thread(bench.bare_sync))
        if not number:
            took.clear()
            cpu.clear()
    took["best bare gRPC stream"] = min(took["bare gRPC, asyncio"], took["bare gRPC, threads"], key=median)
    return _throughput_rows(took, cpu, bench.page_bytes * bench.pages, label)


def _throughput_rows(took: dict[str, list[float]], cpu: dict[str, list[float]], size: int, label: str) -> list[Row]:
    rows = []
    for name in TRANSPORTS:
        peer, target = TARGETS[name]
        ratio = paired(took[peer], took[name])
        rate = size / median(took[name]) / 1e9
        rows.append(
            Row(f"{name} handoff{label}", rate, "GB/s", peer, ratio, spread(took[name]), 0 if label else target)
        )
        busier = size / median(cpu[name]) / 1e9
        rows.append(Row(f"{name} handoff{label}, by the busier side's CPU time", busier, "GB/s"))
    with_tls, plain = took[setting.TLS], took["tcp"]
    rate = size / median(with_tls) / 1e9
    rows.append(
        Row(f"tcp handoff with TLS{label}", rate, "GB/s", "tcp handoff", paired(plain, with_tls), spread(with_tls))
    )
    peers = ("memcpy", "bare recv_into", "bare gRPC, asyncio", "bare gRPC, threads")
    return rows + [
        Row(peer + label, size / median(took[peer]) / 1e9, "GB/s", spread=spread(took[peer])) for peer in peers
    ]


async def _fixed_cost(bench: TransportBench) -> list[Row]:
    trips = [t * 1e3 for t in await bench.round_trips(FIXED_ROUNDS)]
    rows = [Row("gRPC round trip, p50", median(trips), "ms", spread=spread(trips))]
    for name in TRANSPORTS:
        took = [1e3 * await bench.handoff(name, 1) for _ in range(FIXED_ROUNDS + 5)][5:]
        above = median(took) - median(trips)
        rows.append(
            Row(f"{name} handoff of 1 block, p50 above a round trip", above, "ms", spread=spread(took), target=3.0,
                ceiling=True)
        )  # fmt: skip
    return rows
