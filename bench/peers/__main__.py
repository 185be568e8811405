"""Our engine and others side by side: same weights, same threads, turn about in one run.

    python -m bench.peers [--sizes 150M,0.5B] [--schemes int8,int4,bf16] [--batches 1,4,16] [--rounds 7]
                          [--prompts 512,2048] [--peers llama.cpp,OpenVINO,transformers,bitsandbytes]
                          [--json FILE] [--resume]
    python -m bench.peers --sizes 150M --schemes int4,q4_1,q4_k,q5_k,q6_k,iq4_nl,iq4_xs,mxfp4,int8,nf4
                          --batches 1,16 --rounds 2 --peers llama.cpp,bitsandbytes --json FILE
    PEER_CLOCK=cpu taskset -c 0 python -m bench.peers …

Needs a quiet machine; beside other work, take CPU seconds of one thread, as the last command does. Sets up what
`make bench-peers` hasn't. Like for like: int4 beside Q4_0, int8 beside Q8_0, a
head in int8 on all sides; transformers joins in bf16, its own best on a CPU. KV is bf16 here, f16 in llama.cpp and
int8 in OpenVINO (its default). Other schemes are GGUF's forms, beside llama.cpp on the same file, and "nf4", beside
bitsandbytes in transformers on the same checkpoint. "int8" and "int4" are our own forms of --quantization, "the
peers' file" is our engine on the very blocks that they read. Random weights, random tokens, nothing repeated. A
ratio is their seconds over ours, per round. FILE keeps the rows that this run doesn't measure anew, each with its
commit and machine, so that a run may be taken in parts; with --resume a size and scheme that this commit has
measured there is left out.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console

from baton.bench.engine.memory import MemoryRead
from baton.bench.rows import Row, median, paired, spread, table
from baton.evaluate.workload import CONTEXT, PROMPT, STEPS
from bench.peers import results
from bench.peers.answering import clock
from bench.peers.environments import HOME
from bench.peers.random_checkpoint import nf4_of
from bench.peers.random_gguf import folder_of
from bench.peers.side import FILE, PEERS, BatonPeer, Memory, Peer, Side

LLAMA, BEST, PROMPT_TARGET, FLOOR = {1: 1.3, 16: 2.0}, {16: 1.3}, 1.2, 0.9
# The same blocks, and how much of what reading them allows is wanted at one sequence.
SAME_FILE, SAME_NF4, LEAST_READ = {1: 1.0, 16: 2.0}, {1: 3.0}, 0.8
OWN, NF4 = ("int8", "int4", "bf16"), "nf4"  # schemes that --quantization gives; one that is written as a checkpoint


def main() -> None:
    """Print the table, and write it where ``--json`` says."""
    asked = _arguments()
    _require_one_thread()
    batches = [int(batch) for batch in asked.batches.split(",")]
    prompts, peers = [int(tokens) for tokens in asked.prompts.split(",")], asked.peers.split(",")
    if unknown := set(peers) - set(PEERS):
        raise SystemExit(f"--peers: no peer {', '.join(sorted(unknown))}; there is {', '.join(PEERS)}")
    rows: list[Row] = []
    for size in asked.sizes.split(","):
        for scheme in asked.schemes.split(","):
            if asked.resume and results.measured(asked.json, size, scheme):
                continue
            rows += _compare(size, scheme, batches, prompts, asked.rounds, peers)
            if asked.json:
                results.merge(asked.json, rows, f"{MemoryRead().rate() / 1e9:.3g} GB/s")
    Console(width=150).print(table(rows))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--sizes", default="150M,0.5B")
    parser.add_argument("--schemes", default="int8,int4,bf16")
    parser.add_argument("--batches", default="1,4,16")
    parser.add_argument("--prompts", default=str(PROMPT))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--json", default="")
    parser.add_argument("--resume", action="store_true")
    return parser.parse_args()


def _require_one_thread() -> None:
    """Ends the process if CPU seconds are asked for of several threads, which count waiting at barriers as work."""
    if clock is time.process_time and len(os.sched_getaffinity(0)) > 1:
        raise SystemExit("PEER_CLOCK=cpu takes one thread: run it under taskset -c 0")


def _compare(
    size: str, scheme: str, batches: list[int], prompts: list[int], rounds: int, peers: list[str]
) -> Iterator[Row]:
    folder = nf4_of(HOME, size) if scheme == NF4 else folder_of(HOME, size, scheme)
    threads, most = len(os.sched_getaffinity(0)), max(batches)
    own = list(_own_sides(folder, size, scheme, most, max(prompts)))
    mine: list[Side] = [*own]
    longest = max(CONTEXT + 2 * STEPS, *(tokens + STEPS for tokens in prompts))
    ours, weights = own[0], own[0].weight_bytes
    theirs: list[Side] = [Peer(name, folder, threads, most, longest) for name in peers if _joins(name, scheme)]
    memory: list[Side] = [Memory()]
    for batch in batches:
        floor = memory if batch == 1 and clock is not time.process_time else []
        took = _turn_about([*mine, *theirs, *floor], lambda side, b=batch: side.decode_seconds(b), rounds)  # type: ignore[misc]
        what, count = f"decode, {size} {scheme}, batch {batch}", batch
        read = weights + ours.kv_bytes(batch)
        for side in mine:
            for peer in theirs:
                target = (
                    _same_weights(peer, batch) if side.name == FILE else _decode_target(peer, batch, took, read)
                )
                yield _row(what, side, peer, took, count, target)
        if floor:
            rates = [read / seconds for seconds in took[ours.name]]
            wanted = 0.0 if scheme in OWN else LEAST_READ
            yield _floor_row(what, rates, [1e9 / seconds for seconds in took[Memory.name]], wanted)
    for tokens in prompts:
        took = _turn_about([*mine, *theirs], lambda side, n=tokens: side.prompt_seconds(n), rounds)  # type: ignore[misc]
        for side in mine:
            for peer in theirs:
                target = PROMPT_TARGET if side.name == scheme == "int8" else 0.0
                yield _row(f"prompt of {tokens} tokens, {size} {scheme}", side, peer, took, tokens, target)
    for side in theirs:
        side.close()


def _own_sides(folder: Path, size: str, scheme: str, most: int, prompt: int) -> Iterator[BatonPeer]:
    """Our own form where there is one, then the file that others read; bf16's are the same."""
    if scheme in OWN:
        yield BatonPeer.rounded(size, scheme, most, prompt)
    if scheme != "bf16":
        yield BatonPeer.of_file(folder, most, prompt)


