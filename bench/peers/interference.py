"""A whole cluster beside llama.cpp's server on the same cores: streams that decode while long prompts arrive.

    python -m bench.peers.interference [--size 150M] [--scheme int8] [--streams 8] [--prompt 2048] [--every 3.0]
                                       [--seconds 30] [--rounds 3] [--their-batch 256] [--json FILE]

Both serve the same GGUF file over their OpenAI-compatible HTTP, turn about; who isn't asked is idle. Ours is one
prefill and one decode worker, theirs ``llama-server`` (environments.py builds it; the Python package's own server
takes one request at a time) with a slot for each stream and two for prompts, continuous batching, flash attention
and all cores: once with its default batch of 2048 tokens, once with ``--their-batch``, which cuts prompts finer.
Streams start anew when they end; a prompt comes every ``--every`` seconds whether or not the last one is answered,
and its answer is one token. Prompts are random tokens, nothing is cached. The default pace is about half of what
llama.cpp reads on two quiet cores: past that its queue only grows, and the comparison says nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from rich.console import Console

from baton.bench.rows import Row, median, paired, spread, table, to_json
from baton.launch.fleet import Fleet
from baton.launch.ports import HOST, free_ports
from baton.protos.nouns import BLOCK_TOKENS
from bench.peers.environments import HOME, server
from bench.peers.random_gguf import NAME, folder_of
from bench.peers.streams import Load, StreamTimes, run

OURS, DEFAULT_BATCH = "Baton", 2048
SLOT_TOKENS, PROMPT_SLOTS = 4096, 2
UP_S, WARM_S, REST_S = 60.0, 4.0, 2.0
FIGURES: tuple[tuple[str, str, float, bool, Callable[[StreamTimes], float]], ...] = (
    ("p99 ITL", "ms", 4.0, True, lambda seen: 1e3 * seen.itl(0.99)),
    ("p50 ITL", "ms", 0.0, True, lambda seen: 1e3 * seen.itl(0.5)),
    ("answers' tokens", "tok/s", 1.0, False, lambda seen: seen.rate),
    ("prompts' tokens", "tok/s", 1.0, False, lambda seen: seen.prompt_rate),
    ("median TTFT of prompts", "ms", 0.0, True, lambda seen: 1e3 * seen.prompt_median),
)


def main() -> None:
    """Print the table, and write it where ``--json`` says."""
    asked = _arguments()
    folder = folder_of(HOME, asked.size, asked.scheme)
    load = Load(asked.streams, asked.prompt, asked.every, asked.seconds)
    batches = sorted({DEFAULT_BATCH, asked.their_batch}, reverse=True)
    with contextlib.ExitStack() as up:
        ports = {OURS: up.enter_context(ours(folder, load))}
        ports |= {f"llama-server -b {batch}": up.enter_context(theirs(folder, load, batch)) for batch in batches}
        seen = _turn_about(ports, load, asked.rounds)
    mine = seen.pop(OURS)
    what = f"{asked.size} {asked.scheme}, {asked.streams} streams"
    rows = [row for name, others in seen.items() for row in _rows(what, mine, name, others)]
    Console(width=150).print(table(rows))
    if asked.json:
        Path(asked.json).write_text(to_json(rows) + "\n")


def _turn_about(ports: dict[str, int], load: Load, rounds: int) -> dict[str, list[StreamTimes]]:
    """Loads the servers in turn, and returns what the clients of each saw, by round; a short first round isn't
    counted.
    """
    seen: dict[str, list[StreamTimes]] = {name: [] for name in ports}
    for number in range(rounds + 1):
        part = load if number else msgspec.structs.replace(load, seconds=WARM_S)
        for name, port in ports.items():
            found = asyncio.run(run(port, part, f"{name} {number}"))
            time.sleep(REST_S)  # what was hung up on ends: nobody works while another is measured
            if number:
                seen[name].append(found)
                print(f"{name}: {found.rate:.0f} tok/s, p99 {found.itl(0.99):.3f} s", flush=True)
    return seen


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--size", default="150M")
    parser.add_argument("--scheme", default="int8")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--every", type=float, default=3.0)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--their-batch", type=int, default=256)
    parser.add_argument("--json", default="")
    return parser.parse_args()


@contextlib.contextmanager
def ours(folder: Path, load: Load) -> Iterator[int]:
    """A cluster of one prefill and one decode worker; its port."""
    pages = (load.streams + PROMPT_SLOTS) * SLOT_TOKENS // BLOCK_TOKENS
    worker = {"model": str(folder.resolve()), "kv_cache_dtype": "bf16", "pages": pages}
    with Fleet(cluster={"prefill": 1, "decode": 1}, worker=worker) as fleet:
        yield fleet.port


@contextlib.contextmanager
def theirs(folder: Path, load: Load, batch: int) -> Iterator[int]:
    """llama-server with a slot per stream, ``batch`` tokens at a time; its port."""
    (port,), slots, cores = free_ports(1), load.streams + PROMPT_SLOTS, len(os.sched_getaffinity(0))
    command = [
        server(), "-m", folder / NAME, "--host", HOST, "--port", port, "-np", slots, "-c", slots * SLOT_TOKENS,
        "-t", cores, "-tb", cores, "-b", batch, "-ub", min(batch, 512), "-fa", "on", "--no-context-shift",
    ]  # fmt: skip
    with open(folder / "llama_server.log", "w") as log:
        process = subprocess.Popen([str(part) for part in command], stdout=log, stderr=log)
    try:
        _await_health(process, port, folder / "llama_server.log")
        yield port
    finally:
        process.terminate()
        process.wait(30)


def _await_health(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + UP_S
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(urllib.error.URLError, OSError):
            urllib.request.urlopen(f"http://{HOST}:{port}/health", timeout=2)
            return
        time.sleep(0.1)
    raise SystemExit(f"llama-server did not come up; it said why in {log}")


def _rows(what: str, mine: list[StreamTimes], name: str, others: list[StreamTimes]) -> Iterator[Row]:
    """The ratio says how many times better ours is."""
    for shown, unit, target, less_is_better, value in FIGURES:
        own, other = [value(seen) for seen in mine], [value(seen) for seen in others]
        ratio = paired(other, own) if less_is_better else paired(own, other)
        peer = f"{name}: {median(other):.4g} {unit}"
        yield Row(f"{what}, {shown}", median(own), unit, peer, ratio, spread(own), target)


if __name__ == "__main__":
    main()
