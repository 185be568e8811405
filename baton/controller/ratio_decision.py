"""Decides the next prefill:decode ratio, with a reason: one look at the cluster in, one decision out. Pure.

Knows nothing of workers' names, of Redis or of how a change is made; time and history are passed in. The rules, by
priority:

1. While a change is under way: hold. If nobody plays a role that a worker was planned for, one turns back, unless
   the ratio is pinned. With a pin, no traffic, no cost curves, or a role that can't be measured: hold.
2. Below a pressure of ``high`` the present ratio carries the load: hold.
3. The best ratio has the least pressure on its fuller role; of those within ``NEAR``, the closest to the present.
4. A change must pay: the worker-seconds that are short over ``horizon_s`` against ``change_s`` per moved worker.
5. It must be wanted at ``confirm`` looks in a row (one, if the load is twice what the ratio carries), not sooner
   than ``cooldown_s`` after the last change, and gain twice as much at twice as many looks to reverse the last one;
   each reversal in a row doubles those looks, and the time in which they are asked for. If the load is twice what
   is carried, twice as many workers may change at once, and another change the same way waits half as long.
6. If predictions are off by more than ``error_bound``, their advice is withheld: only measured queues may move a
   worker, one at a time, from an idle role to one with more work waiting than its SLO allows.
"""

from __future__ import annotations

import msgspec

from baton.cluster.advice import RatioPin, TwinError
from baton.controller.pressure import Backlog, Demand, Pressure, WorkerLimits, every_ratio

FAR_OFF = 2.0  # of pressure: no second look is needed
IDLE = 0.5  # share of what a role can do, below which it has little to do
TURN_BACK_S = 60.0  # seconds after a change in which its opposite counts as turning back
CALM_S = 1800.0  # seconds without a change after which it is forgotten that changes were turned back
MOST_TURNS = 4  # changes turned back in a row that still make the next one harder
NEAR = 0.05  # share by which pressures may differ and count as alike


class ControlSettings(msgspec.Struct, frozen=True):
    """Holds the settings of the rules above; names that end in ``_s`` are seconds."""

    high: float = 0.85  # pressure from which on a change is considered
    least_gain: float = 0.10  # share of the pressure that a change must save
    confirm: int = 2  # looks in a row
    cooldown_s: float = 10.0  # between two changes
    change_s: float = 2.0  # that moving one worker takes, until measured
    horizon_s: float = 30.0  # within which queued work shall be done
    most_moves: int = 2  # workers moved at once
    error_bound: float = 0.5  # of the predictions, as a share
    least_samples: int = 16  # answers from which on prediction errors count


class RatioObservation(msgspec.Struct, frozen=True):
    """Describes the cluster at time ``at``, in seconds of any clock: numbers of workers by role, demand and
    backlog.
    """

    at: float
    prefill: int
    decode: int
    demand: Demand
    backlog: Backlog
    workers: WorkerLimits | None  # None: no step times are known yet
    twin: TwinError = TwinError()
    pin: RatioPin | None = None
    pending: bool = False  # a change is under way
    strayed: int = 0  # workers planned for a role that nobody plays now


class History(msgspec.Struct, frozen=True):
    """Holds what earlier looks left to remember."""

    wanted: int = 0  # the direction last asked for: 1 is more prefill
    times: int = 0  # looks in a row that asked for it
    changed_at: float = float("-inf")  # when the last change was made
    changed_by: int = 0  # its direction
    change_s: float = 0.0  # mean seconds of a change; 0: none was seen
    turns: int = 0  # changes in a row of which each turned the one before back

    def changed(self, at: float, by: int, seconds: float) -> History:
        """Returns the history after a change at time ``at`` by ``by`` prefill workers that took ``seconds``."""
        mean = seconds if not self.change_s else 0.7 * self.change_s + 0.3 * seconds
        direction = 1 if by > 0 else -1
        back = direction == -self.changed_by and at - self.changed_at < CALM_S
        return History(0, 0, at, direction, mean, min(MOST_TURNS, self.turns + 1) if back else 0)


class RatioDecision(msgspec.Struct, frozen=True):
    """Describes a decision: "hold", or "rerole" to ``prefill``:``decode`` workers."""

    kind: str
    prefill: int
    decode: int
    reason: str
    best: tuple[int, int] | None = None  # the ratio to head for; None: withheld
    withheld: str = ""  # why there is no advice
    now: Pressure | None = None  # pressure at the present ratio
    table: tuple[Pressure, ...] = ()  # pressure by ratio, from few to many prefill workers


