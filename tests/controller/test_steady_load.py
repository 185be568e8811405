"""A load that stays as it is, on a fluid model of a cluster: the ratio comes to rest, also under too much of it."""

import random
from itertools import pairwise

import pytest

from baton.controller.pressure import Backlog, Demand, WorkerLimits, pressure
from baton.controller.ratio_decision import ControlSettings, History, RatioObservation, decide
from baton.protos.measurements import StepCurve

TICK_S, LOOK_S, LASTS_S, CHANGE_S = 0.1, 5.0, 900.0, 0.3
TAKEN = 0.75  # of decode's seats, from which on newcomers wait for them


class FluidCluster:
    """Holds the prompt tokens in the router's queue and the sequences that decode, as real numbers."""

    def __init__(self, rng: random.Random, load: float) -> None:
        """``load``: times what the best ratio carries within the SLOs."""
        self._rng, self._noise = rng, rng.choice([0.0, 0.1])
        curve = StepCurve(
            rng.choice([0.005, 0.03]), rng.choice([3e-5, 4e-4]), 0.0, rng.choice([1e-4, 1.25e-3]), 0.0
        )
        slos = rng.choice([0.5, 1.5]), rng.choice([0.04, 0.06, 0.1])
        self.limits = WorkerLimits(curve, curve, 512, rng.choice([8, 64]), 131072, *slos)
        self._prompt, self._answer = rng.choice([100, 600, 1200, 4000]), rng.choice([8, 60, 200, 500])
        self._context = self._prompt + self._answer / 2
        self.workers = rng.choice([2, 3, 4, 8, 16])
        self.prefill = rng.randrange(1, self.workers)
        one = Demand(self._prompt, 0.0, 1.0, self._answer, self._context)
        splits = range(1, self.workers)
        best = min(pressure(one, Backlog(), self.limits, p, self.workers - p, 30.0).worst for p in splits)
        self._rate = load / best
        self._queued = self._running = 0.0

    @property
    def _seats(self) -> int:
        return (self.workers - self.prefill) * self.limits.max_batch

    def pass_time(self) -> None:
        """Lets TICK_S pass: prompts are read as fast as prefill workers can and seats are free."""
        self._queued += self._now() * self._prompt * TICK_S
        room = max(0.0, self._seats - self._running) * self._prompt
        read = min(self._queued, self.prefill * TICK_S / self.limits.prompt_seconds(1.0, 0.0), room)
        self._queued -= read
        self._running += read / self._prompt
        if self._running:
            batch = self._running / (self.workers - self.prefill)
            written = self._running / self.limits.step_seconds(batch, self._context)
            self._running -= min(self._running, written * TICK_S / self._answer)

    def seen(self, at: float) -> RatioObservation:
        """Returns what the controller sees of it."""
        rate, waits = self._now(), int(self._queued / self._prompt)
        full = self._running >= TAKEN * self._seats
        backlog = Backlog(0.0, int(self._running), 0, waits, self._queued, full)
        demand = Demand(rate * self._prompt, 0.0, rate, rate * self._answer, self._context)
        return RatioObservation(at, self.prefill, self.workers - self.prefill, demand, backlog, self.limits)

    def _now(self) -> float:
        return self._rate * (1.0 + self._noise * self._rng.uniform(-1.0, 1.0))


def changes(seed: int, load: float) -> list[int]:
    """The directions in which the controller turned the ratio, in a quarter of an hour."""
    cluster, history, made = FluidCluster(random.Random(seed), load), History(), []
    for tick in range(1, round(LASTS_S / TICK_S)):
        cluster.pass_time()
        if tick % round(LOOK_S / TICK_S):
            continue
        at = 1000.0 + tick * TICK_S
        decision, history = decide(cluster.seen(at), history, ControlSettings())
        if decision.kind == "rerole":
            by = decision.prefill - cluster.prefill
            cluster.prefill, history = decision.prefill, history.changed(at, by, CHANGE_S)
            made.append(1 if by > 0 else -1)
    return made


def turned_back(made: list[int]) -> int:
    return sum(a != b for a, b in pairwise(made))


@pytest.mark.parametrize("load", [0.5, 0.8, 0.95])
def test_a_load_that_some_ratio_carries_is_found_its_ratio_once(load: float) -> None:
    for seed in range(30):
        made = changes(seed, load)
        assert turned_back(made) <= 1, (seed, made)


@pytest.mark.parametrize("load", [1.06, 1.25])
def test_a_load_that_no_ratio_carries_does_not_send_workers_back_and_forth(load: float) -> None:
    """A queue that grows for ever once was decode's work and prefill's by turns: every 15 s all workers changed."""
    for seed in range(30):
        made = changes(seed, load)
        assert turned_back(made) <= 5, (seed, made)
