"""Benchmarks the host and disk tiers: reading a prompt's blocks back against computing them, and the effect on
decoding.

The model RANDOM is a checkpoint of Qwen2.5-0.5B's shape with random weights, written to a temporary folder (1 GB;
needs transformers). Reading back takes the real path (pool, fill, tier, verification), without the channel between
the two processes. Computing is measured on the first COMPUTED tokens and scaled by length, which underestimates it,
because attention grows. The disk is read twice: from the page cache, and after its pages were dropped from it.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from baton.bench.kv import beside
from baton.bench.rows import RANDOM, Row, median, spread
from baton.engine.config import EngineConfig
from baton.engine.load import load_runner
from baton.engine.plan import Runner, SequenceStep, StepPlan
from baton.engine.steps.sharing import PageSharing
from baton.kv.exchange.filling import Filler
from baton.kv.memory.host_pages import PageMemory
from baton.kv.pages.pool import PagePool
from baton.kv.tiers.disk import HEADER_BYTES, DiskTier
from baton.kv.tiers.memory import host_slab
from baton.kv.tiers.slab import RECORD_BYTES
from baton.kv.tiers.stack import BESIDE_DECODE, Tier, Tiers
from baton.protos import channel as ch
from baton.protos.json import Json
from baton.protos.nouns import BLOCK_TOKENS, KvLayout

COMPUTED = 1024  # tokens of the prompt that are computed; the rest is scaled, because it would take minutes
HOST_TARGET, DISK_TARGET = 20.0, 5.0  # times as fast as computing that reading back from each tier should be
CHUNK = 512  # tokens of a prompt's step, as worker.prefill_chunk_tokens has it by default
WRITTEN = 128  # blocks that go down at once
SHAPE: Json = {
    "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
    "num_key_value_heads": 2, "vocab_size": 151936, "max_position_embeddings": 32768, "tie_word_embeddings": True,
}  # fmt: skip


def write_shape(folder: Path) -> Path:
    """Writes a random bfloat16 checkpoint of Qwen2.5-0.5B's shape to ``folder`` and returns that."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.set_default_dtype(torch.bfloat16)
    try:
        Qwen2ForCausalLM(Qwen2Config(**SHAPE)).save_pretrained(folder)
    finally:
        torch.set_default_dtype(torch.float32)
    return folder


# ---- computing ---------------------------------------------------------------------------------------


