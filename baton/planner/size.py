"""Sizing: how many of which accelerator serve one model and one trace within SLOs. Torch-free.

Knows nothing of consoles. A worker is one accelerator, because the engine computes on one. For each accelerator the
model is tried as it comes, then with KV and weights quantized as the engine can, the least lossy first; the first
form that can meet the SLOs gives the answer, its fewest workers. Only ratios near the demand's are tried, so this
is an estimate: ``baton plan`` sweeps them all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from baton.planner.costs.measured_forms import MeasuredForms
from baton.planner.costs.model_shape import ModelShape
from baton.planner.costs.worker import (
    USABLE_MEMORY,
    Accelerator,
    accelerators,
    activation_bytes,
    at_precision,
    roofline,
    unsupported,
)
from baton.planner.reach import best_of_about, least_sufficient, least_workers
from baton.planner.score import Slo
from baton.planner.simulator.cluster import ClusterScenario, SimSettings
from baton.planner.sweep import RatioOutcome
from baton.planner.traces.trace import Trace
from baton.protos.errors import ConfigError

CHUNK = 2048  # tokens of a prefill chunk
FORMS = (("none", "auto"), ("none", "int8"), ("int8", "int8"), ("int4", "int8"))  # of [worker], least lossy first


class WorkerMemory(msgspec.Struct, frozen=True):
    """Describes a worker's memory in bytes: the usable amount, and what weights, activations and KV take of it."""

    usable: float
    weights: float
    activations: float
    kv: float
    kv_bytes_per_token: int
    kv_tokens: int


class AcceleratorSizing(msgspec.Struct, frozen=True):
    """Says how many workers of one accelerator suffice; ``found`` is None if up to ``most`` workers don't.

    ``form`` names the precision of weights and KV, ``settings`` the [worker] settings for it; ``why`` says why less
    lossy forms, or all, are not enough. ``per_hour`` is dollars, None without a price.
    """

    accelerator: str
    form: str
    settings: dict[str, str]
    memory: WorkerMemory
    found: RatioOutcome | None
    accelerators: int
    per_hour: float | None
    why: str


class SizingQuestion(msgspec.Struct, frozen=True):
    """Holds what is asked of every accelerator: SLOs, attainment ``want`` (0 to 1), at most ``most`` workers.
    ``exact``: nothing is quantized further.

    With ``measured``, only measured forms whose loss is at most ``most_loss`` (a share) are taken.
    """

    trace: Trace
    slo: Slo
    want: float
    most: int
    exact: bool = False
    measured: MeasuredForms | None = None
    most_loss: float = 1.0

    @property
    def longest(self) -> int:
        """Returns the tokens of the trace's longest request, prompt and answer."""
        return max(r.input_length + r.output_length for r in self.trace.requests)


def size(
    shape: ModelShape, question: SizingQuestion, names: Sequence[str], prices: dict[str, float] | None = None
) -> list[AcceleratorSizing]:
    """Returns one answer per accelerator name, the cheapest (or fewest) first, those that can't serve last;
    ``prices`` are dollars per hour by name.

    Raises ConfigError for an unknown name, or if none holds the model and the longest request in any form.
    """
    sheets = accelerators()
    unknown = [name for name in names if name not in sheets]
    if unknown:
        raise ConfigError(f"accelerator {unknown[0]!r} is unknown; choose of {', '.join(sorted(sheets))}", "gpus")
    sizes = [_size(shape, name, sheets[name], question, (prices or {}).get(name)) for name in names]
    if not any(s.memory.kv_tokens >= question.longest for s in sizes):
        said = "; ".join(f"{s.accelerator}: {s.why}" for s in sizes)
        raise ConfigError(
            f"no accelerator of these holds {shape.name} and a request of {question.longest} tokens: {said}", "gpus"
        )
    return sorted(sizes, key=_order)


def _order(sized: AcceleratorSizing) -> tuple[bool, bool, float, int]:
    """Returns the sort key of an answer: unpriced ones follow, because nobody knows whether they are cheaper."""
    return sized.found is None, sized.per_hour is None, sized.per_hour or 0.0, sized.accelerators


def memory(shape: ModelShape, sheet: Accelerator) -> WorkerMemory:
    """Returns the memory of a worker of one accelerator."""
    usable = sheet.memory * USABLE_MEMORY
    activations = activation_bytes(shape, CHUNK)
    kv = max(0.0, usable - shape.weight_bytes - activations)
    return WorkerMemory(
        usable, shape.weight_bytes, activations, kv, shape.kv_bytes_per_token, int(kv / shape.kv_bytes_per_token)
    )


def forms(shape: ModelShape, exact: bool) -> Iterator[ModelShape]:
    """Yields the model as it comes, then (unless ``exact``) quantized more and more; weights that are quantized
    already stay.
    """
    for quantization, kv_cache_dtype in FORMS[:1] if exact else FORMS:
        if quantization == "none" or not shape.precision.packed:
            yield at_precision(shape, quantization, kv_cache_dtype)


def _size(
    shape: ModelShape, name: str, sheet: Accelerator, question: SizingQuestion, price: float | None
) -> AcceleratorSizing:
    said: list[str] = []
    last: tuple[ModelShape, ClusterScenario] | None = None
    for form in forms(shape, question.exact):
        if question.measured and (
            why := question.measured.refusal(dict(form.precision.settings), question.most_loss)
        ):
            said.append(why)
            continue
        if why := unsupported(form, name, sheet, 1) or _too_big(form, sheet, question.longest):
            said.append(why)
            continue
        last = form, _scenario(form, name, sheet, question.trace)
        found = least_workers(last[1], question.slo, question.want, 1, question.most)
        if found is not None:
            count = found.prefill + found.decode
            dollars = None if price is None else price * count
            return _row(name, form, sheet, found, count, dollars, "; ".join(dict.fromkeys(said)))
        said.append(f"{form.precision.name}: {_missed(last[1], question)}")
    if last is not None:
        said.append(least_sufficient(last[1], question.slo, question.want, question.most + 1))
    return _row(name, last[0] if last else shape, sheet, None, 0, None, "; ".join(dict.fromkeys(said)))


def _scenario(shape: ModelShape, name: str, sheet: Accelerator, trace: Trace) -> ClusterScenario:
    costs = roofline(shape, name, sheet, 1, CHUNK)
    return ClusterScenario(SimSettings(0, 1), costs, costs, trace)


def _row(
    name: str,
    form: ModelShape,
    sheet: Accelerator,
    found: RatioOutcome | None,
    count: int,
    per_hour: float | None,
    why: str,
) -> AcceleratorSizing:
    settings = dict(form.precision.settings)
    return AcceleratorSizing(name, form.precision.name, settings, memory(form, sheet), found, count, per_hour, why)


def _too_big(form: ModelShape, sheet: Accelerator, longest: int) -> str:
    held = memory(form, sheet)
    if held.kv_tokens >= longest:
        return ""
    weights = f"{held.weights / 1e9:.0f} GB of weights in {held.usable / 1e9:.0f} GB"
    if not held.kv:
        return f"{weights} leave no room for KV"
    return f"{form.precision.name}: {weights} leave room for {held.kv_tokens:,} tokens of {longest:,}"


def _missed(scenario: ClusterScenario, question: SizingQuestion) -> str:
    s = best_of_about(scenario, question.slo, question.most).score
    late = f"{s.late_first:.1%} late first tokens, {s.late_tokens:.1%} slow answers"
    return f"{question.most} workers reach {s.attainment:.1%} at best ({late})"
