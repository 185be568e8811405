"""The effect of speculative decoding on a worker's costs, by the probabilities that drafted tokens are accepted.

Knows nothing of who drafts, and takes drafts to cost nothing to make. A decode step verifies as many drafts per
sequence as bring the most tokens per second by the costs of its rows, as a worker does. Its time is divided by the
tokens that it is expected to give, so that a simulated step still gives one token per sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile, zip_longest

import msgspec

from baton.planner.costs.worker import WorkerCosts
from baton.protos.errors import ConfigError
from baton.protos.json import Json

MOST_POSITIONS = 16  # as many drafts as a worker verifies of a sequence in a step


def with_acceptance(costs: WorkerCosts, acceptance: Sequence[float]) -> WorkerCosts:
    """Returns ``costs`` with speculation; ``acceptance[i]`` is the probability that draft position i is accepted if
    all before it are.
    """
    if not any(acceptance):
        return costs
    shown = ", ".join(f"{chance:.0%}" for chance in acceptance)
    return msgspec.structs.replace(
        costs, about=f"{costs.about}, drafts that stand by {shown}", acceptance=tuple(acceptance)
    )


def parse_acceptance(text: str) -> tuple[float, ...]:
    """Parses text such as "0.8,0.6,0.5" into acceptance probabilities by draft position. Raises ConfigError."""
    try:
        found = tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        found = (-1.0,)
    if len(found) > MOST_POSITIONS or not all(0.0 <= chance <= 1.0 for chance in found):
        most = f"up to {MOST_POSITIONS} chances from 0 to 1, as 0.8,0.6"
        raise ConfigError(f"--acceptance {text!r}: write {most}, or a router's URL", "acceptance")
    return found


def acceptance_of(cluster: Json) -> tuple[float, ...]:
    """Returns, per draft position, the mean probability that a drafted token is accepted, from a ``/v1/cluster``
    snapshot.

    Raises ConfigError if no worker has verified a draft.
    """
    told = [worker["speculation"]["acceptance"] for worker in cluster["workers"] if worker.get("speculation")]
    columns = zip_longest(*told)  # workers may draft different numbers of tokens
    judged = ([share for share in column if share is not None] for column in columns)
    known = [sum(shares) / len(shares) for shares in takewhile(bool, judged)]
    if not known:
        raise ConfigError("no worker of that cluster has judged a draft: is worker.speculation on?", "acceptance")
    return tuple(known)