def _joins(name: str, scheme: str) -> bool:
    """transformers computes in bf16; what OpenVINO makes of a bf16 file is not bf16 weights."""
    if scheme == NF4 or name == "bitsandbytes":
        return scheme == NF4 and name == "bitsandbytes"
    if scheme not in OWN:
        return name == "llama.cpp"
    return name == "llama.cpp" or (name == "transformers") == (scheme == "bf16")


def _turn_about(sides: list[Side], ask: Callable[[Side], float], rounds: int) -> dict[str, list[float]]:
    """Seconds per round of each, by name; a first round, in which buffers are made, is not counted."""
    took: dict[str, list[float]] = {side.name: [] for side in sides}
    for _ in range(rounds + 1):
        for side in sides:
            took[side.name].append(ask(side))
    return {name: seconds[1:] for name, seconds in took.items()}


def _decode_target(peer: Side, batch: int, took: dict[str, list[float]], read: int) -> float:
    """Returns how many times as fast as ``peer`` decoding should be; if reading ``read`` bytes leaves less room,
    FLOOR of that room.
    """
    wanted = (LLAMA if peer.name.startswith("llama.cpp") else BEST).get(batch, 0.0)
    if Memory.name not in took:
        return wanted
    fastest = [read * gigabyte / 1e9 / FLOOR for gigabyte in took[Memory.name]]
    return min(wanted, paired(took[peer.name], fastest))


def _same_weights(peer: Side, batch: int) -> float:
    """Returns how many times as fast as ``peer`` decoding should be on the same weights."""
    return (SAME_FILE if peer.name.startswith("llama.cpp") else SAME_NF4).get(batch, 0.0)


def _row(what: str, side: Side, peer: Side, took: dict[str, list[float]], tokens: int, target: float) -> Row:
    own, other = took[side.name], took[peer.name]
    shown = f"{peer.name}: {tokens / median(other):.0f} tok/s"
    return Row(
        f"{what} ({side.name})", tokens / median(own), "tok/s", shown, paired(other, own), spread(own), target
    )


def _floor_row(what: str, rates: list[float], ceilings: list[float], target: float) -> Row:
    """Returns a row on the share of the memory's bandwidth that is used, which bounds the speed of a single
    sequence.
    """
    shown = f"memory read, {median(ceilings) / 1e9:.3g} GB/s"
    share = paired(rates, ceilings)
    return Row(f"{what}, bytes read", median(rates) / 1e9, "GB/s", shown, share, spread(rates), target)


if __name__ == "__main__":
    main()
