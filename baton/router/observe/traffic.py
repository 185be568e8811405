"""This router's traffic, summed each second from the decision records, for the controller and the measure of
prediction errors.

Knows nothing of ratios or of Redis: ``push`` takes the slices.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

from baton.cluster.traffic import ClassTraffic, PredictedAnswer, ServedRequest, TrafficSlice
from baton.protos.adapter_id import number_of
from baton.router.observe.decisions import DecisionRecord
from baton.router.observe.live import GOOD_ENDS, verdict
from baton.router.observe.trail import Trail, predicted_against_observed
from baton.router.request.request import ChoiceSummary

EVERY_S = 1.0  # seconds of a slice
MOST_S = 30.0  # seconds of the longest: a push to Redis takes less
MOST_TWINS = 64  # predictions held against observations, of one slice
MOST_SERVED = 256  # answers listed one by one, of one slice
WRITE_TOKENS = 64  # of an answer, in the cost policy's term "write"


class UnplacedSource(Protocol):
    """Declares what is asked of a DecisionLog."""

    def unplaced(self) -> Iterable[DecisionRecord]:
        """Returns the records of requests that wait for their first placement."""


class TrafficMeter:
    """Sums the traffic of one router into slices, from the decision log's news; ``run`` pushes a slice each
    second.
    """

    def __init__(self, router_id: str, wall_clock: Callable[[], float]) -> None:
        self._router_id, self._wall_clock = router_id, wall_clock
        self._since = wall_clock()
        self._slice = TrafficSlice(router_id, self._since, 0.0, {}, 0, 0, [], [])

    def opened(self, record: DecisionRecord) -> None:
        """Counts a request that was opened."""
        traffic = self._of(record)
        traffic.arrived += 1
        traffic.arrived_tokens += len(record.request.token_ids)

    def over(self, record: DecisionRecord) -> None:
        """Counts a request all of whose choices have ended; its prompt is counted with the first choice. One that
        was refused, or left, before any worker had it is judged alone. One for which nobody waits isn't listed.
        """
        traffic, prompt = self._of(record), len(record.request.token_ids)
        answered = any(trail.placements for trail in record.trails)  # else its answer's length says nothing
        for trail in record.trails:
            if answered:
                self._answered(traffic, record, trail, prompt)
            self._judge(traffic, record, trail.summary)
        first = record.trails[0].summary
        outputs = sum(t.summary.completion_tokens for t in record.trails)
        if outputs and not record.request.context.can_wait and len(self._slice.served) < MOST_SERVED:
            came = self._wall_clock() - max(
                t.summary.stations.get("ttft", 0.0) + _decode_s(t) for t in record.trails
            )
            adapter = number_of(record.request.context.adapter_id)
            self._slice.served.append(ServedRequest(came, prompt, outputs, first.cached_tokens, adapter))

    def cut(self, unplaced: Iterable[DecisionRecord]) -> TrafficSlice:
        """Returns the slice since the last call, and begins the next; ``unplaced`` are the requests without a
        placement yet.
        """
        now = self._wall_clock()
        took = now - self._since
        done, done.at = self._slice, now
        done.seconds = took if 0.0 <= took <= MOST_S else EVERY_S  # otherwise the clock was set
        waiting = list(unplaced)
        done.waiting, done.waiting_tokens = len(waiting), sum(len(r.request.token_ids) for r in waiting)
        self._since, self._slice = now, TrafficSlice(self._router_id, now, 0.0, {}, 0, 0, [], [])
        return done

    async def run(self, push: Callable[[TrafficSlice], Awaitable[None]], log: UnplacedSource) -> None:
        """Pushes a slice of ``log``'s requests every second, until cancelled."""
        while True:
            await asyncio.sleep(EVERY_S)
            await push(self.cut(log.unplaced()))

    def _of(self, record: DecisionRecord) -> ClassTraffic:
        return self._slice.classes.setdefault(record.context_class or "none", ClassTraffic())

    def _answered(self, traffic: ClassTraffic, record: DecisionRecord, trail: Trail, prompt: int) -> None:
        summary, outputs = trail.summary, trail.summary.completion_tokens
        cached = summary.cached_tokens if trail.choice == 0 else prompt
        uncached = max(0, prompt - cached)
        traffic.ended += trail.choice == 0
        traffic.prompt_tokens += prompt if trail.choice == 0 else 0
        traffic.cached_tokens += cached if trail.choice == 0 else 0
        traffic.pairs += uncached * (cached + uncached / 2)
        traffic.output_tokens += outputs
        traffic.context_tokens += outputs * (prompt + outputs / 2)
        if len(self._slice.twins) < MOST_TWINS and (twin := _twin(record, trail)) is not None:
            self._slice.twins.append(twin)

    def _judge(self, traffic: ClassTraffic, record: DecisionRecord, summary: ChoiceSummary) -> None:
        request = record.request
        ok = summary.finish_reason in GOOD_ENDS
        ttft = summary.stations.get("ttft")
        found = verdict(ttft, _tpot(summary), request.context.slo_ttft_s, request.context.slo_tpot_s, ok)
        traffic.judged += found in ("met", "missed")
        traffic.good += found == "met"


def _twin(record: DecisionRecord, trail: Trail) -> PredictedAnswer | None:
    """Returns the predicted answer beside the observed one; None where nothing was predicted, or the request had to
    go elsewhere.
    """
    if len(trail.placements) != 1 or trail.error:
        return None
    compared = predicted_against_observed(trail).get("ttft")
    if compared is None:
        return None
    write = trail.placements[0].decision.taken.terms.get("write")
    tokens = max(1, min(record.request.sampling.max_tokens, WRITE_TOKENS))
    return PredictedAnswer(
        compared["predicted_s"],
        compared["observed_s"],
        None if write is None else write / tokens,
        _tpot(trail.summary),
    )


def _tpot(summary: ChoiceSummary) -> float | None:
    decode = summary.stations.get("decode")
    return decode / (summary.completion_tokens - 1) if decode and summary.completion_tokens > 1 else None


def _decode_s(trail: Trail) -> float:
    return trail.summary.stations.get("decode", 0.0)
