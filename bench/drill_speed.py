"""Measures how fast `baton drill` simulates a cluster: virtual seconds per second of this process's CPU time.

    python -m bench.drill_speed [--rates 0 2 10] [--seconds 30] [--prefill 4] [--decode 4] [--profile FILE]

One router, without faults. A request has a prompt of 100 tokens, half of it shared, and an answer of 30; a
step takes 20 ms. Rate 0 is a cluster at rest: heartbeats, polls and the watch alone. Only the time under load
counts, from the first request until the last answer; starting and the checks at rest are left out. CPU time is that
of one thread, so other processes change it little. Turns are those of the event loop.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import msgspec

from baton.drill.draw import draw
from baton.drill.language.oracle import Sight
from baton.drill.loop import SeededLoop
from baton.drill.parts.aims import Aims
from baton.drill.parts.clients import Clients
from baton.drill.run import prepared, uncollected
from baton.drill.scenario import Request, Scenario, Size
from baton.drill.specials import tokens_of
from baton.drill.story import Story
from baton.drill.world import World
from baton.protos.nouns import Sampling

PROMPT, SHARED, ANSWER = 100, 50, 30  # tokens
PLAIN = {
    "routers": 1, "pages": 1000, "policy": "cost", "local_max": 0, "chunk_tokens": 250, "max_batch": 16,
    "hedge": 0.0, "step_s": 0.02, "token_s": 0.00001, "swap": False, "lease_ttl_s": 30.0, "tier_pages": 0,
    "delay_s": 0.0003, "requests_per_min": 0, "faults": (), "batches": (), "adapters": (), "controller": False,
    "disk_pages": 0, "drafts_right": 0.0, "page_kinds": (), "host_counts": (), "sight": Sight(),
    "pins": (), "placed": False, "scales": (), "placer_dies": (), "most_workers": 0,
}  # fmt: skip


class Measured(World):
    """A world that measures its load: CPU and virtual seconds from the first request to the last answer."""

    cpu_s = virtual_s = 0.0
    least_s = 0.0  # virtual seconds that the load takes at least
    turns = 0
    profile: cProfile.Profile | None = None

    async def _play(self, clients: Clients, aims: Aims, began: float) -> None:
        turns, cpu_s = self.loop.turns, time.process_time()
        with self.profile or nullcontext():
            await asyncio.gather(super()._play(clients, aims, began), asyncio.sleep(self.least_s))
        self.cpu_s, self.virtual_s = time.process_time() - cpu_s, self.loop.time() - began
        self.turns = self.loop.turns - turns


def scenario(prefill: int, decode: int, rate: float, seconds: float, seed: int = 1) -> Scenario:
    """Returns the scenario of a load of ``rate`` requests per second for ``seconds``."""
    rng = random.Random(seed)
    heads = [tokens_of(rng, SHARED) for _ in range(4)]
    asks = Sampling(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
    requests = tuple(
        Request(i, i / rate, (*rng.choice(heads), *tokens_of(rng, PROMPT - SHARED)), asks)
        for i in range(int(rate * seconds))
    )
    drawn = draw(seed, Size(requests=1, kinds=(), pressed=0.0, flooded=0.0))
    return msgspec.structs.replace(drawn, prefill=prefill, decode=decode, requests=requests, **PLAIN)


@contextmanager
def _played(own: Scenario, least_s: float, profile: cProfile.Profile | None) -> Iterator[Measured]:
    loop = SeededLoop(random.Random(own.seed))
    world = Measured(own, Story(False), loop)
    world.least_s, world.profile = least_s, profile
    with prepared(world):
        loop.run_until_complete(world.run())
    yield world


def main() -> None:
    """Prints the ratio for each rate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="*", default=[0.0, 2.0, 10.0])
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--prefill", type=int, default=4)
    parser.add_argument("--decode", type=int, default=4)
    parser.add_argument("--profile", default="", help="write cProfile's statistics of the load there")
    asked = parser.parse_args()
    profile = cProfile.Profile() if asked.profile else None
    print(f"{asked.prefill}P{asked.decode}D, virtual seconds per CPU second")
    for rate in asked.rates:
        with (
            uncollected(),
            _played(scenario(asked.prefill, asked.decode, rate, asked.seconds), asked.seconds, profile) as world,
        ):
            assert not world.judge.violations, world.judge.violations
            print(
                f"{rate:6g} requests/s: {world.virtual_s / world.cpu_s:6.1f}x; {world.virtual_s:.1f} virtual s, "
                f"{world.cpu_s:.2f} CPU s, {1000 * world.cpu_s / world.virtual_s:.2f} ms a virtual second, "
                f"{world.turns / world.virtual_s:.0f} turns of {1e6 * world.cpu_s / world.turns:.0f} us"
            )
    if profile is not None:
        profile.dump_stats(asked.profile)


if __name__ == "__main__":
    main()
