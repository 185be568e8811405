"""What drafts make of a worker's costs, by the chances that drafted tokens stand: a what-if, or from telemetry.

Knows nothing of who drafts, and takes drafts to cost nothing to make. A step that only writes verifies as many
drafts of each sequence as bring most tokens per second by the costs of its rows, as a worker does. Its time counts
over the tokens that it is expected to give, so that a simulated step still writes one token of each sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from baton.planner.costs.worker import WorkerCosts
from baton.protos.errors import ConfigError

MOST_POSITIONS = 16  # as many drafts as a worker verifies of a sequence in a step


def with_acceptance(costs: WorkerCosts, acceptance: Sequence[float]) -> WorkerCosts:
    """Returns the costs of a worker whose drafts stand by these chances, by position, if all before them do."""
    if not any(acceptance):
        return costs
    shown = ", ".join(f"{chance:.0%}" for chance in acceptance)
    return msgspec.structs.replace(
        costs, about=f"{costs.about}, drafts that stand by {shown}", acceptance=tuple(acceptance)
    )


def parse_acceptance(text: str) -> tuple[float, ...]:
    """Returns the chances that "0.8,0.6,0.5" names, by position. Raises ConfigError."""
    try:
        found = tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        found = (-1.0,)
    if len(found) > MOST_POSITIONS or not all(0.0 <= chance <= 1.0 for chance in found):
        most = f"up to {MOST_POSITIONS} chances from 0 to 1, as 0.8,0.6"
        raise ConfigError(f"--acceptance {text!r}: write {most}, or a router's URL", "acceptance")
    return found


def acceptance_of(cluster: Mapping[str, Any]) -> tuple[float, ...]:
    """Returns the mean chances of a running cluster's decode workers, from what ``/v1/cluster`` says.

    Raises ConfigError where none of them has judged a draft.
    """
    told = [worker["speculation"]["acceptance"] for worker in cluster["workers"] if worker.get("speculation")]
    columns = zip(*told, strict=False)
    means = [[share for share in column if share is not None] for column in columns]
    known = [sum(shares) / len(shares) for shares in means if shares]
    if not known:
        raise ConfigError("no worker of that cluster has judged a draft: is worker.speculation on?", "acceptance")
    return tuple(known)
