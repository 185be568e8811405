"""Estimates how long an 8B's ops take on a card at best, on paper: bytes and products against the data sheet.

Knows no clock and no card: nothing here is measured. A floor counts every byte once from the card's memory, and
every product once at the peak of the tensor cores. "As built" counts what these kernels do beyond that: what they
read again goes by the L2 cache, products that fill a part of an instruction count whole, and mma.sync reaches
a part of the peak. Launches, latencies and barriers are in neither.

    python -m bench.cuda.paper          writes the table of docs/cuda.md
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

MEMORY, FLOPS = 3.35e12, 989e12  # an H100's, as in planner/costs/hardware.toml: bytes/s, dense bf16 FLOP/s
L2 = 5.5e12  # bytes/s; others' microbenchmarks say so, the data sheet doesn't
SYNC = 0.62  # of the peak that mma.sync reaches on an H100, by others' measurements
HIDDEN, INNER, VOCAB = 4096, 14336, 128256
HEADS, KV_HEADS, DIM = 32, 8, 128
MATRICES = {"qkv": (6144, HIDDEN), "o": (HIDDEN, HIDDEN), "gate-up": (2 * INNER, HIDDEN), "down": (HIDDEN, INNER)}
PROCESSORS = 132
ATTENTION_ROWS, MMA_ROWS = 5, 16  # query rows of a unit, in how many of an instruction: three bf16 parts each
PAIR_ROWS = 128  # query rows of a prompt that share K and V by wgmma (prompt_attention/groups.cuh)
TILE_ROWS = 64  # and by mma.sync (cascade_attention/tiles.cuh)


class Tile(NamedTuple):
    """Describes a block of a product: it reads its weights once for ``rows``, its rows once for ``outputs``."""

    form: str
    rows: int
    outputs: int

    def blocks(self, n: int, m: int) -> int:
        """Returns the number of blocks of ``m`` rows and ``n`` outputs."""
        return -(-m // self.rows) * -(-n // self.outputs)


SKINNY, WIDE, MANY = Tile("skinny", 64, 32), Tile("wide", 128, 128), Tile("wgmma", 128, 256)
MOST_PARTS = 8  # of K (linear/many/split.cuh)


class Work(NamedTuple):
    """Counts what one call does: bytes from memory and by L2, and floating-point operations by ``peak``."""

    memory: float
    flops: float
    l2: float = 0.0
    peak: float = FLOPS

    @property
    def seconds(self) -> float:
        """Returns the longest of the three times, as if they overlapped in full."""
        return max(self.memory / MEMORY, self.l2 / L2, self.flops / self.peak)

    @property
    def bound(self) -> str:
        """Returns what takes longest."""
        times = {"memory": self.memory / MEMORY, "L2": self.l2 / L2, "products": self.flops / self.peak}
        return max(times, key=lambda name: times[name])

    @property
    def told(self) -> str:
        """Returns the microseconds, and what takes them."""
        return f"{1e6 * self.seconds:,.0f} ({self.bound})"


class Estimate(NamedTuple):
    """One op at one shape: its floor, what it is as built, and what it would be by the next form, if one is
    planned.
    """

    op: str
    shape: str
    floor: Work
    built: Work
    planned: Work | None = None

    @property
    def row(self) -> str:
        """Returns the row of the table."""
        then = "" if self.planned is None else self.planned.told
        return f"| {self.op} | {self.shape} | {self.floor.told} | {self.built.told} | {then} |\n"


def product(name: str, n: int, k: int, m: int) -> Estimate:
    """Returns the estimate of ``m`` bf16 rows times a bf16 matrix (n, k), by the form that dispatch takes."""
    weights, rows, flops = 2.0 * n * k, 2.0 * m * k, 2.0 * m * n * k
    memory = weights + rows + 4.0 * m * n
    tile, parts = tile_of(n, m), parts_of(n, m)
    sums = 8.0 * parts * m * n if parts > 1 else 0.0  # written and read
    l2 = -(-m // tile.rows) * weights + -(-n // tile.outputs) * rows + sums
    built = Work(memory, flops, l2, FLOPS if tile.form == "wgmma" else SYNC * FLOPS)
    form = f"{tile.form} in {parts} parts" if parts > 1 else tile.form
    shared = -(-m // MANY.rows) * weights + -(-n // MANY.outputs) * rows
    planned = Work(memory, flops, shared / 2) if m > SKINNY.rows else None
    return Estimate(name, f"M={m}, {form}", Work(memory, flops), built, planned)


def in_parts(n: int, m: int, int4: bool = False) -> bool:
    """Returns whether dispatch splits a product of ``m`` rows and ``n`` outputs along K."""
    return parts_of(n, m, WIDE, 0.5) > 1 if int4 else parts_of(n, m) > 1


def parts_of(n: int, m: int, tile: Tile = MANY, full: float = 0.75, processors: int = PROCESSORS) -> int:
    """Returns into how many parts along K dispatch splits a product of ``m`` rows and ``n`` outputs by ``tile``,
    whose tiles are enough from ``full`` of the card on (linear/many/split.cuh: splits).
    """
    tiles, count = tile.blocks(n, m), MOST_PARTS
    if m <= SKINNY.rows or tiles >= processors * full:
        return 1
    while count > 1 and not (tiles * count <= processors and tiles * count * 10 >= processors * 7):
        count //= 2
    return count


def tile_of(n: int, m: int) -> Tile:
    """Returns the tiles that dispatch takes for ``m`` bf16 rows and ``n`` outputs (linear/many/prefill.cuh:
    prefill_parts; linear/cuda.cu: run).
    """
    if m <= SKINNY.rows:
        return SKINNY
    if MANY.blocks(n, m) * 4 >= PROCESSORS * 3 or parts_of(n, m) > 1:
        return MANY
    return WIDE if WIDE.blocks(n, m) * 2 >= PROCESSORS else SKINNY


def decode_attention(batch: int, length: int, group: int) -> Estimate:
    """Returns the estimate of one layer's attention of decodes over bf16 KV."""
    kv = 2.0 * 2 * batch * length * KV_HEADS * DIM
    flops = 4.0 * batch * length * KV_HEADS * group * DIM
    passes = -(-group // ATTENTION_ROWS)
    built = Work(kv, flops / group * MMA_ROWS * passes, passes * kv, SYNC * FLOPS)
    planned = Work(kv, flops / group * MMA_ROWS, kv, SYNC * FLOPS) if passes > 1 else None
    return Estimate(
        "attention of decodes", f"B={batch}, {length} keys, GQA {group}", Work(kv, flops), built, planned
    )


def prompt_attention(tokens: int, form: str = "wgmma") -> Estimate:
    """Returns the estimate of one layer's attention of a prompt over bf16 KV, causal blocks skipped."""
    kv, group = 2.0 * 2 * tokens * KV_HEADS * DIM, HEADS // KV_HEADS
    flops = 4.0 * tokens * tokens / 2 * HEADS * DIM
    rows, peak = (PAIR_ROWS, FLOPS) if form == "wgmma" else (TILE_ROWS, SYNC * FLOPS)
    built = Work(kv, flops, tokens * group / rows * kv / 2, peak)
    planned = Work(kv, flops, tokens * group / (2 * PAIR_ROWS) * kv / 2) if form == "wgmma" else None
    return Estimate("attention of a prompt", f"{tokens} tokens, {form}", Work(kv, flops), built, planned)


def estimates() -> Iterator[Estimate]:
    """Yields the table's rows: one layer's ops, and the head."""
    for m in (1, 64, 128, 256, 2048):
        for name, (n, k) in MATRICES.items():
            yield product(name, n, k, m)
    yield product("head", VOCAB, HIDDEN, 64)
    yield decode_attention(64, 2048, 4)
    yield decode_attention(64, 2048, 8)
    for tokens in (2048, 8192):
        yield prompt_attention(tokens, "mma.sync")
        yield prompt_attention(tokens)


def table() -> str:
    """Returns the table in Markdown."""
    head = "| op | shape | floor | as built | next form |\n|---|---|---|---|---|\n"
    return head + "".join(estimate.row for estimate in estimates())


if __name__ == "__main__":
    print(table(), end="")
