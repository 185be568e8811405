"""Checks what bounded queues and rates refuse: that there was no room, no time or no rate left for it, and never
more of them wait than a queue has places.

A queue is that of a router, a model and a context class. A request takes a place from its coming until it is placed
on workers, which the witness sees as an engine is asked for it. So it knows the places that may be taken, and those
that are taken for certain. Knows nothing of how queues and rates are kept.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import msgspec

from baton.drill.checks.fairness import LOOK_AHEAD, SLACK, FairnessWitness, Wait
from baton.drill.overload import bytes_of
from baton.drill.scenario import FLOODING, Request, Scenario
from baton.router.api.batch.lane import AT_ONCE
from baton.router.dispatch.fair_queue import work_of
from baton.router.dispatch.ticket import BYTES_PER_TOKEN

FULL = "overloaded"  # the code of a request for which there is no room, or no time
# Codes of a request that is over its key's rate: over gRPC, by OpenAI's names, and by Anthropic's.
OVER_RATE = {"quota_exceeded", "rate_limit_exceeded", "rate_limit_error"}
LATE = "deadline_exceeded"
GIVEN_BACK_S = 0.75  # seconds after which what a refused request was charged is given back
ROUNDING = 0.5  # requests by which a rate may seem less used than it is, because times are uncertain
PACED = 16  # last placements by which a router's pace is told; a tenant that has none of them is idle
FEW = 3  # requests of each other tenant that may be placed before one of an idle tenant
EARLY_S = 0.01  # seconds by which a deadline may seem to come early, by rounding

Queue = tuple[int, int, bool]  # index of the router, index of the model, whether the prompt is a long one


class Course(msgspec.Struct):
    """The course of one request; times are loop time in seconds."""

    request: Request
    queue: Queue
    work: int  # tokens
    share: float  # the same by the weight of its tenant
    asked: float
    placed: float = math.inf  # when an engine was first asked for it
    writes: float = math.inf  # when a decode worker first wrote for it
    ended: float = math.inf
    outcome: str = ""  # the code of its last error, which came at ``failed``
    failed: float = math.inf
    at_once: bool = False  # whether it was refused in the turn in which it came

    @property
    def service(self) -> float:
        """Returns the seconds from its place on an engine to its first tokens, if it had any."""
        return min(self.writes, self.ended) - self.placed

    def may_wait(self, now: float) -> bool:
        """Returns whether it may take a place at ``now``."""
        whole = self.request.ranking is not None  # of several prompts, some may wait to its end
        return self.asked <= now < (self.ended if whole else min(self.placed, self.ended))


class QueueWitness:
    """Collects the course of a run's requests, and tells of those that were refused without a reason.

    ``way_s`` are the seconds that a request takes to the queue, and from there to an engine, at most.
    """

    def __init__(self, scenario: Scenario, way_s: float, violated: Callable[[str], None]) -> None:
        self._scenario, self._way_s, self._violated = scenario, way_s, violated
        self._calls: dict[int, Course] = {}
        self._weights = {tenant.name: tenant.weight for tenant in scenario.tenants}
        self._levels = len({request.priority for request in scenario.requests if request.tenant in FLOODING}) > 1
        self.fairness = FairnessWitness()

    @property
    def strict(self) -> bool:
        """Returns whether nothing but a full queue, a late answer or a rate may refuse a request."""
        return bool(self._scenario.tenants)

    @property
    def only_lines(self) -> bool:
        """Returns whether all requests that are no client's are lines of batch jobs: no prefix is computed."""
        return bool(self._scenario.batches) and not self._scenario.pins

    def asked(self, request: Request, now: float) -> None:
        """Stores that the client of ``request`` asks at ``now``."""
        own, work = request.sampling, work_of(len(request.prompt), request.sampling.max_tokens, request.n)
        weight = self._weights.get(request.tenant, 1.0)
        long = bool(self._scenario.short_tokens) and len(request.prompt) > self._scenario.short_tokens
        queue = request.router, request.model, long
        self._calls[request.number] = Course(request, queue, work, work / weight, now)
        if request.tenant in FLOODING and not own.pooling:
            wait = Wait(request.router, request.tenant, work, now, now + self._way_s, None, False, weight)
            self.fairness.came(request.number, msgspec.structs.replace(wait, model=request.model))

    def ends(self, number: int, now: float, placed: bool) -> None:
        """Stores that request ``number`` no longer waits: it was placed, or its client got all or left."""
        self.fairness.ends(number, now, placed)
        call = self._calls.get(number)
        if call is not None:
            if placed:
                call.placed = min(call.placed, now)
            else:
                call.ended = min(call.ended, now)

    def writes(self, number: int, now: float) -> None:
        """Stores that a decode worker writes for request ``number``; only the first call counts."""
        if (call := self._calls.get(number)) is not None:
            call.writes = min(call.writes, now)

    def refused(self, request: Request, code: str, now: float, advised: bool, at_once: bool = False) -> None:
        """Stores that ``request`` ended with error ``code``; ``advised`` says whether its client was told when to
        come again. ``at_once``: in the turn in which it came to the router.
        """
        self.ends(request.number, now, placed=False)
        call = self._calls[request.number]
        call.outcome, call.failed, call.at_once = code, now, at_once
        if code == FULL and not request.slo_ttft_s:
            self.fairness.refused(request.number)
        if (code == FULL or code in OVER_RATE) and not advised:
            self._violated(f"request {request.number}: refused as {code}, and not told when to come again")

    def count(self) -> int:
        """Returns the number of requests that were refused for want of room, time or rate."""
        return sum(call.outcome == FULL or call.outcome in OVER_RATE for call in self._calls.values())

    # ---- at the end of a run ----

    def unjust(self) -> Iterator[str]:
        """Yields a message for each refusal without a reason, each queue with too many, and each unfair share."""
        if not self._levels:  # tenants are equal whose requests are equally urgent
            yield from self.fairness.unfair()
        calls = list(self._calls.values())
        refused = [call for call in calls if call.outcome == FULL and (self.strict or call.at_once)]
        for call in refused:  # lines of batch jobs give way to all others, and fill no queue
            yield from self._unfounded(call, calls)
        yield from self._overweight(calls)
        if not self.strict:
            return
        for call in refused if not self._levels else ():
            yield from self._punished(call, calls)
            yield from self._kept_out(call, calls)
        for call in calls:
            yield from self._passed(call, calls)
        for call in calls:
            after = call.request.deadline_after
            if call.outcome == LATE and call.failed - call.asked < (after or math.inf) - EARLY_S:
                yield f"request {call.request.number}: its deadline has not passed"
        yield from self._overfull(calls)
        yield from self._over_rates(calls)

    def _unfounded(self, call: Course, calls: Sequence[Course]) -> Iterator[str]:
        """Yields a message if the call was refused while there was room, and time."""
        slo, name, most = call.request.slo_ttft_s, f"request {call.request.number}", self._scenario.max_queue
        taken = max(self._places(call, calls, of_class=True), default=0)
        if taken >= most or self._heavy(call, calls):
            return
        if not slo:
            yield f"{name}: refused for want of room, when {taken} of {most} places may have been taken"
            return
        worst = self._service(call, calls)
        late = call.ended - call.asked + worst >= slo
        if not late and not max(self._places(call, calls, of_class=False), default=0):
            yield f"{name}: refused as late, {call.ended - call.asked:.2f} s after it came, and may take {slo:g} s"

    def _places(self, call: Course, calls: Sequence[Course], of_class: bool) -> Iterator[int]:
        """Yields the number of others that may have waited in the queue of ``call``, or for its model, while it was
        there.
        """
        same = call.queue[: 3 if of_class else 2]
        others = [c for c in calls if c is not call and c.queue[: len(same)] == same]
        times = [call.asked] + [c.asked for c in others if call.asked <= c.asked <= call.ended]
        return (sum(other.may_wait(at) for other in others) for at in times)

    def _heavy(self, call: Course, calls: Sequence[Course]) -> bool:
        """Returns whether the requests of the router may have held too many bytes for ``call``, with those whose
        end the router may not have seen, and with lines of batch jobs.
        """
        own, late = self._scenario, self._scenario.heard_s
        lines = [len(prompt) + batch.max_tokens for batch in own.batches for prompt in batch.prompts]
        of_lines = BYTES_PER_TOKEN * sum(sorted(lines)[-AT_ONCE * own.models :])
        others = (c for c in calls if c is not call and c.queue[0] == call.queue[0])
        held = sum(bytes_of(c.request) for c in others if c.asked <= call.ended and call.asked < c.ended + late)
        return held + of_lines + bytes_of(call.request) > own.max_inflight_bytes

    def _overweight(self, calls: Sequence[Course]) -> Iterator[str]:
        """Yields a message for each router whose requests held more bytes than they may."""
        most, way_s = self._scenario.max_inflight_bytes, self._way_s
        by_router: defaultdict[int, list[Course]] = defaultdict(list)
        for call in calls:
            if call.outcome != FULL:
                by_router[call.queue[0]].append(call)
        for router, own in by_router.items():
            for at in [call.asked + way_s for call in own]:
                held = sum(bytes_of(c.request) for c in own if c.asked + way_s <= at < c.ended - way_s)
                if held > most:
                    yield f"router-{router}: requests hold {held} bytes where they may hold {most}"
                    break

    def _punished(self, call: Course, calls: Sequence[Course]) -> Iterator[str]:
        """Yields a message if the call was refused although others of another tenant, who have more, waited."""
        if not call.at_once or call.request.slo_ttft_s:
            return
        now, tenant, pool = call.asked, call.request.tenant, call.queue[:2]
        mine = [c for c in calls if c.queue[:2] == pool and c.request.tenant == tenant]
        owed = sum(c.share for c in mine if c.may_wait(now)) + SLACK * max(c.share for c in mine)
        waiting: defaultdict[str, list[float]] = defaultdict(list)
        for other in calls:
            if other.queue == call.queue and self._waits(other, now):
                waiting[other.request.tenant].append(other.share)
        for whose, shares in waiting.items():
            if whose != tenant and sum(shares) - max(shares) > owed:
                yield (
                    f"request {call.request.number}: refused, while tenant {whose} waits for {sum(shares):g} "
                    f"tokens by its weight, and tenant {tenant} can have got or asked no more than {owed:g}"
                )

    def _kept_out(self, call: Course, calls: Sequence[Course]) -> Iterator[str]:
        """Yields a message if the call was refused as late although its tenant was idle, so that few may come
        before it: FEW largest requests of each tenant that waits, placed at half the pace at least.
        """
        slo, now, tenant, pool = call.request.slo_ttft_s, call.asked, call.request.tenant, call.queue[:2]
        if not call.at_once or not slo:
            return
        placed = [c for c in calls if c.queue[:2] == pool and c.placed <= now]
        placed = sorted(placed, key=lambda c: c.placed)[-PACED:]
        others = [c for c in calls if c.queue[:2] == pool and c is not call and c.may_wait(now)]
        idle = all(c.request.tenant != tenant for c in (*placed, *others))
        full = max(self._places(call, calls, of_class=True), default=0) >= self._scenario.max_queue
        if len(placed) < PACED or not idle or full:
            return
        largest = {
            c.request.tenant: max(o.work for o in others if o.request.tenant == c.request.tenant) for c in others
        }
        pace = sum(c.work for c in placed) / max(0.001, now - placed[0].placed)
        wait_s = FEW * sum(largest.values()) / (pace / 2)
        worst = self._service(call, calls)
        if wait_s + worst < slo:
            yield (
                f"request {call.request.number}: refused as late, and its tenant was idle: it waits {wait_s:.2f} s "
                f"at most, and {worst:.2f} s behind the queue, of {slo:g} s"
            )

    def _passed(self, call: Course, calls: Sequence[Course]) -> Iterator[str]:
        """Yields a message if more requests that were less urgent, and no smaller, were placed while it waited than
        the queue may try past a head without room.
        """
        begins, ends = call.asked + 2 * self._way_s, min(call.placed, call.ended) - self._way_s
        passing = sum(
            other.queue == call.queue
            and other.request.priority > call.request.priority
            and other.work >= call.work
            and begins <= other.placed < ends
            for other in calls
        )
        if passing > LOOK_AHEAD and not call.request.sampling.pooling and call.request.ranking is None:
            yield f"request {call.request.number}: {passing} less urgent ones were placed while it waited"

    def _service(self, call: Course, calls: Sequence[Course]) -> float:
        """Returns the seconds that the way behind the queue was expected to take at most as ``call`` ended: the
        95th percentile of a few is the longest but one at most.
        """
        begun = sorted(c.service for c in _begun(calls, call))
        return (begun[-2] if len(begun) > 1 else 0.0) + 2 * self._way_s

    def _waits(self, call: Course, now: float) -> bool:
        """Returns whether the call takes a place at ``now`` for certain."""
        return call.asked + self._way_s <= now < min(call.placed - self._way_s, call.ended - self._way_s)

    def _overfull(self, calls: Sequence[Course]) -> Iterator[str]:
        """Yields a message for each queue in which more waited than it has places."""
        by_queue: defaultdict[Queue, list[Course]] = defaultdict(list)
        for call in calls:
            by_queue[call.queue].append(call)
        for queue, own in by_queue.items():
            most = max(sum(self._waits(other, call.asked + self._way_s) for other in own) for call in own)
            if most > self._scenario.max_queue:
                yield f"router-{queue[0]}: {most} requests wait where {self._scenario.max_queue} may"

    def _over_rates(self, calls: Sequence[Course]) -> Iterator[str]:
        """Yields a message for each request that was refused as over its key's rate, and that wasn't used up."""
        per_min = self._scenario.requests_per_min
        by_key: defaultdict[int | str, list[Course]] = defaultdict(list)
        for call in calls if per_min else ():
            if (who := whose_rate(call.request)) is not None:
                by_key[who].append(call)
        for own in by_key.values():
            for call in own:
                if call.outcome in OVER_RATE and (left := _left(call, own, per_min)) >= call.request.n + ROUNDING:
                    yield f"request {call.request.number}: refused as over its rate, of which {left:.1f} were left"