def decide(look: RatioObservation, history: History, settings: ControlSettings) -> tuple[RatioDecision, History]:
    """Returns the decision for this look, and the history to pass to the next."""
    count, idle = look.prefill + look.decode, history_of(history, 0)
    if look.pending:
        return _hold(look, "a change is under way"), idle
    if look.strayed and count > 1:
        return _turn_back(look, history, settings)
    if count < 2:
        return _hold(look, f"{count} worker{'' if count == 1 else 's'} can be given work: there is no choice"), idle
    if look.decode < 1:
        return _hold(look, "no decode worker is here: there is no ratio to turn"), idle
    if look.workers is None:
        return _hold(look, "no cost curves yet: workers have not computed enough", withheld="no cost curves"), idle
    if look.prefill < 1:
        return _hold(look, "no prefill worker is here: there is no ratio to turn"), idle
    if not look.demand.answers and not _queued(look.backlog):
        return _hold(look, "no traffic"), idle
    table = every_ratio(look.demand, look.backlog, look.workers, count, settings.horizon_s)
    now, best = table[look.prefill - 1], _best(table, look.prefill)
    withheld = _withheld(look.twin, settings)
    found = RatioDecision(
        "hold", look.prefill, look.decode, "", None if withheld else _pair(best), withheld, now, table
    )
    if look.pin is not None:
        return _said(found, _pinned(look.pin)), idle
    if withheld:
        return _by_queues(found, look, look.workers, history, settings)
    return _by_twin(found, best, now, look, history, settings)


def history_of(history: History, wanted: int) -> History:
    """Returns ``history`` after a look that wants direction ``wanted``: 1 is more prefill, -1 less, 0 none."""
    times = history.times + 1 if wanted and wanted == history.wanted else int(bool(wanted))
    return msgspec.structs.replace(history, wanted=wanted, times=times)


def _turn_back(
    look: RatioObservation, history: History, settings: ControlSettings
) -> tuple[RatioDecision, History]:
    """A role that nobody plays is no ratio to weigh: prompts hold up answers, or there are no answers."""
    by = 1 if look.prefill < 1 else -1
    why = f"no {'prefill' if by > 0 else 'decode'} worker is left, and {look.strayed} were planned as such"
    found = RatioDecision("hold", look.prefill, look.decode, why)
    if look.pin is not None:
        return _said(found, f"{_pinned(look.pin)}; {why}"), history_of(history, 0)
    history = history_of(history, by)
    if (wait := _not_yet(look, history, settings, 1.0, 1.0)) is not None:
        return _said(found, f"{why}; {wait}"), history
    return _move(found, look, by, f"{why}: one turns back"), history


def _by_twin(
    found: RatioDecision,
    best: Pressure,
    now: Pressure,
    look: RatioObservation,
    history: History,
    settings: ControlSettings,
) -> tuple[RatioDecision, History]:
    by = best.prefill_workers - look.prefill
    says = f"prefill {now.prefill:.0%} full, decode {now.decode:.0%}"
    if by == 0:
        return _said(found, f"{says}: no ratio is better"), history_of(history, 0)
    if now.worst < settings.high:
        stays = msgspec.structs.replace(found, best=_pair(now))  # what is least full of little is chance
        return _said(stays, f"{says}: enough room"), history_of(history, 0)
    gain = (now.worst - best.worst) / now.worst
    short = settings.horizon_s * undone_work(now, best)
    cost = abs(by) * (history.change_s or settings.change_s)
    then = f"{best.prefill_workers}:{best.decode_workers} would be {best.worst:.0%}"
    if gain < settings.least_gain:
        little = f"{gain:.1%} less, and a change must bring {settings.least_gain:.0%}"
        return _said(found, f"{says}, {then}: {little}"), history_of(history, 0)
    if short < cost:
        reason = f"{says}, {then}: gains {short:.1f} worker-seconds, costs {cost:.1f}"
        return _said(found, reason), history_of(history, 0)
    history = history_of(history, 1 if by > 0 else -1)
    if (wait := _not_yet(look, history, settings, now.worst, gain)) is not None:
        return _said(found, f"{says}, {then}; {wait}"), history
    most = settings.most_moves * (2 if now.worst >= FAR_OFF else 1)
    step = max(-most, min(most, by))
    reason = f"{says}; {then}: gains {short:.1f} worker-seconds in {settings.horizon_s:g} s, costs {cost:.1f}"
    return _move(found, look, step, reason), history


