"""Checks a router's records of its decisions: turns of a session go where its last one was decoded, unless that
costs more, and who leaves in order isn't taken for a worker that failed.

Knows nothing of how a policy chooses: it reads the ways that a decision lists, and their costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton.drill.checks.watch import Violated
from baton.protos.errors import WorkerLost
from baton.router.observe.decisions import DecisionRecord, RecordObserver
from baton.router.observe.trail import PlacementRecord
from baton.router.policies import RoutingDecision
from baton.router.request.request import ChoiceSummary, RouterRequest

Session = tuple[str, str, str, str]  # the tenant, the model, the adapter and the session's name
TERM = "session"  # by which a decision says that a way leads home
ROUNDED = 1e-9  # by which two costs that are equal may differ


@dataclass(eq=False)
class Turn:
    """A request that is open: its record, and the worker that decoded its session's last turn, "" for none.

    ``sure`` says that no other turn of the session has ended since, or will before it is placed.
    """

    record: DecisionRecord
    home: str = ""
    sure: bool = field(default=True)


class PlacementWitness:
    """Watches the requests of one life of a router, as long as it is ``alive``. ``meter`` is told of records as
    well. ``orderly`` says that no worker fails.
    """

    def __init__(
        self,
        violated: Violated,
        meter: RecordObserver | None = None,
        orderly: bool = False,
        alive: Callable[[], bool] = lambda: True,
    ) -> None:
        self._violated, self._meter, self._orderly, self._alive = violated, meter, orderly, alive
        self._homes: dict[Session, str] = {}
        self._open: dict[str, Turn] = {}

    def opened(self, record: DecisionRecord) -> None:
        """Stores a request that was opened, and where its session is at home by now."""
        request = record.request
        turn = Turn(record, self._homes.get(_session_of(request), ""))
        for other in self._others(request):
            other.sure = turn.sure = False
        self._open[request.request_id] = turn
        if self._meter is not None:
            self._meter.opened(record)

    def over(self, record: DecisionRecord) -> None:
        """Passes the word that a request is over to the meter."""
        if self._meter is not None:
            self._meter.over(record)

    def ended(self, request: RouterRequest, summary: ChoiceSummary) -> None:
        """Judges the first placement of a choice that has ended; its worker is its session's home from now on."""
        if not self._alive():
            return  # it breaks its own connections
        turn = self._open.get(request.request_id)
        for trail in () if turn is None else turn.record.trails:
            if trail.summary is summary and trail.placements:
                self._hold(turn, trail.placements[0].decision)
                self._blames(request, trail.placements)
        if turn is not None and all(trail.over or trail.summary is summary for trail in turn.record.trails):
            del self._open[request.request_id]
        if request.context.session and summary.decode_worker and summary.completion_tokens:
            self._homes[_session_of(request)] = summary.decode_worker
            for other in self._others(request):
                other.sure = False

    def _blames(self, request: RouterRequest, placements: Sequence[PlacementRecord]) -> None:
        """Reports that a choice left a decode worker, which had it, as one that failed, where none does.

        A prefill worker that left is asked until routers hear of it.
        """
        for placement in placements if self._orderly else ():
            if placement.left_for.startswith(f"{placement.decision.taken.decode}: {WorkerLost.label}:"):
                self._violated(
                    f"request {request.request_id} leaves a worker that hasn't failed: {placement.left_for}"
                )

    def _others(self, request: RouterRequest) -> list[Turn]:
        """Returns the open turns of the request's session, beside itself."""
        if not request.context.session:
            return []
        mine = _session_of(request)
        return [
            turn
            for name, turn in self._open.items()
            if name != request.request_id and _session_of(turn.record.request) == mine
        ]

    def _hold(self, turn: Turn | None, decision: RoutingDecision) -> None:
        assert turn is not None
        request, taken = turn.record.request, decision.taken
        home = [option for option in decision.options if TERM in option.terms]
        led = sorted({option.decode for option in home})
        name = f"request {request.request_id}"
        if len(led) > 1 or (led and not request.context.session):
            self._violated(f"{name}: {led} are its session's home, which is {request.context.session!r}")
        could = {option.decode for option in decision.options}
        if turn.sure and turn.home in could and led != [turn.home]:
            self._violated(f"{name}: {led} is its session's home, whose last turn {turn.home} has decoded")
        if home and TERM not in taken.terms and min(way.cost for way in home) <= taken.cost - ROUNDED:
            self._violated(f"{name}: it goes to {taken.decode}, and the way home costs less")


def _session_of(request: RouterRequest) -> Session:
    own = request.context
    return own.tenant, request.model_id, own.adapter_id, own.session
