"""``[cluster]`` and its pools: how many workers there are.

Knows nothing of where they run.
"""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from baton.cluster.sections.base import Section
from baton.cluster.sections.worker import WorkerConfig
from baton.protos.json import Json

ACCELERATORS_PER_ENGINE = 1  # that one rank of a worker computes on; more would be reserved for nothing


class Pool(Section):
    """Describes workers beside ``prefill`` and ``decode``, on hardware of their own: for long prompts, or another
    accelerator.
    """

    name: str = Field(
        pattern=r"^[a-z][a-z0-9-]{0,31}$",
        description="its slots are <name>-0, <name>-1 …; a lower-case letter, then up to 31 of them, digits or -",
    )
    role: Literal["prefill", "decode"] = Field(description="what its workers are")
    count: int = Field(default=1, ge=0, le=1024, description="how many")
    resources: dict[str, float] = Field(
        default={}, description="that a Ray node must have free for each; empty: one baton_<role>"
    )
    labels: dict[str, str] = Field(default={}, description="that a Ray node must carry")
    gang: int = Field(
        default=1, ge=1, le=64, description="bundles of these resources per worker, all on one node or none"
    )
    hosts: int = Field(
        default=1,
        ge=1,
        le=16,
        description="Ray nodes of each worker, all or none, among which its ranks are dealt in equal numbers",
    )
    worker: Json = Field(default={}, description="settings of [worker] that differ here")


RANK_KINDS = ("tp", "cp", "pp", "ep")  # settings of a worker: what its ranks share


class ClusterConfig(Section):
    """Sets the number of workers of each role, and where a run keeps its sockets, locks and logs."""

    prefill: int = Field(default=1, ge=0, le=1024, description="prefill workers")
    decode: int = Field(default=1, ge=1, le=1024, description="decode workers")
    pools: tuple[Pool, ...] = Field(default=(), description="further workers, on hardware of their own")
    prefill_tp: int = Field(default=0, ge=0, le=64, description="ranks of each prefill worker; 0: worker.tp")
    decode_tp: int = Field(default=0, ge=0, le=64, description="ranks of each decode worker; 0: worker.tp")
    prefill_cp: int = Field(default=0, ge=0, le=64, description="ranks of each prefill worker that share rows")
    prefill_pp: int = Field(default=0, ge=0, le=64, description="ranks of each prefill worker that share layers")
    decode_pp: int = Field(default=0, ge=0, le=64, description="ranks of each decode worker that share layers")
    prefill_ep: int = Field(default=0, ge=0, le=64, description="ranks of each prefill worker that share experts")
    decode_ep: int = Field(default=0, ge=0, le=64, description="ranks of each decode worker that share experts")
    colocated: bool = Field(
        default=False, description="decode workers read their prompts themselves; no prefill workers"
    )
    namespace: str = Field(
        default="baton",
        pattern=r"^[A-Za-z0-9_.-]{1,64}$",
        description="keeps clusters apart that share a Redis or a Ray; up to 64 letters, digits, _, . or -",
    )
    lend_cores: bool = Field(
        default=True,
        description="on one machine, workers that compute use the cores of those that don't. Left out are workers "
        "with worker.threads, several ranks or another device than cpu",
    )
    run_dir: str = Field(default="", description="empty makes one for this run")
    start_timeout_s: float = Field(default=300.0, gt=0, description="a cluster that isn't up by then gives up")

    @property
    def prefill_workers(self) -> int:
        """Returns the number of prefill workers outside pools: 0 if ``colocated``."""
        return 0 if self.colocated else self.prefill


def role_worker(worker: WorkerConfig, cluster: ClusterConfig, role: str) -> WorkerConfig:
    """Returns the worker settings with the numbers of ranks that workers of ``role`` outside pools have (tp, cp,
    pp, ep).

    If the role has any ranks of its own, they replace all of ``worker``'s.
    """
    prefill = cluster.prefill_tp, cluster.prefill_cp, cluster.prefill_pp, cluster.prefill_ep
    decode = cluster.decode_tp, 0, cluster.decode_pp, cluster.decode_ep
    own = prefill if role == "prefill" else decode
    if not any(own):
        return worker
    return worker.model_copy(update={kind: ranks or 1 for kind, ranks in zip(RANK_KINDS, own, strict=True)})


def ranks_on_cards(worker: WorkerConfig) -> int:
    """Returns the number of ranks of a worker on device "cuda", each of which has a GPU; 1 on other devices."""
    return math.prod(getattr(worker, kind) for kind in RANK_KINDS) if worker.device == "cuda" else 1


def pool_worker(worker: WorkerConfig, pool: Pool) -> WorkerConfig:
    """Returns the worker settings with the pool's own settings applied. Raises pydantic's ValidationError."""
    return WorkerConfig.model_validate(worker.model_dump() | pool.worker)
