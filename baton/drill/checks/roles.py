"""Checks what operators are told of workers' roles and of drains, and that routers change roles by turns.

Knows nothing of how a role changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from baton.drill.checks.watch import Violated
from baton.drill.scenario import Scenario
from baton.protos.errors import BatonError, DeadlineExceeded, InvalidRequest

Ratio = tuple[int, int]  # numbers of prefill and decode workers
CANCELLED_S = 1.0  # seconds for which a drain waits for the end of what it has cancelled
DRAINED_S = CANCELLED_S + 0.6  # seconds beyond its grace in which a drain is answered, with the call's own
WAY_DELAYS = 6  # network delays of the call
# Seconds, and network delays, in which a router sees that a worker serves its next role, and says so.
SEEN_S, SEEN_DELAYS = 1.5, 40
ASKED_S, ASKED_DELAYS = 0.01, 4  # likewise, in which a worker hears that it is asked for a role


class RoleWitness:
    """Judges changes of roles in a run of ``scenario``, and drains; with none it passes all.

    ``changing`` returns the workers for whose new role each router waits now, by the router's name; ``now`` the
    true time in seconds.
    """

    def __init__(
        self,
        scenario: Scenario | None = None,
        violated: Violated = lambda text: None,
        changing: Callable[[], Mapping[str, Sequence[str]]] = dict,
        now: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._scenario, self.violated, self._changing, self._now = scenario, violated, changing, now
        self._formed: Ratio | None = None  # the ratio that was formed last, if no role was changed since
        self._half = False  # whether a change of roles failed midway
        self._turn = "", 0.0  # the router that began its turn to change roles last, and when
        self._served: dict[str, float] = {}  # when a worker began to serve its next role

    def has_turn(self, router: str) -> None:
        """Takes that ``router`` has its turn to change roles from now on."""
        self._turn = router, self._now()

    def begins(self, slot: str) -> None:
        """Checks, as the worker of ``slot`` begins to change its role, that one router alone changes roles, and
        that it is asked for in that router's turn.
        """
        own = self._scenario
        if own is None or not own.keeps_leases:
            return
        asking = self._changing()
        names = [name for name, slots in asking.items() if slots]
        if len(names) > 1 and not own.stands_s:
            self.violated(f"{' and '.join(names)} change roles at once, as {slot} begins another one")
        (turn, since), asked = self._turn, [name for name, slots in asking.items() if slot in slots]
        if asked and turn not in asked and self._now() - since > ASKED_S + ASKED_DELAYS * own.delay_s:
            self.violated(f"{slot} begins another role, for which {asked[0]} asks in the turn of {turn}")

    def serves(self, slot: str) -> None:
        """Takes that the worker of ``slot`` serves the role that it was asked for, or its own again."""
        self._served[slot] = self._now()

    def waited(self, slot: str) -> None:
        """Takes that who asked for the role of the worker of ``slot``, which lives on, has the answer now."""
        own, since = self._scenario, self._served.pop(slot, None)
        if own is None or since is None or not own.tells_roles:
            return
        if (waited := self._now() - since) > SEEN_S + SEEN_DELAYS * own.delay_s:
            self.violated(f"{slot} serves its role for {waited:.1f} s before who asked for it hears so")

    def answered(self, formed: Ratio | None, error: BatonError | None = None) -> None:
        """Takes an operator's answer: the ratio that was formed, None for a single role, or an ``error``."""
        if self._scenario is None:
            return
        if isinstance(error, DeadlineExceeded) and self._scenario.tells_roles:
            self.violated(f"nobody hears why a worker keeps its role: {error.message}")
        if not isinstance(error, InvalidRequest):  # which changes nothing
            self._formed, self._half = formed, self._half or error is not None

    def drained(self, name: str, grace_s: float, took_s: float, active: int) -> None:
        """Takes the answer to a drain of process ``name`` with ``grace_s`` seconds, after ``took_s`` seconds, which
        finds it with ``active`` requests.
        """
        if active and took_s < grace_s + CANCELLED_S:
            self.violated(f"{name} says that it has drained, and has {active} requests")
        own = self._scenario
        if own is None or not own.lets_leave:
            return
        if took_s > grace_s + DRAINED_S + WAY_DELAYS * own.delay_s:
            self.violated(f"{name} says after {took_s:.1f} s that it has drained, which had {grace_s:.1f} s")

    def at_rest(self, now: Ratio, pinned: Ratio | None) -> None:
        """Checks that workers have the ratio that an operator was told last, if nobody changed it since, and the
        one that is ``pinned``, if no change has failed midway.
        """
        own = self._scenario
        if own is None or not own.settles_ratio:
            return
        if self._formed is not None and self._formed != now:
            self.violated(
                f"at rest: there are {_said(now)} workers, and an operator was told {_said(self._formed)} last"
            )
        if own.pins_ratio and pinned is not None and pinned != now and not self._half:
            self.violated(f"at rest: there are {_said(now)} workers, and {_said(pinned)} are pinned")


def _said(ratio: Ratio) -> str:
    return "{}:{}".format(*ratio)
