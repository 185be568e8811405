"""Measures what ranks of one host cost and bring: collectives beside the memory's ceiling, two ranks beside one.

Knows nothing of clusters or checkpoints: weights are random, and the other rank is a fork of this process. Runs go
turn about, and ratios are within a round.

    python -m bench.parallel [--size 0.5B] [--schemes bf16,int8] [--shares tp,cp,pp] [--rounds 7] [--json FILE]

``--size 8x50M`` has experts, and takes ``--shares ep``, too.

``collectives``: all-reduce of 4 KB to 4 MB by two ranks, beside the copies alone that it takes (into a slot, out of
two): the share of the shared memory's speed that is left of it; and a meeting without data. ``step``: tokens per
second on two ranks of one thread each, over one rank of two threads and over one of one. The bits are the same.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from baton.bench.engine.models import CONTEXT, EXPERTS, SIZES, random_weights
from baton.bench.rows import Row, median, paired, spread, table, to_json
from baton.engine.backends.native.runner import NativeRunner
from baton.engine.backends.ranks.experts import OwnExpertLayers
from baton.engine.backends.ranks.load import LoadedRank
from baton.engine.backends.ranks.memory import SharedMemory, follow, sizes_for
from baton.engine.backends.ranks.program import NativeRankProgram
from baton.engine.backends.ranks.runner import RankRunner
from baton.engine.checkpoints.weights import dealt
from baton.engine.plan import ModelSpec, Runner, SampleSpec, SequenceStep, StepPlan
from baton.engine.program.shares import Widths
from baton.kernels.abi import native
from baton.kernels.collective.native import Collective, group_at, group_bytes
from baton.kv.layout.page import layout_for
from baton.kv.memory.host_pages import PageMemory
from baton.process.processes import die_with_parent
from baton.protos.nouns import BLOCK_TOKENS, Sampling

BYTES = (4 << 10, 32 << 10, 256 << 10, 1 << 20, 4 << 20)
SLOT_BYTES = 256 << 10
RANKS, TARGET = 2, 0.9
MEETINGS = 2000  # in a measurement
HELD = 256  # tokens before a decode
CHUNK = 512  # tokens of a prompt's step
BLOCKS = 2048 // BLOCK_TOKENS  # of each sequence
WORK = {  # what is run, of how many sequences or tokens, and how often
    "tp": (("decode", 1, 10), ("decode", 8, 5), ("prompt", 256, 1)),
    "cp": (("decode", 8, 5), ("prompt", 2048, 1)),
    "pp": (("decode", 8, 5), ("prompt", 2048, 1)),
    "ep": (("decode", 8, 5), ("prompt", 2048, 1)),
}
GREEDY = Sampling(temperature=0.0)


@contextmanager
def forked(work: Callable[[], object]) -> Iterator[None]:
    """Runs ``work`` in a fork of this process, which is ended behind the block."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def collectives(rounds: int) -> list[Row]:
    """Measures meetings and all-reduces of two ranks."""
    region = mmap.mmap(-1, group_bytes(RANKS, SLOT_BYTES))
    address = ctypes.addressof(ctypes.c_char.from_buffer(region))
    ranks = [Collective(group_at(address, index, RANKS, SLOT_BYTES, 0.0)) for index in range(RANKS)]
    plan = [(size, max(10, (32 << 20) // size)) for size in BYTES]

    def run(rank: Collective, x: torch.Tensor) -> Iterator[float]:
        for _ in range(rounds + 1):
            yield _seconds(rank.meet, MEETINGS)
            for size, times in plan:
                yield _seconds(lambda size=size: rank.all_reduce(x.data_ptr(), size // 4), times)  # type: ignore[misc]

    x = torch.zeros(max(BYTES) // 4)
    with forked(lambda: list(run(ranks[1], x))):
        found = list(run(ranks[0], x))
    each = [found[at :: len(plan) + 1][1:] for at in range(len(plan) + 1)]  # the first round warms up
    rows = [Row("a meeting of two ranks", median(each[0]) * 1e6, "µs", spread=spread(each[0]))]
    for (size, times), seconds in zip(plan, each[1:], strict=True):
        ceiling = [_copies(size, times) for _ in range(rounds)]
        rate = size / median(seconds) / 1e9
        share = paired(ceiling, seconds)
        rows.append(Row(f"all-reduce of {size >> 10} KB", rate, "GB/s", "copies alone", share, spread(seconds)))
    return rows


def _copies(size: int, times: int) -> float:
    """Seconds of what one rank copies and adds for a sum over two, with nobody to wait for."""
    mine, slots = torch.zeros(size // 4), torch.zeros(RANKS, size // 4)

    def run() -> None:
        slots[0].copy_(mine)
        torch.add(slots[0], slots[1], out=mine)

    torch.set_num_threads(1)
    return _seconds(run, times)


def _seconds(run: Callable[[], object], times: int) -> float:
    began = time.perf_counter()
    for _ in range(times):
        run()
    return (time.perf_counter() - began) / times


class ForkedFollower:
    """Stands in for ``Followers``: the other rank is a fork that begins once it has all it shares."""

    def __init__(self, loaded: LoadedRank) -> None:
        self._loaded, self._pid = loaded, 0
        self._memory: SharedMemory | None = None

    def share(self, fd: int, size: int) -> None:
        """Takes the ranks' memory first, then the pages."""
        if self._memory is None:
            self._memory = SharedMemory(os.dup(fd), sizes_for(self._loaded.program, self._loaded.native))
            return
        pages = mmap.mmap(fd, size, mmap.MAP_SHARED)
        struct = self._memory.struct(self._loaded.native, 0.0)
        struct.pages = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        self._pid = os.fork()
        if self._pid == 0:
            die_with_parent(signal.SIGKILL)
            follow(self._loaded.native.struct, struct)
            os._exit(0)

    def leave(self, tell: Callable[[], None]) -> None:
        """Tells the fork to leave and waits for it."""
        tell()
        os.waitpid(self._pid, 0)


def runners(size: str, scheme: str, widths: Widths) -> tuple[NativeRunner, RankRunner]:
    """Returns the same random model on one rank and on two."""
    program, weights, _ = random_weights(size, scheme)
    widths.require(program)
    spec = ModelSpec("random", layout_for("bfloat16", program.groups), CONTEXT, program.vocab_size, ())
    loaded = []
    for index in range(RANKS):
        share = partial(widths.share, index=index)
        own = dealt(program, weights, share)
        found = NativeRankProgram(share(program), own, spec.layout)
        loaded.append(LoadedRank(program, found, own, "random", OwnExpertLayers(found, program, None)))
    native.set_threads(1)
    lead = RankRunner(spec, loaded[0], ForkedFollower(loaded[1]), 0.0)  # type: ignore[arg-type]
    return NativeRunner(spec, program, weights), lead


def plans_of(kind: str, count: int) -> list[StepPlan]:
    """Returns a decode of ``count`` sequences, or the chunks of a prompt of ``count`` tokens, in order."""
    if kind == "decode":
        return [StepPlan(tuple(_item(seq, HELD, 1) for seq in range(count)))]
    chunks = (min(CHUNK, count - start) for start in range(0, count, CHUNK))
    return [StepPlan((_item(0, at * CHUNK, tokens),)) for at, tokens in enumerate(chunks)]


def _item(seq: int, start: int, tokens: int) -> SequenceStep:
    pages = range(seq * BLOCKS, (seq + 1) * BLOCKS)
    choice = SampleSpec(GREEDY, 0, start + tokens, (), start)
    return SequenceStep(seq, [7 + at % 1000 for at in range(tokens)], start, pages, choice, tokens > 1)


def step(size: str, scheme: str, kind: str, rounds: int) -> list[Row]:
    """Measures one rank with two threads and with one, and two ranks with one each, turn about."""
    alone, ranks = runners(size, scheme, Widths(**{kind: RANKS}))
    memory = PageMemory.create(8 * BLOCKS, alone.spec.layout.page_bytes)
    for runner in (alone, ranks):
        runner.bind(memory.view(), memory.pages)
    ranks.open_pages(memory.fd, memory.bytes)
    rows = []
    for what, count, times in WORK[kind]:
        plans, took = plans_of(what, count), ([], [], [])  # type: tuple[list[StepPlan], tuple[list[float], ...]]
        for _ in range(rounds + 1):
            for runner, threads, seconds in ((alone, RANKS, took[0]), (alone, 1, took[1]), (ranks, 1, took[2])):
                native.set_threads(threads)
                seconds.append(_best(runner, plans, times))
        wide, one, two = (seconds[1:] for seconds in took)
        name, rate = f"{size} {scheme}, {kind} {RANKS}: {what} of {count}", count / median(two)
        rows.append(Row(name, rate, "tok/s", "one rank, 2 threads", paired(wide, two), spread(two), TARGET))
        rows.append(Row(name, rate, "tok/s", "one rank, 1 thread", paired(one, two), spread(one)))
    ranks.leave()
    return rows


def _best(runner: Runner, plans: list[StepPlan], times: int) -> float:
    def run() -> None:
        for plan in plans:
            runner.run(plan)

    return min(_seconds(run, 1) for _ in range(times))


def main() -> None:
    """Measures, prints a table and writes JSON where asked to."""
    parser = argparse.ArgumentParser(prog="bench.parallel")
    parser.add_argument("--size", default="0.5B", choices=sorted(SIZES | EXPERTS))
    parser.add_argument("--schemes", default="bf16,int8")
    parser.add_argument("--shares", default="tp,cp,pp", help="what the ranks share, by the settings' names")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    rows = collectives(args.rounds)
    for scheme in args.schemes.split(","):
        for kind in args.shares.split(","):
            rows += step(args.size, scheme, kind, args.rounds)
    Console().print(table(rows))
    if args.json:
        Path(args.json).write_text(to_json(rows))


if __name__ == "__main__":
    main()
