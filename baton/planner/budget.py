"""Finds what a budget buys: how many workers of which width (accelerators that share a model) serve the most.

Knows nothing of consoles or of how a plan is made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from baton.cost.profiles import load_profile
from baton.planner.costs.roofline_name import is_roofline, parse
from baton.planner.costs.worker import WorkerCosts, worker_costs
from baton.planner.plan import Plan
from baton.protos.errors import ConfigError

LEAST = 2  # workers a ratio needs
MOST = 4096  # workers whose ratios are swept, because each is simulated


class Budget(msgspec.Struct, frozen=True):
    """Holds a budget, exactly one of: workers, accelerators, dollars per hour (at ``price`` per accelerator and
    hour), or watts.

    Raises ConfigError otherwise.
    """

    workers: int = 0
    accelerators: int = 0
    dollars: float = 0.0
    watts: float = 0.0
    price: float | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("workers", "accelerators", "dollars", "watts") if getattr(self, name)]
        if len(given) != 1:
            said = " and ".join(given) or "none"
            text = f"the budget is one of --workers, --accelerators, --dollars and --watts, not {said}"
            raise ConfigError(text, "workers")
        for name in (*given, "price"):
            value = getattr(self, name) or 0.0
            if not math.isfinite(value) or value < 0:
                raise ConfigError(f"{name} is {value:g}; it must be a number above 0", name)
        if self.dollars and not self.price:
            raise ConfigError("a budget in $ per hour needs --price, per accelerator and hour", "price")

    def buys(self, costs: WorkerCosts) -> int:
        """Returns the number of workers of that kind that the budget buys.

        Raises ConfigError if their watts are needed and unknown.
        """
        if self.workers:
            return self.workers
        if self.watts:
            if not costs.watts:
                raise ConfigError(f"{costs.about}: its profile has no watts; give another budget", "watts")
            return whole_parts(self.watts, costs.watts)
        if self.dollars:
            return whole_parts(self.dollars, (self.price or 0.0) * costs.accelerators)
        return self.accelerators // costs.accelerators


def whole_parts(whole: float, part: float) -> int:
    """Returns how many times ``part`` fits into ``whole``; a multiple isn't one less for its rounding."""
    return math.floor(whole / part * (1 + 1e-9))


class WidthOutcome(msgspec.Struct, frozen=True):
    """Describes one width that was tried: its best ratio and goodput (good requests/s), or the ``reason`` why it is
    impossible.
    """

    profile: str
    workers: int
    ratio: str = ""
    goodput: float = 0.0
    attainment: float = 0.0
    reason: str = ""


def of_widths(profile: str, widths: Sequence[int]) -> list[str]:
    """Returns the profile's name once per width, with that many accelerators, or ranks, per worker; the name alone
    if ``widths`` is empty.

    Raises ConfigError for a profile that is neither a roofline nor says what ranks cost.
    """
    if not widths:
        return [profile]
    ranks = None if is_roofline(profile) or Path(profile).is_dir() else load_profile(profile).ranks
    if min(widths) >= 1 and ranks is not None:
        return [f"{profile}@{ranks.shared}{width}" for width in widths]
    if not is_roofline(profile) or min(widths) < 1:
        text = f"{profile!r}: only a roofline profile, or one that was measured with ranks, has several widths"
        raise ConfigError(text, "widths")
    return [str(msgspec.structs.replace(parse(profile), count=width)) for width in widths]


def require_runnable(costs: WorkerCosts) -> None:
    """Raises ConfigError if Baton's engine can't run such a worker."""
    if costs.unsupported:
        remedy = "plan for one that can, or add --hypothetical to plan for another engine"
        text = f"{costs.about}: {costs.unsupported}; {remedy}"
        raise ConfigError(text, "profile")


def spend(
    budget: Budget,
    profiles: Sequence[str],
    planned: Callable[[WorkerCosts, int], Plan],
    hypothetical: bool = False,
) -> tuple[Plan, tuple[WidthOutcome, ...]]:
    """Returns the plan with the most good requests among ``profiles`` within the budget, and each one's outcome.

    ``planned(costs, workers)`` makes one plan. ``hypothetical``: plan also workers that Baton's engine can't run.
    Raises ConfigError if none is possible.
    """
    plans: list[Plan] = []
    tried: list[WidthOutcome] = []
    for profile in profiles:
        try:
            costs = worker_costs(profile)
            if not hypothetical:
                require_runnable(costs)
            workers = budget.buys(costs)
        except ConfigError as error:
            if len(profiles) == 1:
                raise
            tried.append(WidthOutcome(profile, 0, reason=str(error)))
            continue
        if workers < LEAST:
            tried.append(
                WidthOutcome(profile, workers, reason=f"the budget buys {workers}, and a ratio needs {LEAST}")
            )
            continue
        if workers > MOST:
            reason = f"the budget buys {workers}, and ratios of at most {MOST} workers are swept"
            tried.append(WidthOutcome(profile, workers, reason=reason))
            continue
        found = planned(costs, workers)
        score = found.chosen.score
        plans.append(found)
        tried.append(WidthOutcome(profile, workers, found.chosen.name, score.goodput, score.attainment))
    if not plans:
        raise ConfigError("; ".join(f"{t.profile}: {t.reason}" for t in tried), "workers")
    return max(plans, key=lambda p: p.chosen.score.good), tuple(tried)
