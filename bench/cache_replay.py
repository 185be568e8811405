"""Hit rate of the real page pool on a recorded load, against an LRU written here and the best that is possible.

    .venv/bin/python -m bench.cache_replay TRACE.jsonl [--plot docs/figures/cache_replay.svg | --hints]
    .venv/bin/python -m bench.agent_trace > AGENTS.jsonl; .venv/bin/python -m bench.cache_replay AGENTS.jsonl

TRACE is Mooncake's format: one JSON object per line with ``input_length`` (tokens) and ``hash_ids`` (one per block
of 512 tokens, equal ids for equal prefixes). Only block ids are replayed, one request after the other, no KV. A
page of the pool is one such block. Hits are input tokens of leading blocks that are found. *Pressure* is how many
times larger than the cache all of the trace's blocks are.

    pool   kv.pages.pool.PagePool, which evicts what is worth least: open, seal, close
    tier   kv.tiers.slab.Slab, a lower tier as large as the pool, which hears of a request's blocks as it ends
    lru    a dict in order of last use, a request's tail older than its head; no code in common with the pool
    best   Belady's rule (drop what is needed last), which nobody can follow online: an upper bound in practice
    told   LRU that drops what is never asked for again first, which nobody can follow online either

``--hints`` replays the pool at HINTED_PRESSURE with clients who hint that a conversation goes on, rightly or not.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import heapq
import json
import random
from collections import ChainMap, defaultdict
from collections.abc import Callable, Container, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from baton.bench.rows import Row, table
from baton.kv.pages.pool import PagePool
from baton.kv.tiers.memory import host_slab
from baton.kv.tiers.slab import RECORD_BYTES
from baton.protos.nouns import EVERY_BLOCK

TRACE_BLOCK_TOKENS = 512
PAGE_BYTES = 256  # of a tier's page, because only its hash is of interest
PRESSURES = (1, 2, 4, 6, 8, 16)
HINTED_PRESSURE = 8
TARGET_SHARE = 0.9  # of the best, at a pressure up to 8
TARGET_POINTS = 0.5  # below LRU at most


class Request(NamedTuple):
    """``tokens`` of input in ``blocks``."""

    tokens: int
    blocks: tuple[int, ...]


Replay = Callable[[Sequence[Request], int], float]


def load_trace(path: Path) -> list[Request]:
    """Every request of the file, in order."""
    with path.open() as lines:
        rows = (json.loads(line) for line in lines if line.strip())
        return [Request(row["input_length"], tuple(row["hash_ids"])) for row in rows]


def hit_tokens(request: Request, leading: int) -> int:
    """Input tokens in the first ``leading`` blocks; the last block may be partial."""
    return min(leading * TRACE_BLOCK_TOKENS, request.tokens)


def pool_rate(trace: Sequence[Request], capacity: int, hints: Sequence[bool] = ()) -> float:
    """Share of input tokens that a PagePool of ``capacity`` pages finds; ``hints`` says which requests have one."""
    pool, hits = PagePool(capacity, watched=False), 0
    for at, request in enumerate(trace):
        hashes = [_hash(block) for block in request.blocks]
        hashes = hashes[:capacity]  # a request larger than the cache keeps what fits
        with pool.open(hashes, len(hashes)) as lease:
            hits += hit_tokens(request, lease.held)
            lease.seal_run(lease.held, hashes[lease.held :])
            lease.hinted_blocks = EVERY_BLOCK if hints and hints[at] else 0
    pool.check()
    return hits / sum(r.tokens for r in trace)


def tier_rate(trace: Sequence[Request], capacity: int) -> float:
    """Plays the same of a lower tier, which is told of a request's blocks as they become idle, tails first."""
    slab, hits = host_slab(capacity * (PAGE_BYTES + RECORD_BYTES), PAGE_BYTES), 0
    assert slab is not None
    page = memoryview(bytes(PAGE_BYTES))
    for request in trace:
        hashes = [_hash(block) for block in request.blocks][:capacity]
        here = next((at for at, block in enumerate(hashes) if block not in slab), len(hashes))
        hits += hit_tokens(request, here)
        for block in reversed(hashes):
            slab.put(block, page)
    slab.check()
    return hits / sum(r.tokens for r in trace)


def lru_rate(trace: Sequence[Request], capacity: int) -> float:
    """Does the same by the textbook: a dict whose first key was used least recently."""
    cache: dict[int, None] = {}
    hits = 0
    for request in trace:
        hits += hit_tokens(request, _leading(request.blocks, cache))
        for block in reversed(request.blocks[:capacity]):
            cache.pop(block, None)
            cache[block] = None
        while len(cache) > capacity:
            del cache[next(iter(cache))]
    return hits / sum(r.tokens for r in trace)


def best_rate(trace: Sequence[Request], capacity: int) -> float:
    """Returns the hit rate of a cache that knows the future and evicts the block that is needed last."""
    uses: dict[int, list[int]] = defaultdict(list)
    for at, request in reversed(list(enumerate(trace))):
        for block in request.blocks:
            uses[block].append(at)
    cached: dict[int, int] = {}  # block -> its next use
    heap: list[tuple[int, int, int]] = []
    hits = 0
    for request in trace:
        hits += hit_tokens(request, _leading(request.blocks, cached))
        for place, block in enumerate(request.blocks):
            uses[block].pop()
            cached[block] = uses[block][-1] if uses[block] else len(trace)
            heapq.heappush(heap, (-cached[block], -place, block))
        while len(cached) > capacity:
            negated, _, block = heapq.heappop(heap)
            if cached.get(block) == -negated:
                del cached[block]
    return hits / sum(r.tokens for r in trace)


