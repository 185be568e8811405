"""No part of a simulated cluster asks the machine's clocks or randomness, or a seed would not be the same twice."""

from __future__ import annotations

import os
import random
import time

import msgspec
import pytest

from baton.drill.draw import draw
from baton.drill.language.oracle import Sight
from baton.drill.loop import SeededLoop
from baton.drill.run import end_loop
from baton.drill.scenario import Size
from baton.drill.story import Story
from baton.drill.world import World
from tests.growth import reached

REAL = (time.monotonic, time.time, time.perf_counter, time.thread_time, os.urandom)


class Walked(World):
    """A run that notes, at rest, by which attributes the machine's clocks and randomness can be reached."""

    real: tuple[str, ...] = ()

    def _at_rest(self) -> None:
        roots: dict[str, object] = {router.name: router.parts for router in self.routers}
        roots |= {slot: worker.life and worker.life.runtime for slot, worker in self.workers.items()}
        roots |= {f"{slot}'s host": worker.life and worker.life.far for slot, worker in self.workers.items()}
        self.real = tuple(path for path, thing in reached(roots) if any(thing is one for one in REAL))
        super()._at_rest()


@pytest.mark.parametrize(
    "fields", [{"controller": True, "tier_pages": 30}, {"host_counts": (2,), "sight": Sight(divided=True)}]
)
def test_no_part_of_a_simulated_cluster_asks_the_machines_clock_or_randomness(fields: dict[str, object]) -> None:
    quiet = draw(21, Size(workers=1, requests=1, kinds=()))
    loop = SeededLoop(random.Random(1))
    world = Walked(msgspec.structs.replace(quiet, batches=(), **fields), Story(False), loop)
    try:
        loop.run_until_complete(world.run())
    finally:
        end_loop(loop)
        world.close()
    assert not world.judge.violations
    assert not world.real