def compute_seconds(runner: Runner, tokens: int) -> float:
    """Returns the seconds to prefill a prompt of ``tokens`` tokens in chunks, alone."""
    pages = list(range(-(-tokens // BLOCK_TOKENS)))
    memory = PageMemory.create(len(pages), runner.spec.layout.page_bytes)
    runner.bind(memory.view(), len(pages))
    rng = random.Random(5)
    began = time.perf_counter()
    for start in range(0, tokens, CHUNK):
        prompt = [rng.randrange(runner.spec.vocab_size) for _ in range(min(CHUNK, tokens - start))]
        runner.run(StepPlan((SequenceStep(1, prompt, start, pages, None, True),)))
    return time.perf_counter() - began


# ---- lifting -----------------------------------------------------------------------------------------


class EmptyPool:
    """A page pool without cached blocks, and the filler that reads blocks into it."""

    def __init__(self, blocks: int, page_bytes: int) -> None:
        self.memory = PageMemory.create(blocks * 2, page_bytes)
        self.memory.view()[:] = bytes(
            len(self.memory.view())
        )  # touched: a fresh mapping's faults aren't the tier's
        self.empty()

    def empty(self) -> None:
        """Replaces the pool by an empty one, as if everything had been evicted."""
        self._sharing = PageSharing(PagePool(self.memory.pages))
        self.filler = Filler(self._tell, self.memory, time.perf_counter)

    def _tell(self, message: ch.ToEngine) -> None:
        match message:
            case ch.Fill():
                asyncio.get_running_loop().call_soon(self.filler.take, self._sharing.fill(message))
            case ch.Filled():
                self._sharing.filled(message)
            case _:
                raise AssertionError(f"a filler sends no {type(message).__name__}")


def chain(blocks: int) -> list[bytes]:
    """Returns ``blocks`` made-up block hashes."""
    return [hashlib.sha256(i.to_bytes(4, "little")).digest() for i in range(blocks)]


async def stored(tier: Tier, hashes: Sequence[bytes], page_bytes: int) -> float:
    """Stores a random page for each hash in ``tier``; returns the seconds that writing took."""
    rng = np.random.default_rng(3)
    pages = [memoryview(rng.bytes(page_bytes)) for _ in hashes]
    began = time.perf_counter()
    await Tiers([tier]).store(hashes, pages)
    return time.perf_counter() - began


async def lifted(tier: Tier, device: EmptyPool, hashes: Sequence[bytes], duty: float = 1.0) -> float:
    """Returns the seconds to read all blocks from ``tier`` into the emptied ``device``.

    ``duty`` is the share of the time in which the tier may copy.
    """
    device.empty()
    tiers = Tiers([tier])
    tiers.duty = duty
    report = await device.filler.load(hashes, tiers.load)
    assert report.blocks == len(hashes), "the tier did not give everything"
    return report.seconds


def drop_page_cache(folder: Path) -> None:
    """Drops the files of ``folder`` from the kernel's page cache; they must not be mapped."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


async def lift_times(layout: KvLayout, tokens: int, rounds: int, folder: Path) -> dict[str, list[float]]:
    """Returns the seconds of each round by case: host, disk, their variants, and "memcpy" of as many bytes."""
    hashes, size = chain(tokens // BLOCK_TOKENS), layout.page_bytes
    device, room = EmptyPool(len(hashes), size), len(hashes) * (size + RECORD_BYTES) + HEADER_BYTES
    slab = host_slab(room, size)
    assert slab is not None
    host, disk = Tier("host", slab), DiskTier(folder, room, layout, "bench")
    below = Tier("disk", disk.slab)
    times: dict[str, list[float]] = {n: [] for n in ("host", "host, beside decode", "disk", "disk, cold", "memcpy")}
    for tier in (host, below):
        await stored(tier, hashes, size)
    for _ in range(rounds):
        times["memcpy"].append(copied(device.memory.view(), len(hashes) * size))
        times["host"].append(await lifted(host, device, hashes))
        times["host, beside decode"].append(await lifted(host, device, hashes, BESIDE_DECODE))
        times["disk"].append(await lifted(below, device, hashes))
        below.close()
        disk.close()
        del below, disk
        drop_page_cache(folder)
        disk = DiskTier(folder, room, layout, "bench")
        below = Tier("disk", disk.slab)
        times["disk, cold"].append(await lifted(below, device, hashes))
    for closing in (host, below):
        closing.close()
    disk.close()
    return times


def copied(memory: memoryview, size: int) -> float:
    """Returns the seconds of one memcpy of ``size`` bytes from the first half of ``memory`` to the second."""
    whole = np.frombuffer(memory, np.uint8)
    began = time.perf_counter()
    np.copyto(whole[size : 2 * size], whole[:size])
    return time.perf_counter() - began


# ---- next door ---------------------------------------------------------------------------------------


async def beside_rows(layout: KvLayout, tokens: int, count: int, window_s: float) -> list[Row]:
    """Returns rows of how much a host tier slows decode steps while it reads back and while it writes.

    ``count`` pairs of windows of ``window_s`` seconds are measured; ``tokens`` is the prompt's length.
    """
    hashes, size = chain(tokens // BLOCK_TOKENS), layout.page_bytes
    slab = host_slab(len(hashes) * (size + RECORD_BYTES), size)
    assert slab is not None
    tier, device, turn = Tier("host", slab), EmptyPool(len(hashes), size), itertools.count(1)
    below = Tiers([tier])
    below.duty = BESIDE_DECODE
    pages = [device.memory.page(page) for page in range(min(WRITTEN, len(hashes)))]

    async def written() -> None:
        """Stores blocks that the tier has not seen, which evicts the oldest."""
        salt = next(turn).to_bytes(8, "little")
        await below.store([salt + block[8:] for block in hashes[: len(pages)]], pages)

    await stored(tier, hashes, size)
    with beside.neighbour() as asked:
        lifting = await beside.pairs(asked, lambda: lifted(tier, device, hashes, BESIDE_DECODE), count, window_s)
        writing = await beside.pairs(asked, written, count, window_s)
    tier.close()
    return [*beside.rows("lifting", lifting), *beside.rows("writing back", writing)]


# ---- the table ---------------------------------------------------------------------------------------


def rows(
    model: str, tokens: int = 8192, rounds: int = 5, computed: int = COMPUTED, window_s: float = 0.25
) -> list[Row]:
    """Returns rows of both tiers' times for a prompt of ``tokens`` tokens against computing it, and of their effect
    on decode steps.

    ``computed`` tokens are really computed, and scaled; ``model`` is a directory or RANDOM.
    """
    with tempfile.TemporaryDirectory(prefix="bk-") as folder:
        path = str(write_shape(Path(folder, "model"))) if model == RANDOM else model
        runner = load_runner(EngineConfig(model=path, dtype="bfloat16"))
        layout, scaled = runner.spec.layout, compute_seconds(runner, computed) * tokens / computed
        times = asyncio.run(lift_times(layout, tokens, rounds, Path(folder, "tier")))
    memcpy = median(times.pop("memcpy"))
    made = [Row(f"computing {tokens:,} tokens, at least", scaled, "s")]
    for name, taken in times.items():
        middle, target = median(taken), HOST_TARGET if name.startswith("host") else DISK_TARGET
        size = tokens // BLOCK_TOKENS * layout.page_bytes / 1e6
        made.append(
            Row(f"{name}: {size:.0f} MB lifted", middle * 1e3, "ms", "memcpy", memcpy / middle, spread(taken))
        )
        made.append(Row(f"{name}: faster than computing by", scaled / middle, "x", target=target))
    return made + asyncio.run(beside_rows(layout, tokens, rounds * beside.PAIRS, window_s))