def told_rate(trace: Sequence[Request], capacity: int) -> float:
    """Returns the hit rate of an LRU that first drops blocks that are never asked for again."""
    last = last_uses(trace)
    live, dead, hits = dict[int, None](), dict[int, None](), 0
    for at, request in enumerate(trace):
        hits += hit_tokens(request, _leading(request.blocks, ChainMap(live, dead)))
        for block in reversed(request.blocks[:capacity]):
            live.pop(block, None)
            dead.pop(block, None)
            (live if last[block] > at else dead)[block] = None
        while len(live) + len(dead) > capacity:
            gone = dead or live
            del gone[next(iter(gone))]
    return hits / sum(r.tokens for r in trace)


def last_uses(trace: Sequence[Request]) -> dict[int, int]:
    """Returns the place of the last request that has each block."""
    return {block: at for at, request in enumerate(trace) for block in request.blocks}


def clients(trace: Sequence[Request]) -> dict[str, list[bool]]:
    """Returns which requests are hinted, by what the clients know of their conversations."""
    last, rng = last_uses(trace), random.Random(1)
    ends = [request.blocks[-1 if _is_whole(request) else -2] for request in trace]
    goes_on = [last[end] > at for at, end in enumerate(ends)]
    return {
        "right hints for all that go on": goes_on,
        "one hint in ten is wrong": [on if rng.random() < 0.9 else not on for on in goes_on],
        "right hints for half of those that go on": [on and rng.random() < 0.5 for on in goes_on],
        "hints by coin": [rng.random() < 0.5 for _ in goes_on],
    }


def _is_whole(request: Request) -> bool:
    """Returns whether the last block that a continuation shares is the request's last one."""
    return request.tokens % TRACE_BLOCK_TOKENS == 0 or len(request.blocks) < 2


def hinted_rows(trace: Sequence[Request], pressure: int = HINTED_PRESSURE) -> list[Row]:
    """Returns what the pool finds without hints and with those of each kind of clients, and what "told" finds."""
    capacity, unit = blocks_of(trace) // pressure, "% of input tokens"
    best = best_rate(trace, capacity)
    found = {"told": told_rate(trace, capacity), "no hints": pool_rate(trace, capacity)}
    found |= {name: pool_rate(trace, capacity, hints) for name, hints in clients(trace).items()}
    return [Row(name, rate * 100, unit, f"best {best * 100:.2f} %", rate / best) for name, rate in found.items()]


@functools.cache
def _hash(block: int) -> bytes:
    """A block hash as the product's: a pool samples blocks by it."""
    return hashlib.sha256(block.to_bytes(8, "little")).digest()


def _leading(blocks: Iterable[int], cache: Container[int]) -> int:
    count = 0
    for block in blocks:
        if block not in cache:
            break
        count += 1
    return count


REPLAYS: dict[str, Replay] = {"pool": pool_rate, "tier": tier_rate, "lru": lru_rate, "best": best_rate}


def blocks_of(trace: Sequence[Request]) -> int:
    """Returns how many different blocks the trace has; a cache of as many pages never evicts."""
    return len({block for request in trace for block in request.blocks})


def rates(trace: Sequence[Request], pressures: Sequence[int]) -> dict[str, list[float]]:
    """Hit rates by replay, one per pressure."""
    blocks = blocks_of(trace)
    return {name: [replay(trace, max(1, blocks // p)) for p in pressures] for name, replay in REPLAYS.items()}


def rows(path: Path, pressures: Sequence[int] = PRESSURES) -> list[Row]:
    """Ours, LRU's and the best at each pressure: how much of the best ours is, and how far below LRU's."""
    trace, unit, made = load_trace(path), "% of input tokens", list[Row]()
    found, blocks = rates(trace, pressures), blocks_of(trace)
    for place, pressure in enumerate(pressures):
        pool, tier, lru, best = (found[name][place] * 100 for name in REPLAYS)
        name = f"pressure {pressure} ({blocks // pressure:,} blocks)"
        made.append(Row(name, pool, unit, f"LRU {lru:.2f} %, best {best:.2f} %"))
        made.append(Row(f"{name}: a lower tier", tier, unit, f"LRU {lru:.2f} %"))
        target = TARGET_SHARE if pressure <= 8 else 0.0
        made.append(Row(f"{name}: share of the best (LRU {lru / best:.3f})", pool / best, "", target=target))
        made.append(Row(f"{name}: below LRU", max(0.0, lru - pool), "points", target=TARGET_POINTS, ceiling=True))
    return made


def plot(path: Path, target: Path) -> None:
    """Hit rate over pressure."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = rates(load_trace(path), PRESSURES)
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name, style in (("best", "k--"), ("lru", "C1-"), ("pool", "C0o-")):
        axes.plot(PRESSURES, [r * 100 for r in found[name]], style, label=name)
    axes.set(xscale="log", xlabel="pressure: blocks of the trace per page", ylabel="input tokens found, %")
    axes.set_xticks(PRESSURES, [str(p) for p in PRESSURES])
    axes.set_ylim(0, None)
    axes.set_title(f"Prefix cache on {path.stem}")
    axes.legend()
    figure.tight_layout()
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--hints", action="store_true")
    args = parser.parse_args()
    Console(width=120).print(table(hinted_rows(load_trace(args.trace)) if args.hints else rows(args.trace)))
    if args.plot:
        plot(args.trace, args.plot)
