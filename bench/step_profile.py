"""Measures where a step's time goes, op by op, by torch's profiler: a random-weight Llama's decode or prompt.

Knows nothing of targets. Ops are called one by one (BATON_STEP=ops): an op's time and its share of all of them is
that of the native step; what Python and torch cost between them, which that step lacks, is a row of its own.

    python -m bench.step_profile [--size 150M] [--scheme int8] [--kv bf16] [--batch 16] [--prompt 0] [--steps 8]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from rich.console import Console

from baton.bench.engine.models import SIZES, random_runner
from baton.bench.engine.report import SCHEMES
from baton.bench.rows import Row, table
from baton.engine.backends.native.runner import NativeStep
from baton.evaluate.workload import Workload
from baton.kernels.step import structs

NAMESPACE = "baton::"


def rows(work: Workload, batch: int, prompt: int, steps: int) -> Iterator[Row]:
    """Milliseconds per step of each op, the largest first, and its share of all of them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        whole = sum(work.prompt_seconds(prompt) for _ in range(steps)) if prompt else _decode(work, batch, steps)
    found = {event.key: event.cpu_time_total / 1e6 for event in profile.key_averages()}
    ops = {key.removeprefix(NAMESPACE): s for key, s in found.items() if key.startswith(NAMESPACE)}
    for name, seconds in sorted(ops.items(), key=lambda pair: -pair[1]):
        yield Row(name, 1e3 * seconds / steps, "ms", peer="all ops", ratio=seconds / sum(ops.values()))
    yield Row("Python and torch around the ops", 1e3 * (whole - sum(ops.values())) / steps, "ms")


def _decode(work: Workload, batch: int, steps: int) -> float:
    plans = work.plans(batch)
    return sum(work.run_seconds([plans[step % len(plans)]]) for step in range(steps))


def profiled_step() -> NativeStep:
    """Returns the native step under the name of the only op that it runs where the others are called one by one."""
    head = structs.run_step()

    def named(*arguments: object) -> None:
        with torch.profiler.record_function(NAMESPACE + "lm_head"):
            head(*arguments)

    return named


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="150M")
    parser.add_argument("--scheme", choices=SCHEMES, default="int8")
    parser.add_argument("--kv", default="bf16")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=0, help="tokens of a prompt instead of decoding")
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()
    runner, _ = random_runner(args.size, args.scheme, args.kv, by_ops=True, native_step=profiled_step())
    work = Workload(runner, args.batch, prompt=args.prompt)
    work.decode_seconds(args.batch)
    Console(highlight=False, width=150).print(table(list(rows(work, args.batch, args.prompt, args.steps))))


if __name__ == "__main__":
    main()
