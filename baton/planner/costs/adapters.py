"""The cost of LoRA adapters in a simulation: a factor that was given, or what workers measured of it.

Knows nothing of who measures. The mix of adapters is the trace's; a measured cost is a worker's own, that of its
profile, or that of a running cluster.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import msgspec

from baton.planner.costs.adapter_mix import mix_of
from baton.planner.costs.worker import WorkerCosts
from baton.protos.errors import ConfigError
from baton.protos.json import Json
from baton.protos.measurements import AdapterCurve

NONE_SEEN = "no adapters seen"
REMEDY = (
    "measure a cluster that serves some with `baton profile measure`, or give --adapter-cost a factor or the URL "
    "of such a cluster's router"
)


class AdapterCosts(msgspec.Struct, frozen=True):
    """Holds the cost of adapters that was asked for: ``factor`` times as long a step if all its tokens are on
    adapters, or else measured costs by role. Where both are missing, each worker's profile says it.
    """

    factor: float | None = None
    measured: dict[str, AdapterCurve] = {}

    def on(self, costs: WorkerCosts, shares: Sequence[float], role: str) -> WorkerCosts:
        """Returns the costs of a worker of ``role``, "prefill" or "decode", whose traffic has adapters with
        ``shares`` (0 to 1) of all tokens.
        """
        if not shares:
            return costs
        if self.factor is not None:
            return by_factor(costs, sum(shares), self.factor)
        curve = self._curve(costs, role)
        return costs if curve is None else by_curve(costs, shares, curve)

    def about(self, shares: Sequence[float], reads: WorkerCosts, writes: WorkerCosts) -> str:
        """Returns a sentence on adapters with ``shares`` of all tokens, and on their cost to prefill workers that
        cost ``reads`` and decode workers that cost ``writes``.
        """
        if not shares:
            return f"adapters: {NONE_SEEN} in the trace"
        told = f"adapters: {sum(shares):.0%} of the tokens, on {len(shares)} of them"
        if self.factor is not None:
            return f"{told}, whose steps are taken as {self.factor:g} times as long"
        read, write = self._curve(reads, "prefill"), self._curve(writes, "decode")
        if read is None or write is None:
            return f"{told}; {NONE_SEEN} where the profile is from, so that nothing is added for them: {REMEDY}"
        return f"{told}, measured to add {added(write)}" + ("" if read == write else f"; to prompts {added(read)}")

    def _curve(self, costs: WorkerCosts, role: str) -> AdapterCurve | None:
        return self.measured.get(role) or next(iter(self.measured.values()), None) or costs.adapters


def by_factor(costs: WorkerCosts, share: float, factor: float) -> WorkerCosts:
    """Returns ``costs`` with ``share`` (0 to 1) of the tokens on LoRA adapters.

    ``factor``: how many times as long a step takes if all its tokens are on adapters.
    """
    more = 1.0 + share * (factor - 1.0)
    if more == 1.0:
        return costs
    return msgspec.structs.replace(
        costs,
        about=f"{costs.about}, {share:.0%} of tokens on adapters at {factor:g} times",
        fixed=costs.fixed * more,
        weights=costs.weights * more,
        token=costs.token * more,
        sequence=costs.sequence * more,
    )


def by_curve(costs: WorkerCosts, shares: Sequence[float], curve: AdapterCurve) -> WorkerCosts:
    """Returns ``costs`` with adapters that have ``shares`` (0 to 1) of all tokens, at the measured costs
    ``curve``.
    """
    about = f"{costs.about}, {sum(shares):.0%} of tokens on adapters that add {added(curve)}"
    return msgspec.structs.replace(costs, about=about, mix=mix_of(curve, shares))


def added(curve: AdapterCurve) -> str:
    """Returns what ``curve`` says, at the rank that it was measured on, in words."""
    row, adapter = (1e6 * seconds * curve.rank for seconds in (curve.row, curve.adapter))
    return f"{row:.3g} µs a row and {adapter:.3g} µs an adapter of a step (rank {curve.rank:.3g})"


def parse_factor(text: str) -> float:
    """Returns the factor that ``--adapter-cost`` gives. Raises ConfigError."""
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 1.0 <= found < float("inf"):
        raise ConfigError(
            f"--adapter-cost {text!r}: write how many times as long a step takes, 1 or more, or a router's URL",
            "adapter_cost",
        )
    return found


def measured_by(cluster: Json) -> dict[str, AdapterCurve]:
    """Returns the mean measured cost of adapters by role, from a ``/v1/cluster`` snapshot.

    Raises ConfigError if no worker has seen steps with adapters and steps without.
    """
    found: dict[str, list[AdapterCurve]] = {}
    for worker in cluster["workers"]:
        if (cost := worker.get("adapter_cost")) is not None:
            curve = AdapterCurve(cost["row_s"], cost["adapter_s"], cost["rank"])
            found.setdefault(worker["role"], []).append(curve)
    if not found:
        raise ConfigError(f"{NONE_SEEN} by the workers of that cluster: {REMEDY}", "adapter_cost")
    return {role: mean_of(curves) for role, curves in found.items()}


def mean_of(curves: list[AdapterCurve]) -> AdapterCurve:
    """Returns the mean of ``curves``, at least one."""
    return AdapterCurve(*(fmean(getattr(c, name) for c in curves) for name in AdapterCurve.__struct_fields__))
