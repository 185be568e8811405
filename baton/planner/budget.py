"""What a budget buys: how many workers of which width (accelerators that share one copy of the model) do the most.

Knows nothing of consoles or of how a plan is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from baton.cost.profiles import load_profile
from baton.planner.costs.roofline_name import is_roofline, parse
from baton.planner.costs.worker import WorkerCosts, worker_costs
from baton.planner.plan import Plan
from baton.protos.errors import ConfigError

LEAST = 2  # workers a ratio needs


class Budget(msgspec.Struct, frozen=True):
    """Exactly one is given: workers, accelerators, $ per hour (at ``price`` per accelerator and hour), or watts."""

    workers: int = 0
    accelerators: int = 0
    dollars: float = 0.0
    watts: float = 0.0
    price: float | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("workers", "accelerators", "dollars", "watts") if getattr(self, name)]
        if len(given) != 1:
            said = " and ".join(given) or "none"
            raise ConfigError(f"a budget is one of workers, accelerators, dollars and watts, not {said}", "workers")
        if self.dollars and not self.price:
            raise ConfigError("a budget in $ per hour needs --price, per accelerator and hour", "price")

    def buys(self, costs: WorkerCosts) -> int:
        """Workers of that kind. Raises ConfigError where nothing says what one draws."""
        if self.workers:
            return self.workers
        if self.watts:
            if not costs.watts:
                raise ConfigError(f"{costs.about}: its profile has no watts; give another budget", "watts")
            return int(self.watts / costs.watts)
        if self.dollars:
            return int(self.dollars / ((self.price or 0.0) * costs.accelerators))
        return self.accelerators // costs.accelerators


class WidthOutcome(msgspec.Struct, frozen=True):
    """One width: what it came to, or why it can't be."""

    profile: str
    workers: int
    ratio: str = ""
    goodput: float = 0.0
    attainment: float = 0.0
    reason: str = ""


def of_widths(profile: str, widths: Sequence[int]) -> list[str]:
    """Returns the same profile with so many accelerators, or ranks, per worker; as it is where none are given.

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
    """Raises ConfigError where Baton's engine can't be such a worker."""
    if costs.lacks:
        text = (
            f"{costs.about}: {costs.lacks}; plan for one that can, or add --hypothetical to plan for another engine"
        )
        raise ConfigError(text, "profile")


def spend(
    budget: Budget,
    profiles: Sequence[str],
    planned: Callable[[WorkerCosts, int], Plan],
    hypothetical: bool = False,
) -> tuple[Plan, tuple[WidthOutcome, ...]]:
    """Returns the plan with the most goodput, and all that were tried. Raises ConfigError where none can be.

    ``hypothetical``: workers that Baton's engine can't be are planned too.
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
        found = planned(costs, workers)
        score = found.chosen.score
        plans.append(found)
        tried.append(WidthOutcome(profile, workers, found.chosen.name, score.goodput, score.attainment))
    if not plans:
        raise ConfigError("; ".join(f"{t.profile}: {t.reason}" for t in tried), "workers")
    return max(plans, key=lambda p: p.chosen.score.goodput), tuple(tried)
