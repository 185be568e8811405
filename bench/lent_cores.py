"""One prefill and one decode worker on a machine, with and without lent cores, beside one worker that does both.

    python -m bench.lent_cores [--size 150M] [--dtype bfloat16] [--rounds 1] [--seconds 8] [--loads 0,1,2,3]
                               [--json FILE]

Four loads over HTTP, random weights and prompts. The three clusters are started and stopped turn about, because two
engines that share all cores suffer from what idle processes do now and then more than one that has them to itself.
``--rounds 3`` gives medians and how far apart rounds are. A machine that isn't quiet gives figures that say little.
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path

from rich.console import Console

from baton.bench.rows import Row, table, to_json
from bench.peers.environments import HOME
from bench.peers.random_checkpoint import checkpoint_of
from bench.serving.client import LOADS
from bench.serving.comparison import FIRST, GAP, RATE, one_up_at_a_time, rows
from bench.serving.ours import COLOCATED, KINDS, LENT, SPLIT, serving

KEPT, QUIETER = 0.9, 2.0  # of colocated throughput, and how much shorter the p99 between tokens is


def main() -> None:
    """Print the table, and write it where ``--json`` says."""
    asked = _arguments()
    model, loads = checkpoint_of(HOME, asked.size), [LOADS[int(at)] for at in asked.loads.split(",")]
    servers = {kind: functools.partial(serving, kind, model, asked.dtype) for kind in KINDS}
    found = list[Row]()
    for load, seen in zip(loads, one_up_at_a_time(servers, loads, asked.seconds, asked.rounds), strict=True):
        found += rows(load, seen, LENT, COLOCATED, ((RATE, KEPT), (GAP, QUIETER), (FIRST, 0.0)))
        found += rows(load, seen, LENT, SPLIT, ((RATE, 0.0), (GAP, 0.0), (FIRST, 0.0)))
    Console(width=150).print(table(found))
    if asked.json:
        Path(asked.json).write_text(to_json(found) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--size", default="150M")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--loads", default="0,1,2,3")
    parser.add_argument("--json", default="")
    return parser.parse_args()


if __name__ == "__main__":
    main()
