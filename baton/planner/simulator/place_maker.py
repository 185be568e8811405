"""Construction of a simulated cluster's workers: prefill-0 …, decode-0 …, and those of pools. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import msgspec

from baton.planner.costs.worker import WorkerCosts
from baton.planner.simulator.decode_node import CompressedDecode
from baton.planner.simulator.faults import Failure, SimPool
from baton.planner.simulator.flight import Flight
from baton.planner.simulator.place import Node, SimWorker
from baton.planner.simulator.prefill_node import PrefillNode
from baton.planner.simulator.shared_cores import CoreSharing, SharedCores
from baton.planner.simulator.stepwise_decode import StepwiseDecode
from baton.planner.traces.trace import Trace
from baton.protos.nouns import BLOCK_TOKENS, KvLayout, WorkerInfo

Ship = Callable[[Flight, int, bool], None]


DecodeNode = CompressedDecode | StepwiseDecode
SimPrefill = SimWorker[PrefillNode]
SimDecode = SimWorker[DecodeNode]


class SimSettings(msgspec.Struct, frozen=True):
    """Describes the simulated cluster.

    ``prefill`` 0: colocated, every worker prefills and decodes. Chunks and windows are in tokens, as in the real
    settings. ``stepwise``: decode steps are simulated one by one. ``writers_wait``: a decode worker's step that
    prefills generates nothing, as vLLM of 2023; else it does both.
    """

    prefill: int
    decode: int
    policy: str = "cost"
    max_batch: int = 128
    prefill_chunk: int = 2048
    decode_chunk: int = 512
    window_tokens: int = 4096
    local_max_tokens: int = 64
    stepwise: bool = False
    writers_wait: bool = False
    seed: int = 0

    def with_chunks_of(self, reads: WorkerCosts, writes: WorkerCosts) -> SimSettings:
        """Returns these settings with the chunks that prefill workers ``reads`` and decode workers ``writes`` were
        measured with, where they were; a decode worker's is never longer than here.
        """
        return msgspec.structs.replace(
            self,
            prefill_chunk=reads.chunk or self.prefill_chunk,
            decode_chunk=min(self.decode_chunk, writes.chunk or self.decode_chunk),
        )


class ClusterScenario(msgspec.Struct, frozen=True):
    """Describes a simulation: a cluster, its workers' costs, the trace of requests, and failures.

    ``pools`` are workers unlike the others; ``sharing``: all workers share the same CPU cores.
    """

    settings: SimSettings
    prefill: WorkerCosts
    decode: WorkerCosts
    trace: Trace
    pools: Sequence[SimPool] = ()
    failures: Sequence[Failure] = ()
    sharing: CoreSharing | None = None


class SimWorkerMaker:
    """Makes simulated workers; ``block`` is tokens per block, ``ship`` is called with what prefill workers
    computed. ``cores``: on which all workers compute, if they share some.
    """

    def __init__(self, settings: SimSettings, block: int, ship: Ship, cores: SharedCores | None) -> None:
        self._settings, self._block, self._ship, self._cores = settings, block, ship, cores

    def prefills(self, count: int, costs: WorkerCosts, pools: Sequence[SimPool]) -> dict[str, SimPrefill]:
        """Returns all prefill workers by worker id: ``count`` of the cluster's own, then those of pools."""
        named = self._named("prefill", count, costs, pools)
        made = (self._worker("prefill", *one, self.prefill_node(one[2])) for one in named)
        return {worker.info.worker_id: worker for worker in made}

    def decodes(self, count: int, costs: WorkerCosts, pools: Sequence[SimPool]) -> dict[str, SimDecode]:
        """Returns all decode workers by worker id: ``count`` of the cluster's own, then those of pools."""
        named = self._named("decode", count, costs, pools)
        made = (self._worker("decode", *one, self.decode_node(one[1], one[2])) for one in named)
        return {worker.info.worker_id: worker for worker in made}

    def prefill_node(self, costs: WorkerCosts) -> PrefillNode:
        """Returns a new simulated engine of a prefill worker."""
        return PrefillNode(costs, self._block, self._settings.prefill_chunk, self._ship)

    def decode_node(self, name: str, costs: WorkerCosts) -> DecodeNode:
        """Returns a new simulated engine of decode worker ``name``: the real scheduler, or its compressed twin."""
        settings = self._settings
        limits = settings.max_batch, settings.decode_chunk
        costs = msgspec.structs.replace(costs, fixed=costs.fixed + costs.overhead.step)
        if settings.stepwise:
            stretched = partial(self._cores.stretched, name) if self._cores else None
            return StepwiseDecode(costs, self._block, *limits, stretched)
        return CompressedDecode(costs, self._block, *limits, settings.writers_wait)

    def _named(
        self, role: str, count: int, costs: WorkerCosts, pools: Sequence[SimPool]
    ) -> Iterator[tuple[str, str, WorkerCosts]]:
        """Yields each worker's id, its name as operators say it, and its costs."""
        for i in range(count):
            yield f"{role[0]}{i:03d}", f"{role}-{i}", costs
        for pool in pools:
            if pool.role == role:
                for i in range(pool.count):
                    yield f"{pool.name}-{i}", f"{pool.name}-{i}", pool.costs

    def _worker(self, role: str, worker_id: str, name: str, costs: WorkerCosts, node: Node) -> SimWorker[Node]:
        layout = KvLayout("bfloat16", (), costs.kv_bytes_per_token * BLOCK_TOKENS, "bfloat16")
        pages, room = costs.kv_tokens // BLOCK_TOKENS, self._settings.max_batch
        info = WorkerInfo(
            worker_id, worker_id, role, "", "model", "", layout, 1 << 30, 1 << 30, (), pages, max_batch=room
        )
        return SimWorker(name, info, node, costs, self._block)
