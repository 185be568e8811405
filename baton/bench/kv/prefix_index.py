"""Benchmarks look-ups in the prefix index at full size: a 128k-token prompt, 64 workers, 10^6 blocks held.

Each worker holds a different length of the prompt's chain (the binary search is at its longest); "nobody" asks for
a prompt that no worker has seen. It runs a private Redis server.
"""

from __future__ import annotations

import hashlib
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import uvloop
from redis.asyncio import Redis

from baton.bench.rows import Row, median, spread
from baton.cluster.membership import connect
from baton.cluster.prefix_index import PrefixIndex, PrefixPublisher
from baton.kv.layout import prefix
from baton.launch.redis_server import RedisServer, find_server

# Workers, blocks of the prompt that is looked up, and blocks held by all workers together.
WORKERS, BLOCKS, HELD = 64, 8192, 1_000_000
TARGET_MS = 2.0  # most milliseconds of one look-up, because every request waits for it


def rows(questions: int = 300) -> list[Row]:
    """Returns rows of the look-up's time with all workers holding some blocks and with none, beside a bare round
    trip.

    ``questions`` look-ups are measured of each.
    """
    with tempfile.TemporaryDirectory(prefix="bi-") as folder:
        server = RedisServer(Path(folder)).start()
        try:
            return [*uvloop.run(_measure(server.url, questions)), _hashing()]
        finally:
            server.stop()


async def _measure(url: str, questions: int) -> list[Row]:
    redis = connect(url)
    try:
        chain = [hashlib.sha256(i.to_bytes(4, "little")).digest() for i in range(BLOCKS)]
        held = await _fill(redis, chain, random.Random(64))
        index, names = PrefixIndex(redis, "bench"), list(held)
        assert await index.longest(names, chain) == held, "the index gave a wrong answer"
        some = [await _timed(index, names, chain) for _ in range(questions)]
        none = [await _timed(index, names, chain[::-1]) for _ in range(questions)]
        bare = [await _ping(redis) for _ in range(questions)]
    finally:
        await redis.aclose()
    return [
        Row(
            f"index look-up p50 ({find_server().name})",
            median(some) * 1e3,
            "ms",
            spread=_middle_half(some),
            target=TARGET_MS,
            ceiling=True,
        ),
        Row("index look-up p99", sorted(some)[len(some) * 99 // 100] * 1e3, "ms"),
        Row("index look-up p50, nobody holds it", median(none) * 1e3, "ms", spread=_middle_half(none)),
        Row("bare round trip to the index p50", median(bare) * 1e3, "ms", spread=_middle_half(bare)),
    ]


def _middle_half(times: Sequence[float]) -> float:
    """Returns the spread of the middle half of ``times``."""
    quarter = len(times) // 4
    return spread(sorted(times)[quarter : len(times) - quarter])


async def _fill(redis: Redis, chain: Sequence[bytes], rng: random.Random) -> dict[str, int]:
    """Publishes HELD blocks, shared out among the workers; returns how many of the chain's blocks each worker
    holds.
    """
    held = {f"w{i}": rng.randrange(1, BLOCKS) for i in range(WORKERS)}
    for name, blocks in held.items():
        publisher = PrefixPublisher(redis, "bench", name, "i", ttl_s=600)
        publisher.publish([*chain[:blocks], *(rng.randbytes(32) for _ in range(HELD // WORKERS - blocks))], [])
        await publisher.flush()
    return held


async def _timed(index: PrefixIndex, names: Sequence[str], chain: Sequence[bytes]) -> float:
    began = time.perf_counter()
    await index.longest(names, chain)
    return time.perf_counter() - began


async def _ping(redis: Redis) -> float:
    began = time.perf_counter()
    await redis.ping()
    return time.perf_counter() - began


def _hashing() -> Row:
    """Returns the row of hashing the prompt's block chain."""
    tokens, root, times = list(range(16 * BLOCKS)), prefix.root("f", "bf16"), []
    for _ in range(5):
        began = time.perf_counter()
        prefix.block_hashes(root, tokens)
        times.append(time.perf_counter() - began)
    return Row(f"hashing {16 * BLOCKS:,} tokens", median(times) * 1e3, "ms", spread=spread(times))
