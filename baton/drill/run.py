"""Runs scenarios: one seed, many seeds, and a failing one made as small as it stays failing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import textwrap
import time
from collections.abc import Callable, Iterator

import msgspec

from baton.drill.loop import NothingLeft, SeededLoop
from baton.drill.scenario import Scenario
from baton.drill.story import Story
from baton.drill.world import Complaints, World


class Verdict(msgspec.Struct, frozen=True):
    """Tells what became of a run. Times in seconds; ``digest`` is the story's hash.

    ``met`` counts faults by what their targets were at, ``cancelled_at`` are the places (file, line) of the package
    at which tasks were cancelled.
    """

    seed: int
    violations: tuple[str, ...]
    answered: int
    failed: int
    cancelled: int
    virtual_s: float
    took_s: float
    turns: int
    digest: str
    lines: tuple[str, ...] = ()
    met: dict[str, int] = {}
    cancelled_at: tuple[tuple[str, int], ...] = ()

    @property
    def held(self) -> bool:
        """Returns whether every invariant held."""
        return not self.violations


def play(scenario: Scenario, keep_story: bool = False) -> Verdict:
    """Runs a scenario to its end, on a loop of its own."""
    began, story = time.perf_counter(), Story(keep_story)
    loop = SeededLoop(random.Random(f"loop {scenario.seed}"))
    asyncio.set_event_loop(loop)
    before = random.getstate()
    random.seed(f"library {scenario.seed}")  # redis-py draws its pauses between retries
    world = World(scenario, story, loop)
    complaints, product = Complaints(world.judge), logging.getLogger("baton")
    product.addHandler(complaints)
    propagates, product.propagate = product.propagate, False
    try:
        loop.run_until_complete(world.run())
    except NothingLeft as stuck:
        world.judge.violated(f"the cluster stands still: {stuck}")
    except AssertionError as wrong:
        world.judge.violated(f"assertion: {wrong}")
    finally:
        product.removeHandler(complaints)
        product.propagate = propagates
        random.setstate(before)
        _close(loop)
    loop.coverage = None
    judge = world.judge
    return Verdict(
        scenario.seed,
        tuple(judge.violations),
        judge.answered,
        judge.failed,
        judge.cancelled,
        loop.time(),
        time.perf_counter() - began,
        loop.turns,
        story.digest,
        tuple(story.lines),
        dict(world.coverage.met),
        tuple(sorted(world.coverage.cancelled_at)),
    )


def shrink(scenario: Scenario, fails: Callable[[Scenario], bool], most: int = 300) -> Scenario:
    """Leaves out faults, requests and what is special while ``fails`` holds; at most ``most`` runs are tried."""
    tries = 0
    for field in ("faults", "requests", "batches"):
        size = max(1, len(getattr(scenario, field)) // 2)
        while size and tries < most:
            at, parts = 0, list(getattr(scenario, field))
            while at < len(parts) and tries < most:
                smaller = msgspec.structs.replace(scenario, **{field: tuple(parts[:at] + parts[at + size :])})
                tries += 1
                if fails(smaller):
                    scenario, parts = smaller, list(getattr(smaller, field))
                else:
                    at += size
            size = min(size // 2, max(0, len(parts) // 2)) if size > 1 else 0
    for simpler in _simpler(scenario):
        tried = msgspec.structs.replace(scenario, **simpler)
        if tries < most and tried != scenario:
            tries += 1
            scenario = tried if fails(tried) else scenario
    return scenario


def _simpler(scenario: Scenario) -> Iterator[dict[str, object]]:
    """Yields fields that make a run easier to read, one after another."""
    plain = {"n": 1, "cancels": (), "read_pause": 0.0, "deadline_after": None, "tenant": ""}
    yield {"requests": tuple(msgspec.structs.replace(r, **plain) for r in scenario.requests)}
    for field, value in plain.items():
        yield {"requests": tuple(msgspec.structs.replace(r, **{field: value}) for r in scenario.requests)}
    yield {"swap": False}
    yield {"tier_pages": 0}
    yield {"hedge": 0.0}
    yield {"local_max": 0}
    targets = {fault.target for fault in scenario.faults} | {fault.other for fault in scenario.faults}
    for role in ("prefill", "decode"):
        least = max((int(t.rpartition("-")[2]) + 1 for t in targets if t.startswith(role)), default=1)
        yield {role: least}


def as_test(scenario: Scenario) -> str:
    """Returns a regression test that plays the scenario, as text for a file of tests."""
    lines = textwrap.wrap(msgspec.json.encode(scenario).decode(), 100, break_on_hyphens=False)
    quoted = "\n".join(f"    {line!r}" for line in lines)
    return (
        "import msgspec\n\nfrom baton.drill.run import play\nfrom baton.drill.scenario import Scenario\n\n"
        f"FOUND = (\n{quoted}\n)\n\n\n"
        f"def test_what_seed_{scenario.seed}_found_holds() -> None:\n"
        "    verdict = play(msgspec.json.decode(FOUND, type=Scenario))\n"
        "    assert verdict.held, verdict.violations\n"
    )


def _close(loop: SeededLoop) -> None:
    """Ends what is left without running it: a run's remains must not cost or disturb the next one."""
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    loop.set_exception_handler(lambda loop, context: None)
    with contextlib.suppress(NothingLeft, TimeoutError, asyncio.CancelledError):
        loop.run_until_complete(asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5.0))
    asyncio.set_event_loop(None)
    loop.close()
