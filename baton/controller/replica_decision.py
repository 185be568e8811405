"""Decides whether to add or remove workers, if changing roles can't help: one look in, one decision out. Pure.

Knows nothing of Redis, of Ray, or of whether there is room. The rules, by priority:

1. Without ``most_workers`` nothing is ever added or removed; nor while the ratio is pinned. Numbers that
   an operator set hold for ``payback_s``.
2. Workers that were asked for and aren't here yet (or not gone yet) are waited for; roles may change meanwhile.
3. Roles first: while another ratio of the same workers carries the load, none is added.
4. Add as few workers as bring the fuller role below ``high``, if the best ratio is at ``high`` or above, they pay
   for their start within ``payback_s``, and ``scale_confirm`` looks in a row say so.
5. Remove one, if without it both roles stay below ``low`` and nothing waits, for ``scale_down_looks`` looks in a
   row; not within ``payback_s`` of a change: a costly start isn't undone at once.
6. If the advice on ratios is withheld, none is removed, and one is added only for queues that are there.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from baton.controller.pressure import Pressure, every_ratio, pressure
from baton.controller.ratio_decision import RatioDecision, RatioObservation, undone_work


class ReplicaSettings(msgspec.Struct, frozen=True):
    """Holds the settings of the rules above; names that end in ``_s`` are seconds."""

    least_workers: int = 2
    most_workers: int = 0
    high: float = 0.85  # pressure from which on workers are added
    low: float = 0.5  # pressure below which one is removed
    horizon_s: float = 30.0
    most_moves: int = 2  # workers added at once
    scale_confirm: int = 3  # looks in a row before adding
    scale_down_looks: int = 12  # looks in a row before removing
    scale_cooldown_s: float = 60.0
    payback_s: float = 300.0
    start_s: float = 60.0  # that a worker's start takes, until measured


class PlannedSlots(msgspec.Struct, frozen=True):
    """Holds the numbers of slots last asked for, by the role that they were planned for."""

    prefill: int
    decode: int
    last_prefill: str = ""  # role now played in the last prefill slot, the next to be removed; "": it isn't ready
    last_decode: str = ""  # likewise of the last decode slot
    awaited: tuple[str, ...] = ()  # slots that have yet to come or to go

    @property
    def workers(self) -> int:
        """Returns the number of slots of both roles."""
        return self.prefill + self.decode


class ReplicaHistory(msgspec.Struct, frozen=True):
    """Holds what earlier looks left to remember."""

    wanted: int = 0  # last asked for: 1 more workers, -1 fewer
    times: int = 0  # looks in a row that asked for it
    changed_at: float = float("-inf")
    by_operator: bool = False  # the last change was not the controller's
    failed_at: float = float("-inf")  # when workers that were asked for were given up
    start_s: float = 0.0  # mean seconds of a start; 0: none was seen

    def changed(self, at: float, by_operator: bool = False) -> ReplicaHistory:
        """Returns the history after other numbers of workers were asked for at time ``at``."""
        return msgspec.structs.replace(self, wanted=0, times=0, changed_at=at, by_operator=by_operator)

    def started(self, seconds: float) -> ReplicaHistory:
        """Returns the history after workers that were asked for became ready, ``seconds`` later."""
        mean = 0.7 * self.start_s + 0.3 * seconds if self.start_s else seconds
        return msgspec.structs.replace(self, start_s=mean)

    def failed(self, at: float) -> ReplicaHistory:
        """Returns the history after workers that were asked for didn't come in time."""
        return msgspec.structs.replace(self, wanted=0, times=0, failed_at=at)


class ReplicaDecision(msgspec.Struct, frozen=True):
    """Describes a decision: "hold", "add" or "remove", to ``prefill`` and ``decode`` slots."""

    kind: str
    prefill: int
    decode: int
    reason: str = ""  # may be empty on a hold
    after: tuple[int, int] = (0, 0)  # (prefill, decode) workers by role once done