def whose_rate(request: Request) -> int | str | None:
    """Returns whose rate the request is charged to: its key's index or its tenant; None for nobody's."""
    if request.over_http:
        return request.key
    return request.tenant if request.tenant and request.tenant not in FLOODING else None


def _begun(calls: Sequence[Course], before: Course) -> Iterator[Course]:
    """Yields the calls of the router and the model of ``before`` for which a decode worker wrote before its end."""
    return (c for c in calls if c.queue[:2] == before.queue[:2] and c.writes <= before.ended)


def _left(call: Course, calls: Sequence[Course], per_min: int) -> float:
    """Returns what must have been left of a rate at least as ``call`` came: charged as early, and given back as
    late, as can be.
    """
    changes = [(c.asked, -c.request.n) for c in calls if c is not call and c.outcome not in OVER_RATE]
    changes += [(c.ended + GIVEN_BACK_S, c.request.n) for c in calls if c.outcome == FULL]
    level, at = float(per_min), 0.0
    for when, amount in sorted(changes):
        if when > (call.ended if amount < 0 else call.asked):
            continue
        level = min(per_min, level + max(0.0, min(when, call.asked) - at) * per_min / 60)
        level, at = min(per_min, level + amount), max(at, min(when, call.asked))
    return min(per_min, level + max(0.0, call.asked - at) * per_min / 60)
