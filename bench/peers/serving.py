"""Our clusters beside vLLM's CPU build, through the API: four loads over HTTP, one client for all, turn about.

    python -m bench.peers.serving [--size 150M] [--dtype bfloat16] [--rounds 3] [--seconds 10] [--loads 0,1,2,3]
                                  [--pace S] [--json FILE]

One random checkpoint, random prompts, nothing cached, greedy answers. vLLM runs as one server and as 1P1D over
NIXL, ours as one worker that does both and as 1P1D with lent cores. The servers of a comparison are up in one run;
who isn't asked is idle, and NIXL's progress thread rests for a millisecond between two looks, because as shipped it
takes a core. Where vLLM doesn't start, a row says so with its reason. FILE keeps what other kinds of machine
measured. ``--pace`` compares 1P1D alone, with that ``worker.pace_beside_prompts_s``: how long answers wait for
prompts on the same cores.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console

from baton.bench.engine.memory import MemoryRead
from baton.bench.rows import Row, table
from bench.peers import results, vllm_servers
from bench.peers.environments import HOME
from bench.peers.random_checkpoint import checkpoint_of
from bench.peers.vllm_environment import VllmEnvironment, set_up
from bench.serving.client import LOADS, Ask
from bench.serving.comparison import FIRST, GAP, RATE, rows, turn_about, warm_up
from bench.serving.ours import COLOCATED, LENT, serving

Server = Callable[[VllmEnvironment, Path, str, Path], contextlib.AbstractContextManager[Ask]]
PAIRS: tuple[tuple[str, str, Server, tuple[tuple[str, float], ...]], ...] = (
    (LENT, vllm_servers.SPLIT, vllm_servers.split, ((RATE.name, 1.5), (GAP.name, 2.0))),
    (COLOCATED, vllm_servers.AGGREGATED, vllm_servers.aggregated, ((RATE.name, 1.1),)),
)


def main() -> None:
    """Print the table, and write it where ``--json`` says."""
    asked, found = _arguments(), list[Row]()
    environment, model = set_up(HOME / "vllm"), checkpoint_of(HOME, asked.size)
    for own, peer, server, targets in PAIRS if asked.pace is None else PAIRS[:1]:
        compared = list(_compare(own, peer, server, dict(targets), asked, environment, model))
        found += compared
        if asked.json:
            results.merge(asked.json, compared, f"{MemoryRead().rate() / 1e9:.3g} GB/s")
    Console(width=150).print(table(found))


def _compare(
    own: str,
    peer: str,
    server: Server,
    targets: dict[str, float],
    asked: argparse.Namespace,
    environment: VllmEnvironment,
    model: Path,
) -> Iterator[Row]:
    loads = [LOADS[int(at)] for at in asked.loads.split(",")]
    with contextlib.ExitStack() as up:
        try:
            theirs = up.enter_context(server(environment, model, asked.dtype, HOME / "vllm" / "server.log"))
        except RuntimeError as error:
            yield Row(f"{asked.size} {asked.dtype} ({own})", 0.0, "tok/s", f"{peer}: not measured, {error}")
            return
        ours = serving(own, model, asked.dtype, asked.pace)
        own += "" if asked.pace is None else f", a pace of {asked.pace:g} s"
        servers = {own: up.enter_context(ours), peer: theirs}
        warm_up(servers)
        for load in loads:
            seen = turn_about(servers, load, asked.seconds, asked.rounds)
            judged = [(figure, targets.get(figure.name, 0.0)) for figure in (RATE, GAP, FIRST)]
            yield from rows(load, seen, own, peer, judged)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--size", default="150M")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--loads", default="0,1,2,3")
    parser.add_argument("--pace", type=float)
    parser.add_argument("--json", default="")
    return parser.parse_args()


if __name__ == "__main__":
    main()
