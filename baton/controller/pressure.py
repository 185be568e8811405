"""Pressure: how full each role is at each ratio, as seconds of work demanded over seconds of work possible. Pure.

Knows nothing of who asks or what is decided. No queueing is simulated, so that it can be asked every few seconds;
queued work counts as work. 1.0 is as much as a role carries within its SLO.

    prefill: (new prompt seconds per second + seconds queued / horizon) / workers / BURSTS
    decode:  the most of tokens over the rate at which a step takes the TPOT SLO, KV tokens over the pools', and
             sequences over seats (one is taken while the prompt is computed); both for arrivals and the backlog

A request in a router's queue is work of both roles, as one that arrives is. Counted to one role alone, by what it
waits for at present, it would pull the ratio from one end to the other and back for as long as there is a queue.
"""

from __future__ import annotations

import msgspec

from baton.protos.measurements import StepCurve

BURSTS = 0.8  # share of its time that a prefill worker can work before bursts wait for long
FULL_POOL = 0.9  # share of a pool's pages that counts as full, because sequences still grow
READ_WAIT = 1.5  # a prompt's time in a prefill worker over the time of reading it alone
SLO_ROOM = 1.25  # a TPOT SLO closer than this to an empty step can't be kept by any ratio: it is taken as this


class Demand(msgspec.Struct, frozen=True):
    """Describes traffic, per second: uncached prompt tokens and their query-key pairs, requests (``answers``),
    output tokens.

    ``context`` is the mean number of KV tokens of a sequence while it decodes.
    """

    prefill_tokens: float
    pairs: float
    answers: float  # requests
    output_tokens: float
    context: float


class Backlog(msgspec.Struct, frozen=True):
    """Holds the work now in the whole cluster: prompt tokens to compute at prefill workers, sequences that decode,
    that wait at decode workers, and requests in routers' queues with their prompt tokens.

    ``decode_full``: it is decode workers that the queues wait for at present.
    """

    prefill_tokens: float = 0.0
    running: int = 0
    waiting: int = 0
    queued: int = 0
    queued_tokens: float = 0.0
    decode_full: bool = False

    @property
    def unread_tokens(self) -> float:
        """Returns the prompt tokens that only prefill workers hold up."""
        return self.prefill_tokens + (0.0 if self.decode_full else self.queued_tokens)

    @property
    def unseated(self) -> int:
        """Returns the number of sequences that only decode workers hold up."""
        return self.waiting + (self.queued if self.decode_full else 0)


class WorkerLimits(msgspec.Struct, frozen=True):
    """Holds one worker's measured step times and its limits, taken as the same for all; ``ttft_s`` and ``tpot_s``
    are SLOs.
    """

    prefill: StepCurve
    decode: StepCurve
    chunk_tokens: int
    max_batch: int  # sequences that may decode at once
    kv_tokens: int  # that fit into the KV pool, in sequences of the traffic's mean length
    ttft_s: float
    tpot_s: float

    def prompt_seconds(self, tokens: float, pairs: float) -> float:
        """Returns the seconds to prefill ``tokens`` with ``pairs`` query-key pairs, in full chunks."""
        curve = self.prefill
        return tokens * (curve.prefill_token + curve.fixed / self.chunk_tokens) + pairs * curve.prefill_pair

    def sequence_seconds(self, context: float) -> float:
        """Returns the seconds that one more sequence of ``context`` tokens adds to a decode step."""
        return self.decode.decode_sequence + self.decode.decode_context_token * context

    def step_seconds(self, sequences: float, context: float) -> float:
        """Returns the seconds of a decode step of ``sequences`` sequences with ``context`` KV tokens each."""
        return self.decode.fixed + sequences * self.sequence_seconds(context)

    @property
    def slo_step(self) -> float:
        """Returns the seconds of the longest step within the TPOT SLO; at least SLO_ROOM times an empty step."""
        return max(self.tpot_s, SLO_ROOM * self.decode.fixed, 1e-6)

    def steady_batch(self, tokens_per_s: float, context: float) -> float:
        """Returns the mean batch of a worker that writes ``tokens_per_s`` output tokens per second; at most
        ``max_batch``.
        """
        room = 1.0 - tokens_per_s * self.sequence_seconds(context)
        if room <= 0:
            return float(self.max_batch)
        return min(float(self.max_batch), tokens_per_s * self.decode.fixed / room)


