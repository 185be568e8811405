"""Helm values for a planned cluster: its numbers of workers, and the settings that they were planned with.

Knows nothing of charts but the names of their keys. The values are laid over an operator's own, which give what no
plan knows: model, images, nodes.
"""

from __future__ import annotations

import yaml

from baton.planner.costs.worker import WorkerCosts
from baton.planner.simulator.cluster import ClusterScenario
from baton.protos.json import Json

Values = Json


def chart_values(scenario: ClusterScenario, met: bool) -> str:
    """Returns the values as YAML text; "" if Baton's engine can't run such workers.

    ``met``: the plan meets its SLOs; if not, a comment says so.
    """
    if scenario.prefill.unsupported or scenario.decode.unsupported:
        return ""
    settings = scenario.settings
    pools: Values = {"decode": _pool(scenario.decode, settings.decode_chunk, settings.max_batch)}
    values: Values = {"ratio": {"prefill": settings.prefill, "decode": settings.decode}}
    if settings.prefill:
        pools["prefill"] = _pool(scenario.prefill, settings.prefill_chunk, settings.max_batch)
    else:
        pools["prefill"] = None  # takes the chart's own away
        values["config"] = {"cluster": {"colocated": True}}
    values["workers"] = {"pools": pools}
    about = scenario.decode.about
    if settings.prefill and scenario.prefill.about != about:
        about = f"prefill {scenario.prefill.about}; decode {about}"
    lines = [f"# baton plan: {about}. Lay it over your own values (helm … -f values.yaml -f this)"]
    lines += [] if met else ["# It does NOT meet the SLOs that it was planned for."]
    return "\n".join([*lines, yaml.safe_dump(values, sort_keys=False)])


def _pool(costs: WorkerCosts, chunk: int, batch: int) -> Values:
    """A pool's settings as they were simulated, and its device where the costs are of a known accelerator."""
    settings = dict(costs.settings) | {"max_batch": batch, "prefill_chunk_tokens": chunk}
    if not costs.device:
        return {"settings": settings}
    return {"device": costs.device, "gpus": costs.accelerators, "settings": settings}
