"""A simulated worker slot: what the lives that fill it one after another have in common.

Knows nothing of what a life does.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from baton.drill.checks.watch import Witnesses
from baton.drill.machines.clock import MachineClock
from baton.drill.machines.cores import MachineCores
from baton.drill.machines.network import Network
from baton.drill.parts.adapters import SimulatedFiles
from baton.drill.parts.aims import Aims
from baton.drill.parts.engine import SimulatedPace
from baton.drill.parts.tier import TierHealth
from baton.drill.scenario import Request, Scenario

Tell = Callable[[str, str], None]  # who, and what happened


@dataclass(eq=False)
class Slot:
    """Holds what the lives of a worker slot have in common, and what faults change of it.

    ``slot`` is its name, the role that it began with and a number; ``role`` is its role now. ``weights`` and
    ``changes`` count how its configuration was changed.
    """

    slot: str
    role: str
    scenario: Scenario
    network: Network
    witnesses: Witnesses
    tell: Tell
    aims: Aims
    adapters: SimulatedFiles | None = None
    disks: Path = Path("/nowhere")
    cores: MachineCores | None = None  # of its machine, where engines lend one another some
    weights: int = field(default=0, init=False)
    changes: int = field(default=0, init=False)
    wall_ahead_s: float = field(default=0.0, init=False)
    pace: SimulatedPace = field(init=False)
    tier_health: TierHealth = field(default_factory=TierHealth, init=False)
    clock: MachineClock = field(default_factory=MachineClock, init=False)

    def __post_init__(self) -> None:
        self.rng = random.Random(f"{self.scenario.seed} {self.slot}")
        self.weights = 2 * self.model  # those of another model are others
        paces = self.scenario.paces or (1.0,)
        self.pace = SimulatedPace(paces[self.model % len(paces)], self.slot in self.scenario.keep_roles)
        self.requests: dict[int, Request] = {request.number: request for request in self.scenario.requests}

    @property
    def began_as(self) -> tuple[str, int]:
        """Returns the role that the slot began with, and its number among those of that role."""
        role, _, number = self.slot.rpartition("-")
        return role, int(number)

    @property
    def model(self) -> int:
        """Returns the index of the model that the slot serves."""
        return self.began_as[1] % self.scenario.models

    @property
    def hosts(self) -> int:
        """Returns how many hosts the ranks of the slot's workers are on."""
        role, number = self.began_as
        counts = self.scenario.host_counts or (1,)
        return counts[(number + (role == "decode")) % len(counts)]
