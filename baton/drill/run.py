"""Plays a scenario, and shrinks a failing scenario to a smaller one that still fails."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import random
import textwrap
import time
import traceback
from collections.abc import Callable, Iterator

import msgspec
from fastapi.dependencies import models

from baton.drill.checks.complaints import Complaints
from baton.drill.language.oracle import Sight
from baton.drill.loop import Halted, RunEnds, SeededLoop
from baton.drill.machines.clock import DriftingLoop
from baton.drill.scenario import Scenario
from baton.drill.story import Story
from baton.drill.world import World


class Verdict(msgspec.Struct, frozen=True):
    """The result of one simulated run."""

    seed: int
    violations: tuple[str, ...]  # empty if every invariant held
    answered: int  # choices; likewise ``failed``, ``cancelled``
    failed: int
    refused: int  # requests for want of room, time or rate
    cancelled: int
    virtual_s: float  # seconds that passed in the simulation
    took_s: float  # CPU seconds that the run took really
    turns: int  # of the event loop
    digest: str  # hash of the story
    lines: tuple[str, ...] = ()  # the story, if it was kept
    met: dict[str, int] = {}  # number of faults, by "KIND ROLE PHASE" of what their targets did
    cancelled_at: tuple[tuple[str, int], ...] = ()  # (file, line) of the awaits at which tasks were cancelled

    @property
    def held(self) -> bool:
        """Returns whether every invariant held."""
        return not self.violations


def play(scenario: Scenario, keep_story: bool = False, first_only: bool = False) -> Verdict:
    """Runs ``scenario`` on an event loop of its own and returns its verdict; failures become violations.

    ``keep_story`` keeps the story's lines; with ``first_only`` the first violation ends the run.
    """
    with uncollected():
        return _played(scenario, keep_story, first_only)


def _played(scenario: Scenario, keep_story: bool, first_only: bool) -> Verdict:
    began, story = time.process_time(), Story(keep_story)
    rng = random.Random(f"loop {scenario.seed}")
    drifts = any(fault.kind == "drift" for fault in scenario.faults)
    loop = DriftingLoop(rng) if drifts else SeededLoop(rng)
    world = World(scenario, story, loop, first_only)
    judge = world.judge
    with prepared(world):
        try:
            loop.run_until_complete(world.run())
        except Halted:
            assert judge.violations, "only a violation halts a run"
        except RunEnds as stuck:
            judge.violated(f"the cluster stands still: {stuck}")
        except Exception as error:
            judge.violated(f"the run fails: {error!r} at {_place(error)}")
    return Verdict(
        scenario.seed,
        tuple(judge.violations),
        judge.answered,
        judge.failed,
        world.queues.count(),
        judge.cancelled,
        loop.true_time(),
        time.process_time() - began,
        loop.turns,
        story.digest,
        tuple(story.lines),
        dict(world.coverage.met),
        tuple(sorted(world.coverage.cancelled_at)),
    )


@contextlib.contextmanager
def prepared(world: World) -> Iterator[None]:
    """Prepares the process for a run of ``world``: its loop, the library's randomness, and errors in the log, which
    are violations. Ends the loop and frees the world's memory afterwards.
    """
    loop, scenario = world.loop, world.scenario
    asyncio.set_event_loop(loop)
    before = random.getstate()
    random.seed(f"library {scenario.seed}")  # redis-py draws its pauses between retries
    complaints, product = Complaints(world.judge, scenario.faults), logging.getLogger("baton")
    product.addHandler(complaints)
    propagates, product.propagate = product.propagate, False
    try:
        yield
    finally:
        product.removeHandler(complaints)
        product.propagate = propagates
        random.setstate(before)
        end_loop(loop)
        world.close()
        loop.coverage = None


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Collects no cyclic garbage during a run, and all of the run's at its end.

    Collections take a tenth of a run's time, and come when the process has made enough objects, whoever made them.
    """
    enabled = gc.isenabled()
    gc.disable()
    gc.freeze()  # so that the collection at the end looks at the run's objects alone
    try:
        yield
    finally:
        _forget_routes()
        gc.collect()
        gc.unfreeze()
        if enabled:
            gc.enable()


def _forget_routes() -> None:
    """Empties FastAPI's caches of what kind of function each route is: they keep the routers of past runs alive."""
    for cached in vars(models).values():
        if isinstance(cached, functools._lru_cache_wrapper):
            cached.cache_clear()