class Pressure(msgspec.Struct, frozen=True):
    """Holds how full each role is at one ratio; 1.0 is as much as it carries within its SLO."""

    prefill_workers: int
    decode_workers: int
    prefill: float
    decode: float

    @property
    def worst(self) -> float:
        """Returns the pressure of the fuller role."""
        return max(self.prefill, self.decode)


def pressure(
    demand: Demand, backlog: Backlog, workers: WorkerLimits, prefill: int, decode: int, horizon_s: float
) -> Pressure:
    """Returns the pressure with ``prefill`` and ``decode`` workers, if the backlog shall be done within
    ``horizon_s``.
    """
    return Pressure(
        prefill,
        decode,
        _prefill(demand, backlog, workers, horizon_s) / max(prefill, 1) / BURSTS,
        _decode(demand, backlog, workers, max(decode, 1), horizon_s),
    )


def every_ratio(
    demand: Demand, backlog: Backlog, workers: WorkerLimits, count: int, horizon_s: float
) -> tuple[Pressure, ...]:
    """Returns the pressure at every ratio of ``count`` workers, from 1 to ``count`` - 1 prefill workers."""
    return tuple(pressure(demand, backlog, workers, p, count - p, horizon_s) for p in range(1, count))


def capacity(workers: WorkerLimits, context: float) -> float:
    """Returns the output tokens per second that one decode worker carries within its TPOT SLO."""
    step = workers.slo_step
    batch = (step - workers.decode.fixed) / max(workers.sequence_seconds(context), 1e-9)
    seats = min(float(workers.max_batch), FULL_POOL * workers.kv_tokens / max(context, 1.0))
    if batch <= seats:
        return batch / step
    return seats / workers.step_seconds(seats, context)


def _prefill(demand: Demand, backlog: Backlog, workers: WorkerLimits, horizon_s: float) -> float:
    """Returns the load on prefill workers, in worker-seconds per second."""
    arriving = workers.prompt_seconds(demand.prefill_tokens, demand.pairs)
    per_token = arriving / demand.prefill_tokens if demand.prefill_tokens else workers.prompt_seconds(1.0, 0.0)
    return arriving + (backlog.prefill_tokens + backlog.queued_tokens) * per_token / horizon_s


def _seats(demand: Demand, workers: WorkerLimits, decode: int, context: float) -> float:
    """Returns the share of seats that are taken: a request has one from its admission on, also during prefill."""
    if not demand.answers:
        return 0.0
    reading = READ_WAIT * workers.prompt_seconds(demand.prefill_tokens, demand.pairs) / demand.answers
    batch = workers.steady_batch(demand.output_tokens / decode, context)
    writing = demand.output_tokens / demand.answers * workers.step_seconds(batch, context)
    return demand.answers / decode * (reading + writing) / workers.max_batch


def _with_queue(demand: Demand, backlog: Backlog, horizon_s: float) -> Demand:
    """Returns the demand with what routers' queues hold, as if it arrived within ``horizon_s``."""
    if not demand.answers:
        return demand
    more = 1.0 + backlog.queued / horizon_s / demand.answers
    return Demand(
        demand.prefill_tokens * more,
        demand.pairs * more,
        demand.answers * more,
        demand.output_tokens * more,
        demand.context,
    )


def _decode(demand: Demand, backlog: Backlog, workers: WorkerLimits, decode: int, horizon_s: float) -> float:
    demand = _with_queue(demand, backlog, horizon_s)
    context, rate = max(demand.context, 1.0), demand.output_tokens / decode
    arriving = max(rate / max(capacity(workers, context), 1e-9), _seats(demand, workers, decode, context))
    # Without answers nobody knows how long queued ones will be: they count as those that wait at workers do.
    waiting = backlog.waiting if demand.output_tokens else backlog.unseated
    there = (backlog.running + waiting) / decode
    step = workers.step_seconds(min(there, workers.max_batch), context) / workers.slo_step
    seats = there / workers.max_batch
    pool = there * context / (FULL_POOL * max(workers.kv_tokens, 1))
    present = max(seats, pool, step if there > 1 else 0.0)
    return max(arriving, present)
