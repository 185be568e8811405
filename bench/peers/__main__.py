"""`make bench-peers`: our engine and llama.cpp side by side, same shape, same threads, turn about in one run.

    python -m bench.peers [--size 150M] [--schemes int8,int4] [--batches 1,4,16] [--rounds 7] [--json FILE]

Sets up each peer in an environment of its own under ``build/peers`` (llama.cpp is compiled there: some minutes).
Like for like: int4 is group 32 on both sides with an int8 head, activations in int8 on both; KV bf16 here and f16
there. Random weights, random tokens, nothing repeated. A ratio is theirs over ours in seconds, per round.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from baton.console.enginebench.memory import seconds
from baton.console.enginebench.models import random_runner
from baton.console.enginebench.step import _item, _plans, _steps
from baton.console.kvbench.rows import Row, median, paired, spread, table, to_json
from baton.engine.native_runner import NativeRunner
from baton.engine.plan import StepPlan
from baton.protos.nouns import BLOCK_TOKENS
from bench.peers.random_gguf import write

HOME = Path("build/peers")
LLAMA = "llama-cpp-python==0.3.36"
CONTEXT, STEPS, PROMPT = 512, 8, 512
PAGES = CONTEXT // BLOCK_TOKENS + 4
TARGETS = {1: 1.3, 16: 2.0}


def main() -> None:
    """Print the table, and write it where ``--json`` says."""
    asked = _arguments()
    python = _environment("llama_cpp", LLAMA)
    threads = len(os.sched_getaffinity(0))
    batches = [int(batch) for batch in asked.batches.split(",")]
    rows: list[Row] = []
    for scheme in asked.schemes.split(","):
        rows += _compare(python, asked.size, scheme, batches, asked.rounds, threads)
    Console().print(table(rows))
    if asked.json:
        Path(asked.json).write_text(to_json(rows) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--size", default="150M")
    parser.add_argument("--schemes", default="int8,int4")
    parser.add_argument("--batches", default="1,4,16")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", default="")
    return parser.parse_args()


def _environment(name: str, *requirements: str) -> Path:
    """A virtual environment with ``requirements``, made on first use; its Python."""
    home = HOME / name
    python, stamp = home / "bin" / "python", home / "installed"
    if not stamp.exists() or stamp.read_text() != " ".join(requirements):
        print(f"setting up {home}: {' '.join(requirements)}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", home], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *requirements], check=True)
        stamp.write_text(" ".join(requirements))
    return python


class LlamaCpp:
    """The peer's process."""

    def __init__(self, python: Path, model: Path, threads: int, sequences: int) -> None:
        command = [python, Path(__file__).with_name("llama_cpp_side.py"), model, threads, sequences, 2 * CONTEXT]
        self._process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.about = self._read()

    def ask(self, **question: Any) -> float:
        """Its answer in seconds."""
        assert self._process.stdin
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return float(self._read()["seconds"])

    def close(self) -> None:
        """End it."""
        self._process.communicate(timeout=30)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"llama.cpp ended with {self._process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found


def _compare(python: Path, size: str, scheme: str, batches: list[int], rounds: int, threads: int) -> Iterator[Row]:
    model = HOME / f"{size}-{scheme}.gguf"
    if not model.exists():
        write(model, size, scheme)
    peer = LlamaCpp(python, model, threads, max(batches))
    runner, _ = random_runner(size, scheme, "bf16")
    pages = max(batches) * PAGES + PROMPT // BLOCK_TOKENS
    buffer = bytearray(pages * runner.spec.layout.page_bytes)
    runner.bind(memoryview(buffer), pages)
    name = f"llama.cpp {peer.about['version']}"
    for batch in batches:
        ours, theirs = [], []
        for _ in range(rounds):
            ours.append(_decoded(runner, batch))
            theirs.append(peer.ask(batch=batch, context=CONTEXT, steps=STEPS))
        shown = f"{name}: {batch / median(theirs):.0f} tok/s"
        title = f"decode, {size} {scheme}, batch {batch}"
        rate = batch / median(ours)
        yield Row(title, rate, "tok/s", shown, paired(theirs, ours), spread(ours), TARGETS.get(batch, 0.0))
    ours, theirs = [], []
    plan = StepPlan((_item(0, CONTEXT, 0, PROMPT),))
    for _ in range(rounds):
        ours.append(seconds(lambda: runner.run(plan)))
        theirs.append(peer.ask(prompt=PROMPT))
    shown = f"{name}: {PROMPT / median(theirs):.0f} tok/s"
    title = f"prompt of {PROMPT} tokens, {size} {scheme}"
    yield Row(title, PROMPT / median(ours), "tok/s", shown, paired(theirs, ours), spread(ours), 1.2)
    peer.close()


def _decoded(runner: NativeRunner, batch: int) -> float:
    """Seconds of a step, its first (whose caches are cold) left out."""
    plans = _plans(batch)
    runner.run(plans[0])
    return seconds(lambda: _steps(runner, plans)) / len(plans)


if __name__ == "__main__":
    main()
