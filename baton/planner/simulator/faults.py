"""Deaths and returns of workers to simulate, and pools of workers unlike the others. Torch-free.

Knows nothing of how they are simulated.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

import msgspec

from baton.planner.costs.worker import WorkerCosts, worker_costs
from baton.protos.errors import ConfigError

FAILURE = re.compile(r"([a-z][a-z0-9-]*-\d+)@(\d+(?:\.\d+)?):(\d+(?:\.\d+)?|never)")
POOL = re.compile(r"([a-z][a-z0-9-]{0,31}):(prefill|decode):(\d{1,4})=(.+)")


class Failure(msgspec.Struct, frozen=True):
    """Says that ``worker`` (prefill-0, decode-1, or a pool's) is dead from ``at`` until ``until``, in seconds of
    the trace.
    """

    worker: str
    at: float
    until: float


class SimPool(msgspec.Struct, frozen=True):
    """Describes ``count`` further workers of ``role``, named <name>-0 and so on, with costs of their own."""

    name: str
    role: str
    count: int
    costs: WorkerCosts


def parse_failure(text: str) -> Failure:
    """Parses WORKER@FROM:UNTIL in seconds, as in ``decode-1@30:45`` or ``decode-1@30:never``.

    Raises ConfigError.
    """
    match = FAILURE.fullmatch(text)
    if match is None:
        raise ConfigError(f"--fail {text!r}: write WORKER@FROM:UNTIL in seconds, as in decode-1@30:45", "fail")
    until = math.inf if match[3] == "never" else float(match[3])
    if until <= float(match[2]):
        raise ConfigError(f"--fail {text!r}: it must come back later than it dies", "fail")
    return Failure(match[1], float(match[2]), until)


def parse_pool(text: str, max_chunk: int) -> SimPool:
    """Parses NAME:ROLE:COUNT=PROFILE, as in ``long:prefill:2=roofline:llama-3-70b@h100x8``. Raises ConfigError.

    ``max_chunk``: prefill tokens per step, for the profile's memory.
    """
    match = POOL.fullmatch(text)
    if match is None or match[1] in ("prefill", "decode"):
        raise ConfigError(
            f"--pool {text!r}: write NAME:ROLE:COUNT=PROFILE, as in long:prefill:2=roofline:llama-3-70b@h100x8, "
            "with a name that is neither prefill nor decode",
            "pool",
        )
    return SimPool(match[1], match[2], int(match[3]), worker_costs(match[4], max_chunk))


def check_pools(pools: Sequence[SimPool], others: Iterable[WorkerCosts]) -> None:
    """Raises ConfigError unless all workers have equal KV bytes per token, and pools distinct names."""
    sizes = {costs.kv_bytes_per_token for costs in others} | {pool.costs.kv_bytes_per_token for pool in pools}
    if len(sizes) > 1:
        raise ConfigError(
            f"profiles of {', '.join(map(str, sorted(sizes)))} bytes of KV per token are of different models: "
            "one can't read for another",
            "profile",
        )
    if len({pool.name for pool in pools}) < len(pools):
        raise ConfigError("two pools have the same name; give each its own", "pool")