def shrink(scenario: Scenario, fails: Callable[[Scenario], bool], most: int = 300) -> Scenario:
    """Returns a smaller scenario for which ``fails`` holds, with faults, requests, batches and special settings
    left out.

    ``fails`` is called at most ``most`` times.
    """
    tries = 0
    for field in ("faults", "requests", "batches", "adapters", "pins", "scales", "placer_dies"):
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
    for simpler in SIMPLER:
        tried = simpler(scenario)
        if tries < most and tried != scenario:
            tries += 1
            scenario = tried if fails(tried) else scenario
    return scenario


def _plain(**fields: object) -> Callable[[Scenario], Scenario]:
    """Returns a step that sets ``fields`` of every request to these values."""

    def simpler(scenario: Scenario) -> Scenario:
        requests = tuple(msgspec.structs.replace(request, **fields) for request in scenario.requests)
        return msgspec.structs.replace(scenario, requests=requests)

    return simpler


def _with(**fields: object) -> Callable[[Scenario], Scenario]:
    return lambda scenario: msgspec.structs.replace(scenario, **fields)


def _fewer(role: str) -> Callable[[Scenario], Scenario]:
    """Returns a step that keeps only the workers of ``role`` up to the last that a fault names, at least one."""

    def simpler(scenario: Scenario) -> Scenario:
        targets = {fault.target for fault in scenario.faults} | {fault.other for fault in scenario.faults}
        names = {target.partition("/")[0] for target in targets}
        least = max((int(name.rpartition("-")[2]) + 1 for name in names if name.startswith(role)), default=1)
        return msgspec.structs.replace(scenario, **{role: least})

    return simpler


PLAIN: dict[str, object] = {
    "adapter": "",
    "stops": (),
    "over_http": "",
    "over_grpc": False,
    "tensors": False,
    "ranking": None,
    "n": 1,
    "cancels": (),
    "read_pause": 0.0,
    "deadline_after": None,
    "slo_ttft_s": 0.0,
    "priority": 0,
    "tenant": "",
    "key": None,
}
# Steps by which a run gets easier to read; each is tried on what the steps before it have left.
SIMPLER = (
    _plain(**PLAIN),
    lambda scenario: _plain(tenant="", key=None)(_with(keys=())(scenario)),
    _plain(messages=(), tools="", thinks=False, anthropic=False, responses=False),
    *(_plain(**{field: value}) for field, value in PLAIN.items()),
    *(
        _with(**{field: value})
        for field, value in (
            ("swap", False),
            ("tier_pages", 0),
            ("disk_pages", 0),
            ("drafts_right", 0.0),
            ("page_kinds", ()),
            ("host_counts", ()),
            ("machines", 0),
            ("sight", Sight()),
            ("hedge", 0.0),
            ("local_max", 0),
            ("controller", False),
            ("short_tokens", 0),
            ("max_queue", 10_000),
            ("max_inflight_bytes", 1 << 30),
        )
    ),
    _fewer("prefill"),
    _fewer("decode"),
)


def as_test(scenario: Scenario) -> str:
    """Returns the Python source of a regression test that plays ``scenario``."""
    lines = textwrap.wrap(msgspec.json.encode(scenario).decode(), 100, break_on_hyphens=False)
    quoted = "\n".join(f"    {line!r}" for line in lines)
    return (
        "import msgspec\n\nfrom baton.drill.run import play\nfrom baton.drill.scenario import Scenario\n\n"
        f"FOUND = (\n{quoted}\n)\n\n\n"
        f"def test_what_seed_{scenario.seed}_found_holds() -> None:\n"
        "    verdict = play(msgspec.json.decode(FOUND, type=Scenario))\n"
        "    assert verdict.held, verdict.violations\n"
    )


def _place(error: BaseException) -> str:
    """Returns the innermost file and line at which an error was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "an unknown place"


def end_loop(loop: SeededLoop) -> None:
    """Cancels the tasks left on ``loop``, gives them at most 5 virtual seconds to end, and closes the loop."""
    loop.set_exception_handler(lambda loop, context: None)
    loop.go_on()
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        with contextlib.suppress(RunEnds):
            loop.run_until_complete(asyncio.wait(tasks, timeout=5.0))
    asyncio.set_event_loop(None)
    loop.close()