def _by_queues(
    found: RatioDecision, look: RatioObservation, workers: WorkerLimits, history: History, settings: ControlSettings
) -> tuple[RatioDecision, History]:
    """Decides without the simulated twin, by queues longer than the SLO beside a role that has little to do."""
    queued = workers.prompt_seconds(look.backlog.unread_tokens, 0.0) / max(look.prefill, 1)
    seats = (look.backlog.running + look.backlog.unseated) / (workers.max_batch * look.decode)
    by = 0
    if queued > workers.ttft_s and seats < IDLE and not look.backlog.unseated and look.decode > 1:
        by, why = 1, f"prompts wait {queued:.1f} s for prefill, and decode is {seats:.0%} taken"
    elif seats > 1.0 and queued < IDLE * workers.ttft_s and look.prefill > 1:
        by, why = -1, f"decode is {seats:.0%} taken, and prompts wait {queued:.1f} s"
    history = history_of(history, by)
    if not by:
        return _said(found, f"no advice: {found.withheld}"), history
    if (wait := _not_yet(look, history, settings, 1.0, 1.0)) is not None:
        return _said(found, f"{why}; {wait}"), history
    return _move(found, look, by, f"by the queues alone ({found.withheld}): {why}"), history


def _not_yet(
    look: RatioObservation, history: History, settings: ControlSettings, worst: float, gain: float
) -> str | None:
    """Returns why a better ratio is not applied yet."""
    since = look.at - history.changed_at
    goes_on = worst >= FAR_OFF and history.wanted == history.changed_by
    cooldown = settings.cooldown_s / 2 if goes_on else settings.cooldown_s
    if since < cooldown:
        return f"{cooldown - since:.0f} s of cool-down left"
    again = 2**history.turns
    turns = history.wanted == -history.changed_by and since < TURN_BACK_S * again
    if turns and gain < 2 * settings.least_gain:
        return "it would turn the last change back for too little"
    needed = settings.confirm * (2 * again if turns else 1) if worst < FAR_OFF else 1
    if history.times < needed:
        return f"seen {history.times} of {needed} times"
    return None


def undone_work(now: Pressure, best: Pressure) -> float:
    """Returns how many workers' worth of work is left undone at ``now`` but would be done at ``best``."""
    over, left = _over(now), _over(best)
    # Between "high" and full, what is short is what bursts will find taken.
    room = (now.worst - best.worst) * (now.prefill_workers + now.decode_workers) / 4
    return max(over - left, min(room, 1.0))


def _over(of: Pressure) -> float:
    """Workers' worth of work beyond what the roles can do."""
    return max(0.0, of.prefill - 1.0) * of.prefill_workers + max(0.0, of.decode - 1.0) * of.decode_workers


def _best(table: tuple[Pressure, ...], prefill: int) -> Pressure:
    least = min(p.worst for p in table)
    alike = [p for p in table if p.worst <= least * (1 + NEAR)]
    return min(alike, key=lambda p: (abs(p.prefill_workers - prefill), p.worst))


def _withheld(twin: TwinError, settings: ControlSettings) -> str:
    if twin.samples < settings.least_samples:
        return ""  # nothing to hold against it yet: curves are the workers' own measurements
    if twin.worst is not None and twin.worst > settings.error_bound:
        return f"the twin is off by {twin.worst:.0%}, its bound is {settings.error_bound:.0%}"
    return ""


def _queued(backlog: Backlog) -> bool:
    return bool(backlog.prefill_tokens or backlog.running or backlog.waiting or backlog.queued)


def _pinned(pin: RatioPin) -> str:
    return f"pinned at {pin.prefill}:{pin.decode} by {pin.by or 'an operator'}"


def _pair(of: Pressure) -> tuple[int, int]:
    return of.prefill_workers, of.decode_workers


def _hold(look: RatioObservation, reason: str, withheld: str = "") -> RatioDecision:
    return RatioDecision("hold", look.prefill, look.decode, reason, None, withheld)


def _said(found: RatioDecision, reason: str) -> RatioDecision:
    return msgspec.structs.replace(found, reason=reason)


def _move(found: RatioDecision, look: RatioObservation, by: int, reason: str) -> RatioDecision:
    return msgspec.structs.replace(
        found, kind="rerole", prefill=look.prefill + by, decode=look.decode - by, reason=reason
    )
