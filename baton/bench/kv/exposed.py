"""Measures how long a KV transfer lasts beyond a prompt's last chunk if chunks come at a prefill's pace.

Knows nothing of throughput's rows. The chunks are announced by a thread of their own, as by an engine process, so
that a sender that keeps the event loop busy does not slow the prefill. Two paces are used: that of a fast GPU (45k
tokens/s of 128 KB each, 5.9 GB/s) and, because no transport can hide more than its link carries, the share PACE of
the rate just measured.

Shipping layer by layer is modelled: the last chunk's bytes are announced in LAYER_GROUPS parts, evenly over the
time that it computes. A part is a share of the blocks in place of a share of the layers of all blocks.
"""

from __future__ import annotations

import asyncio
import threading
import time
from itertools import pairwise

from baton.bench.kv import setting
from baton.bench.kv.transport_bench import TransportBench
from baton.bench.rows import Row, median, paired, spread
from baton.kv.transport.auto import AUTO
from baton.prefill_worker.io.handoff import Handoff
from baton.protos.nouns import TokenRun

TOKENS_PER_S, BYTES_PER_TOKEN = 45_000, 128 << 10  # tokens a second of a fast prefill, and KV bytes of each token
PACE = 0.8  # share of what a transport carries, because none hides more than its link carries
TARGET = 1.2  # most exposed time, as a multiple of the last chunk's own way
LAYER_GROUPS = 8  # parts in which a chunk that ships layer by layer is announced


async def exposed(bench: TransportBench, name: str, bytes_per_s: float, parts: int = 1) -> float:
    """Returns the seconds from when the last chunk was due until the receiver had taken over.

    Chunks are announced at ``bytes_per_s``, the last one in ``parts`` parts; ``name`` is the transport.
    """
    chunk, count = setting.chunk_counts(bench.pages)
    handoff = bench.new_handoff(name, count)
    running = asyncio.ensure_future(handoff.run())
    every_s = chunk * bench.page_bytes / bytes_per_s
    loop = asyncio.get_running_loop()
    producing = threading.Thread(target=_produce, args=(loop, bench, handoff, every_s, parts))
    producing.start()
    report = await running
    producing.join()
    return report.exposed_s


def _produce(
    loop: asyncio.AbstractEventLoop, bench: TransportBench, handoff: Handoff, every_s: float, parts: int
) -> None:
    chunk, count = setting.chunk_counts(bench.pages)
    due, last = time.perf_counter(), count - chunk
    cuts = [last + chunk * part // parts for part in range(parts + 1)]
    for first, end in [*((at, at + chunk) for at in range(0, last, chunk)), *pairwise(cuts)]:
        due += every_s * (end - first) / chunk
        time.sleep(max(0.0, due - time.perf_counter()))
        loop.call_soon_threadsafe(handoff.ship, list(bench.blocks(range(first, end))))
    loop.call_soon_threadsafe(handoff.commit, TokenRun(0, (1,)), 0, due)


async def rows(bench: TransportBench, names: tuple[str, ...], rounds: int) -> list[Row]:
    """Returns rows of the exposed time of each transport at both paces, beside shipping one chunk alone.

    The fast pace has a target for ``auto``, which workers use, and for transports that carry that much; the others
    are judged only at a pace that they carry.
    """
    made: list[Row] = []
    for name in names:
        found = await _measured(bench, name, rounds)
        begin = f"auto ({bench.picked})" if name == AUTO else name
        shown, grouped = f"{begin}: exposed after the last chunk at", f"last chunk left in {LAYER_GROUPS} groups"
        rate, fast = median(found["rate"]), float(TOKENS_PER_S * BYTES_PER_TOKEN)
        carried = "" if rate > fast else f", {rate / 1e9:.1f} of {fast / 1e9:.1f} GB/s carried"
        judged = name == AUTO or not carried
        made += [
            _row(f"{shown} {TOKENS_PER_S} tok/s", found, "fast", TARGET * judged, carried),
            _row(f"{shown} {PACE:.0%} of what it carries", found, "own", TARGET),
            _row(f"{begin}: the same, if the {grouped} of layers (modelled)", found, "layered"),
        ]
    return made


async def _measured(bench: TransportBench, name: str, rounds: int) -> dict[str, list[float]]:
    """Returns per round the seconds of each case and, as "rate", the unpaced bytes per second; the first round
    warms up.
    """
    chunk, fast = setting.chunk_counts(bench.pages)[0], float(TOKENS_PER_S * BYTES_PER_TOKEN)
    took: dict[str, list[float]] = {"rate": [], "alone": [], "fast": [], "own": [], "layered": []}
    for number in range(rounds + 1):
        took["rate"].append(bench.pages * bench.page_bytes / await bench.handoff(name, bench.pages))
        own = PACE * median(took["rate"])
        alone = await bench.handoff(name, chunk)
        at_fast = await exposed(bench, name, fast)
        at_own = await exposed(bench, name, own)
        layered = await exposed(bench, name, own, LAYER_GROUPS)
        if number:
            for key, seconds in (("alone", alone), ("fast", at_fast), ("own", at_own), ("layered", layered)):
                took[key].append(seconds)
    return took


def _row(name: str, found: dict[str, list[float]], key: str, target: float = 0.0, note: str = "") -> Row:
    ratio = paired(found[key], found["alone"])
    peer = f"one chunk's shipping{note}"
    return Row(name, median(found[key]) * 1e3, "ms", peer, ratio, spread(found[key]), target, ceiling=True)
