"""Validation of the simulator: a recorded vLLM run is simulated from operator timings, and both are compared.

Knows nothing of files or consoles. Nothing is fitted to a run. The inputs are each request's lengths and the moment
it entered the engine (``queued_ts``); what the client waited before that is the same on both sides.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from baton.planner.costs.model_shape import ModelShape, model_shape
from baton.planner.costs.operators import OperatorProfile
from baton.planner.figures import Distribution, distribution, relative_errors
from baton.planner.recorded.vllm_engine import RequestTimes, VllmEngine
from baton.planner.recorded.vllm_run import RecordedRequest, VllmRun, settings_of
from baton.protos.errors import ConfigError

METRICS = ("ttft", "tpot", "latency", "queue", "scheduled_to_first")


class ValidationRow(msgspec.Struct, frozen=True):
    """Compares one metric, in seconds; ``error`` gives the relative error by figure."""

    metric: str
    observed: Distribution
    simulated: Distribution
    error: dict[str, float | None]


class Validation(msgspec.Struct, frozen=True):
    """Compares all metrics of a run, and counts the simulated engine's steps and preemptions.

    ``left_out`` requests of the run were not usable.
    """

    model: str
    tensor_parallel: int
    requests: int
    left_out: int
    steps: int
    preemptions: int
    kv_pages: int
    rows: tuple[ValidationRow, ...]


def validate(run: VllmRun, profile: OperatorProfile) -> Validation:
    """Returns the comparison of ``run`` with its simulation by ``profile``.

    Raises ConfigError if the profile is another model's.
    """
    if not _is_of(run.model, profile.shape):
        raise ConfigError(f"the run is of {run.model}, the profile of {profile.shape.name}", "profile")
    settings = settings_of(run, profile.shape)
    start = min(r.queued_ts for r in run.requests)
    recorded = sorted(run.requests, key=lambda r: r.queued_ts)
    timed = [RequestTimes(r.queued_ts - start, r.input_toks, r.output_toks) for r in recorded]
    engine = VllmEngine(settings, profile.step_seconds)
    engine.run(timed)
    observed, simulated = _observed(recorded, start), _simulated(timed, _before(recorded, start))
    rows = tuple(_row(metric, observed[metric], simulated[metric]) for metric in METRICS)
    return Validation(
        run.model, run.tp, len(recorded), run.left_out, engine.steps, engine.preemptions, settings.pages, rows,
    )  # fmt: skip


def _is_of(name: str, shape: ModelShape) -> bool:
    """Returns whether the profile's model is the run's, or one of the same sizes (a tuned one, say)."""
    if name.rsplit("/", 1)[-1].lower() == shape.name:
        return True
    try:
        return msgspec.structs.replace(model_shape(name), name=shape.name) == shape
    except ConfigError:
        return False


def _row(metric: str, observed: Sequence[float], simulated: Sequence[float]) -> ValidationRow:
    seen, said = distribution(observed), distribution(simulated)
    return ValidationRow(metric, seen, said, relative_errors(seen, said))


def _before(recorded: Sequence[RecordedRequest], start: float) -> list[float]:
    """Returns when each request arrived at the client's side, on the engine's clock: the quickest way in took no
    time.

    Where that wasn't recorded: when it entered the engine.
    """
    shift = min((r.queued_ts - r.arrival_time for r in recorded if r.arrival_time is not None), default=0.0)
    return [(r.queued_ts if r.arrival_time is None else r.arrival_time + shift) - start for r in recorded]


def _observed(recorded: Sequence[RecordedRequest], start: float) -> dict[str, list[float]]:
    arrivals = _before(recorded, start)
    return {
        "ttft": [r.first_token_ts - start - a for r, a in zip(recorded, arrivals, strict=True)],
        "tpot": [(r.last_token_ts - r.first_token_ts) / (r.output_toks - 1) for r in recorded if r.output_toks > 1],
        "latency": [r.last_token_ts - start - a for r, a in zip(recorded, arrivals, strict=True)],
        "queue": [r.scheduled_ts - r.queued_ts for r in recorded],
        "scheduled_to_first": [r.first_token_ts - r.scheduled_ts for r in recorded],
    }


def _simulated(timed: Sequence[RequestTimes], arrivals: Sequence[float]) -> dict[str, list[float]]:
    return {
        "ttft": [t.first_token - a for t, a in zip(timed, arrivals, strict=True)],
        "tpot": [(t.last_token - t.first_token) / (t.outputs - 1) for t in timed if t.outputs > 1],
        "latency": [t.last_token - a for t, a in zip(timed, arrivals, strict=True)],
        "queue": [t.scheduled - t.queued for t in timed],
        "scheduled_to_first": [t.first_token - t.scheduled for t in timed],
    }
