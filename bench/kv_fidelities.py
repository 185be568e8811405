"""Measures what keeping less KV takes of a CPU: tokens after a long prompt by ``kv_selection``, and wire codecs.

    .venv/bin/python -m bench.kv_fidelities [--size 150M] [--prompt 8000] [--answer 64] [--only selections|codecs]

Random weights in bfloat16, one worker's loop, one thread; seconds are that thread's CPU time. Knows nothing of what
the model says: the figures are speed alone, ``baton evaluate`` and bench.kv_codec_loss have the losses.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator

import numpy as np
import torch
from rich.console import Console

from baton.bench.engine.models import random_weights
from baton.bench.rows import Row, median, spread, table
from baton.decode_worker.engine.limits import DecodeLimits
from baton.decode_worker.engine.loop import DecodeLoop
from baton.engine.backends.native.runner import NativeRunner
from baton.engine.plan import ModelSpec
from baton.engine.steps.parts import EngineParts
from baton.kernels.abi import native
from baton.kv.layout.coding import NAMES, coded_bytes, decode, encode
from baton.kv.layout.page import layout_for
from baton.kv.layout.selection import ALL, marked, parsed
from baton.kv.memory.host_pages import PageMemory
from baton.kv.pages.pool import PagePool
from baton.protos import channel as ch
from baton.protos.nouns import BLOCK_TOKENS, EngineRequest, LayerGroup, Sampling
from bench.windows import Tape

SELECTIONS = (ALL, "sinks:64,window:960", "snapkv:1024,window:64", "h2o:1024,window:64")
MISTRAL = LayerGroup("full", ("k", "v"), 32, 8, 128)  # of Mistral 7B, 2 MiB per block in bfloat16
MS = 1e3


def answered(runner: NativeRunner, prompt: int, answer: int) -> tuple[float, float]:
    """Returns the CPU seconds until the first token after ``prompt`` tokens, and of each token after it."""
    pages = (prompt + answer) // BLOCK_TOKENS + 8
    memory = PageMemory.create(pages, runner.spec.layout.page_bytes)
    runner.bind(memory.view(), pages)
    tape, ids = Tape(), itertools.count(1)
    parts = EngineParts.around(runner, PagePool(pages), tape, time.monotonic, memory=memory.view())
    loop = DecodeLoop(parts, DecodeLimits(), lambda n: next(ids).to_bytes(n, "big"))
    tokens = tuple(int(token) for token in np.random.default_rng(0).integers(0, 32_000, prompt))
    sampling = Sampling(temperature=0.0, max_tokens=answer, ignore_eos=True)
    began = time.thread_time()
    loop.turn([ch.Admit(1, EngineRequest("r", tokens, prompt, sampling, 0), True, 30.0)])
    while not tape.of(ch.Tokens):
        loop.turn([])
    first = time.thread_time()
    while loop.turn([]):
        pass
    return first - began, (time.thread_time() - first) / (answer - 1)


def selections(size: str, prompt: int, answer: int) -> Iterator[Row]:
    """Yields a prompt's and a token's CPU time with each of SELECTIONS."""
    program, weights, _ = random_weights(size, "bf16")
    whole: tuple[float, float] | None = None
    for text in SELECTIONS:
        layout = layout_for("bfloat16", program.groups, fidelity=marked("bfloat16", parsed(text)))
        runner = NativeRunner(ModelSpec("random", layout, 8192, program.vocab_size, ()), program, weights)
        read, wrote = answered(runner, prompt, answer)
        whole = whole or (read, wrote)
        yield Row(f"{text}: prompt of {prompt:,} tokens", read, "s", f"{whole[0]:.3g}", read / whole[0])
        yield Row(f"{text}: each token after it", wrote * MS, "ms", f"{whole[1] * MS:.3g}", wrote / whole[1])


def codecs(rounds: int) -> Iterator[Row]:
    """Yields the CPU time that each wire codec takes to code and to decode a block of Mistral 7B."""
    shape = MISTRAL.layers, 2, BLOCK_TOKENS, MISTRAL.kv_heads, MISTRAL.head_dim
    values = np.random.default_rng(0).standard_normal(shape, np.float32)
    for codec in NAMES:
        wire = memoryview(encode(codec, values, MISTRAL))
        sizes = f"{coded_bytes(codec, MISTRAL) / (2 * values.size):.2f} of bfloat16's bytes"
        for name, work in (
            ("coding", lambda codec=codec: encode(codec, values, MISTRAL)),
            ("decoding", lambda codec=codec, wire=wire: decode(codec, wire, MISTRAL)),
        ):
            took = list[float]()
            for _ in range(rounds):
                began = time.thread_time()
                work()
                took.append(time.thread_time() - began)
            yield Row(f"{codec}: {name} a block of 2 MiB", median(took) * MS, "ms", sizes, spread=spread(took))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="150M")
    parser.add_argument("--prompt", type=int, default=8000)
    parser.add_argument("--answer", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15, help="of the codecs")
    parser.add_argument("--only", choices=("selections", "codecs"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    native.set_threads(1)
    found = list[Row]()
    if args.only != "codecs":
        found += selections(args.size, args.prompt, args.answer)
    if args.only != "selections":
        found += codecs(args.rounds)
    Console(width=120).print(table(found))


if __name__ == "__main__":
    main()
