"""How full each role is on each ratio: seconds of work demanded over seconds to be had. Pure.

Knows nothing of who asks or what is decided. It is the robust half of the twin: no queueing is simulated, so that
it can be asked every few seconds, and what is queued counts as work. 1.0: as much as a role carries with its SLO.

    prefill: (new prompt seconds per second + seconds queued / horizon) / workers / BURSTS
    decode:  the most of tokens over the rate at which a step takes the TPOT SLO, KV tokens over the pools', and
             sequences over seats (one is taken while the prompt is read); for what arrives, and for what is there
"""

from __future__ import annotations

import msgspec

from baton.protos.nouns import StepCurve

BURSTS = 0.8  # share of its time that a prefill worker can work before bursts wait for long
FULL_POOL = 0.9
READ_WAIT = 1.5  # a prompt's time in a prefill worker over the time of reading it alone
SLO_ROOM = 1.25  # a TPOT SLO closer than this to an empty step can't be kept by any ratio: it is taken as this


class Demand(msgspec.Struct, frozen=True):
    """Per second: uncached prompt tokens and their query-key pairs, answers and their tokens.

    ``context``: mean KV tokens of a sequence while it is written.
    """

    prefill_tokens: float
    pairs: float
    answers: float
    output_tokens: float
    context: float


class Backlog(msgspec.Struct, frozen=True):
    """Holds the work that is there now, in the whole cluster: prompt tokens not yet read, sequences that run,
    and that wait.
    """

    prefill_tokens: float = 0.0
    running: int = 0
    waiting: int = 0


class WorkerLimits(msgspec.Struct, frozen=True):
    """One worker's costs and limits, the same for all. ``tpot_s``, ``ttft_s``: the SLOs."""

    prefill: StepCurve
    decode: StepCurve
    chunk_tokens: int
    max_batch: int
    kv_tokens: int
    ttft_s: float
    tpot_s: float

    def prompt_seconds(self, tokens: float, pairs: float) -> float:
        """Returns the seconds of reading so many tokens, in full chunks."""
        curve = self.prefill
        return tokens * (curve.prefill_token + curve.fixed / self.chunk_tokens) + pairs * curve.prefill_pair

    def sequence_seconds(self, context: float) -> float:
        """Returns the seconds that one more sequence adds to a step."""
        return self.decode.decode_sequence + self.decode.decode_context_token * context

    def step_seconds(self, sequences: float, context: float) -> float:
        """Returns the seconds of a decode step."""
        return self.decode.fixed + sequences * self.sequence_seconds(context)

    @property
    def slo_step(self) -> float:
        """Returns the longest step that keeps the TPOT SLO, as far as any step can."""
        return max(self.tpot_s, SLO_ROOM * self.decode.fixed, 1e-6)

    def steady_batch(self, tokens_per_s: float, context: float) -> float:
        """Sequences in the batch of a worker that writes so many tokens per second; at most its seats."""
        room = 1.0 - tokens_per_s * self.sequence_seconds(context)
        if room <= 0:
            return float(self.max_batch)
        return min(float(self.max_batch), tokens_per_s * self.decode.fixed / room)


class Pressure(msgspec.Struct, frozen=True):
    """Holds how busy each role is at one ratio."""

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
    """Returns the pressure on ``prefill`` and ``decode`` workers; what is queued is to be worked off within
    ``horizon_s``.
    """
    return Pressure(
        prefill,
        decode,
        _prefill(demand, backlog, workers, horizon_s) / max(prefill, 1) / BURSTS,
        _decode(demand, backlog, workers, max(decode, 1)),
    )


def every_ratio(
    demand: Demand, backlog: Backlog, workers: WorkerLimits, count: int, horizon_s: float
) -> tuple[Pressure, ...]:
    """Returns the pressure of every ratio from 1P(n-1)D to (n-1)P1D."""
    return tuple(pressure(demand, backlog, workers, p, count - p, horizon_s) for p in range(1, count))


def capacity(workers: WorkerLimits, context: float) -> float:
    """Returns tokens per second of one decode worker with its TPOT SLO kept."""
    step = workers.slo_step
    batch = (step - workers.decode.fixed) / max(workers.sequence_seconds(context), 1e-9)
    seats = min(float(workers.max_batch), FULL_POOL * workers.kv_tokens / max(context, 1.0))
    if batch <= seats:
        return batch / step
    return seats / workers.step_seconds(seats, context)


def _prefill(demand: Demand, backlog: Backlog, workers: WorkerLimits, horizon_s: float) -> float:
    """Worker-seconds per second."""
    arriving = workers.prompt_seconds(demand.prefill_tokens, demand.pairs)
    per_token = arriving / demand.prefill_tokens if demand.prefill_tokens else workers.prompt_seconds(1.0, 0.0)
    return arriving + backlog.prefill_tokens * per_token / horizon_s


def _seats(demand: Demand, workers: WorkerLimits, decode: int, context: float) -> float:
    """Of seats: a request has one from its admission on, so also while its prompt is read."""
    if not demand.answers:
        return 0.0
    reading = READ_WAIT * workers.prompt_seconds(demand.prefill_tokens, demand.pairs) / demand.answers
    batch = workers.steady_batch(demand.output_tokens / decode, context)
    writing = demand.output_tokens / demand.answers * workers.step_seconds(batch, context)
    return demand.answers / decode * (reading + writing) / workers.max_batch


def _decode(demand: Demand, backlog: Backlog, workers: WorkerLimits, decode: int) -> float:
    context, rate = max(demand.context, 1.0), demand.output_tokens / decode
    arriving = max(rate / max(capacity(workers, context), 1e-9), _seats(demand, workers, decode, context))
    there = (backlog.running + backlog.waiting) / decode
    step = workers.step_seconds(min(there, workers.max_batch), context) / workers.slo_step
    seats = there / workers.max_batch
    pool = there * context / (FULL_POOL * max(workers.kv_tokens, 1))
    present = max(seats, pool, step if there > 1 else 0.0)
    return max(arriving, present)