def decide_replicas(
    look: RatioObservation,
    decided: RatioDecision,
    placed: PlannedSlots,
    history: ReplicaHistory,
    settings: ReplicaSettings,
) -> tuple[ReplicaDecision, ReplicaHistory]:
    """Returns the decision for this look, and the history to pass to the next.

    ``decided`` is the same look's decision on roles.
    """
    calm = _seen(history, 0)
    if not settings.most_workers or look.pin is not None or look.prefill < 1 or look.decode < 1:
        return _hold(placed), calm
    if placed.awaited:
        return _hold(placed, f"waiting for {', '.join(placed.awaited)}"), calm
    if placed.workers < settings.least_workers:
        return _enough(look, placed, history, settings)
    if look.workers is None or look.pending or decided.kind != "hold":
        return _hold(placed), calm
    if decided.withheld:
        return _by_queues(look, decided, placed, history, settings)
    table = decided.table or every_ratio(
        look.demand, look.backlog, look.workers, look.prefill + look.decode, settings.horizon_s
    )
    best = min(table, key=lambda p: p.worst)
    if best.worst >= settings.high:
        return _more(look, best, placed, history, settings)
    return _fewer(look, placed, history, settings)


# ---- more --------------------------------------------------------------------------------------------------


def _enough(
    look: RatioObservation, placed: PlannedSlots, history: ReplicaHistory, settings: ReplicaSettings
) -> tuple[ReplicaDecision, ReplicaHistory]:
    """Adds workers up to the minimum, evenly over the roles if nothing else says of which."""
    history, count = _seen(history, 1), settings.least_workers - placed.workers
    if wait := _not_yet(look, history, 1, settings):
        return _hold(placed, f"there are fewer than {settings.least_workers} workers; {wait}"), history
    prefill = max(0, min(count, (look.prefill + look.decode + count) // 2 - look.prefill))
    wider = Pressure(look.prefill + prefill, look.decode + count - prefill, 0.0, 0.0)
    return _asked(look, placed, wider, f"no fewer than {settings.least_workers} workers"), history


def _more(
    look: RatioObservation, best: Pressure, placed: PlannedSlots, history: ReplicaHistory, settings: ReplicaSettings
) -> tuple[ReplicaDecision, ReplicaHistory]:
    full = f"every ratio of {look.prefill + look.decode} workers is at least {best.worst:.0%} full"
    room = min(settings.most_moves, settings.most_workers - placed.workers)
    if room < 1:
        return _hold(placed, f"{full}, and there may be no more than {settings.most_workers} workers"), _seen(
            history, 0
        )
    wider = _fewest(look, room, settings)
    count = wider.prefill_workers + wider.decode_workers - look.prefill - look.decode
    gain = settings.payback_s * undone_work(best, wider)
    cost = count * (history.start_s or settings.start_s)
    then = f"{wider.prefill_workers}:{wider.decode_workers} would be {wider.worst:.0%}"
    priced = f"gains {gain:.0f} worker-seconds in {settings.payback_s:g} s, costs {cost:.0f}"
    if gain < cost:
        return _hold(placed, f"{full}; {then}: {priced}"), _seen(history, 0)
    history = _seen(history, 1)
    if wait := _not_yet(look, history, settings.scale_confirm, settings):
        return _hold(placed, f"{full}; {then}; {wait}"), history
    return _asked(look, placed, wider, f"{full}; {then}: {priced}"), history


def _fewest(look: RatioObservation, room: int, settings: ReplicaSettings) -> Pressure:
    """The ratio to head for: with the fewest workers more that carry the load, or else with ``room`` more."""
    found = None
    for count in range(1, room + 1):
        found = min(_wider(look, count, settings), key=lambda p: p.worst)
        if found.worst < settings.high:
            break
    assert found is not None, "room is at least one"
    return found


def _wider(look: RatioObservation, count: int, settings: ReplicaSettings) -> Iterator[Pressure]:
    """Yields the pressure of every way of sharing ``count`` more workers among the roles."""
    assert look.workers is not None
    for prefill in range(count + 1):
        yield pressure(
            look.demand,
            look.backlog,
            look.workers,
            look.prefill + prefill,
            look.decode + count - prefill,
            settings.horizon_s,
        )


def _by_queues(
    look: RatioObservation,
    decided: RatioDecision,
    placed: PlannedSlots,
    history: ReplicaHistory,
    settings: ReplicaSettings,
) -> tuple[ReplicaDecision, ReplicaHistory]:
    """Decides without the simulated twin: adds a worker if what waits is more than both roles can do."""
    assert look.workers is not None
    queued = look.workers.prompt_seconds(look.backlog.unread_tokens, 0.0) / look.prefill
    seats = (look.backlog.running + look.backlog.unseated) / (look.workers.max_batch * look.decode)
    reading, writing = queued > look.workers.ttft_s, seats > 1.0
    helped_by_roles = (reading and seats < settings.low) or (
        writing and queued < settings.low * look.workers.ttft_s
    )
    if not (reading or writing) or helped_by_roles or placed.workers >= settings.most_workers:
        return _hold(placed), _seen(history, 0)
    why = f"prompts wait {queued:.1f} s for prefill, and decode is {seats:.0%} taken ({decided.withheld})"
    history = _seen(history, 1)
    if wait := _not_yet(look, history, settings.scale_confirm, settings):
        return _hold(placed, f"{why}; {wait}"), history
    prefill = int(queued / look.workers.ttft_s > seats)
    return _asked(look, placed, Pressure(look.prefill + prefill, look.decode + 1 - prefill, 0.0, 0.0), why), history


# ---- fewer -------------------------------------------------------------------------------------------------


def _fewer(
    look: RatioObservation, placed: PlannedSlots, history: ReplicaHistory, settings: ReplicaSettings
) -> tuple[ReplicaDecision, ReplicaHistory]:
    if placed.workers <= settings.least_workers or look.backlog.unseated:
        return _hold(placed), _seen(history, 0)
    ways = sorted(_without_one(look, placed, settings), key=lambda way: way[0].worst)
    if not ways or ways[0][0].worst >= settings.low:
        return _hold(placed), _seen(history, 0)
    after, prefill, decode = ways[0]
    then = f"{after.prefill_workers}:{after.decode_workers} would be {after.worst:.0%} full"
    history = _seen(history, -1)
    if wait := _not_yet(look, history, settings.scale_down_looks, settings):
        return _hold(placed, f"{then}; {wait}"), history
    pair = after.prefill_workers, after.decode_workers
    return ReplicaDecision("remove", prefill, decode, f"{then}: one worker less carries the load", pair), history


def _without_one(
    look: RatioObservation, placed: PlannedSlots, settings: ReplicaSettings
) -> Iterator[tuple[Pressure, int, int]]:
    """Pressure after, and the numbers of slots to ask for: the last slot of either kind may go."""
    assert look.workers is not None
    for role, prefill, decode in (
        (placed.last_prefill, placed.prefill - 1, placed.decode),
        (placed.last_decode, placed.prefill, placed.decode - 1),
    ):
        readers, writers = look.prefill - (role == "prefill"), look.decode - (role == "decode")
        if role and prefill >= 0 and decode >= 1 and readers >= 1 and writers >= 1:
            after = pressure(look.demand, look.backlog, look.workers, readers, writers, settings.horizon_s)
            yield after, prefill, decode


# ---- both --------------------------------------------------------------------------------------------------


def _not_yet(look: RatioObservation, history: ReplicaHistory, needed: int, settings: ReplicaSettings) -> str:
    """Returns why a change that would be better is not made yet; empty if it is."""
    slow = history.wanted < 0 or history.by_operator
    pause = settings.payback_s if slow else settings.scale_cooldown_s
    left = max(
        history.changed_at + max(pause, settings.scale_cooldown_s) - look.at,
        history.failed_at + settings.payback_s - look.at,
    )
    if left > 0:
        return f"{left:.0f} s of cool-down left"
    if history.times < needed:
        return f"seen {history.times} of {needed} times"
    return ""


def _seen(history: ReplicaHistory, wanted: int) -> ReplicaHistory:
    times = history.times + 1 if wanted and wanted == history.wanted else int(bool(wanted))
    return msgspec.structs.replace(history, wanted=wanted, times=times)


def _hold(placed: PlannedSlots, reason: str = "") -> ReplicaDecision:
    return ReplicaDecision("hold", placed.prefill, placed.decode, reason)


def _asked(look: RatioObservation, placed: PlannedSlots, wider: Pressure, reason: str) -> ReplicaDecision:
    pair = wider.prefill_workers, wider.decode_workers
    return ReplicaDecision(
        "add", placed.prefill + pair[0] - look.prefill, placed.decode + pair[1] - look.decode, reason, pair
    )
