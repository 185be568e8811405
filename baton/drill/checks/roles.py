"""Checks what operators are told of workers' roles and of drains, and that routers change roles by turns.

Knows nothing of how a role changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from baton.drill.checks.watch import Violated
from baton.drill.scenario import Scenario
from baton.protos.errors import BatonError, DeadlineExceeded, InvalidRequest

Ratio = tuple[int, int]  # numbers of prefill and decode workers
# Seconds beyond its grace in which a drain is answered: those in which what it cancels ends, and the call's own.
DRAINED_S = 1.0 + 0.6
WAY_DELAYS = 6  # network delays of the call


class RoleWitness:
    """Judges changes of roles in a run of ``scenario``, and drains; with none it passes all.

    ``changing`` returns the names of the routers that wait for a worker's new role now.
    """

    def __init__(
        self,
        scenario: Scenario | None = None,
        violated: Violated = lambda text: None,
        changing: Callable[[], Sequence[str]] = lambda: (),
    ) -> None:
        self._scenario, self._violated, self._changing = scenario, violated, changing
        self._formed: Ratio | None = None  # the ratio that was formed last, if no role was changed since

    def begins(self, slot: str) -> None:
        """Checks, as the worker of ``slot`` begins to change its role, that one router alone changes roles."""
        names = self._changing() if self._scenario is not None and self._scenario.keeps_leases else ()
        if len(names) > 1:
            self._violated(f"{' and '.join(names)} change roles at once, as {slot} begins another one")

    def answered(self, formed: Ratio | None, error: BatonError | None = None) -> None:
        """Takes an operator's answer: the ratio that was formed, None for a single role, or an ``error``."""
        if self._scenario is None:
            return
        if isinstance(error, DeadlineExceeded) and self._scenario.tells_roles:
            self._violated(f"nobody hears why a worker keeps its role: {error.message}")
        if not isinstance(error, InvalidRequest):  # which changes nothing
            self._formed = formed

    def drained(self, name: str, grace_s: float, took_s: float) -> None:
        """Takes the answer to a drain of process ``name`` with ``grace_s`` seconds, after ``took_s`` seconds."""
        own = self._scenario
        if own is None or not own.lets_leave:
            return
        if took_s > grace_s + DRAINED_S + WAY_DELAYS * own.delay_s:
            self._violated(f"{name} says after {took_s:.1f} s that it has drained, which had {grace_s:.1f} s")

    def at_rest(self, now: Ratio) -> None:
        """Checks that workers have the ratio that an operator was told last, if nobody changed it since."""
        settles = self._scenario is not None and self._scenario.settles_ratio
        if settles and self._formed is not None and self._formed != now:
            told = "{}:{}".format(*self._formed)
            self._violated(f"at rest: there are {now[0]}:{now[1]} workers, and an operator was told {told} last")
