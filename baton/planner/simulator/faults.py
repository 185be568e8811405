"""Deaths and returns of workers in a simulated cluster, and pools of workers unlike the others. Torch-free.

Knows nothing of how requests are placed. Requests continue as with the real router: a prompt whose prefill worker
died is prefilled by another, and the KV at its decode worker stays; an answer whose decode worker died is admitted
elsewhere as a prompt with its tokens so far, and its client sees a gap. Routers learn of a death at once, as from a
broken connection. A worker dies when its step is over, and comes back with empty caches.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from baton.planner.costs.worker import WorkerCosts, worker_costs
from baton.planner.simulator.flight import Flight
from baton.planner.simulator.place import SimWorker
from baton.protos.errors import ConfigError

if TYPE_CHECKING:
    from baton.planner.simulator.cluster import ClusterSim

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


class FailureInjection:
    """Schedules the failures in ``sim``; counts deaths, answers that ``moved`` and prompts that were
    ``read_again``.

    Raises ConfigError for an unknown worker.
    """

    def __init__(self, sim: ClusterSim, failures: Sequence[Failure]) -> None:
        self._sim = sim
        self.deaths = self.moved = self.read_again = 0
        for failure in sorted(failures, key=lambda f: (f.at, f.worker)):
            place = self._place(failure.worker)
            sim.at(failure.at, lambda place=place: self._die(place))  # type: ignore[misc]
            if failure.until < math.inf:
                sim.at(failure.until, lambda place=place: self._return(place))  # type: ignore[misc]

    def _place(self, name: str) -> SimWorker:
        found = {place.name: place for place in (*self._sim.prefills.values(), *self._sim.decodes.values())}
        if name not in found:
            raise ConfigError(f"there is no worker {name!r} to fail; there are {', '.join(found)}", "fail")
        return found[name]

    def _die(self, place: SimWorker) -> None:
        if place.down:
            return
        self.deaths += 1
        if place.info.role == "decode":
            self._lose_writer(place)
        else:
            self._lose_reader(place)
        self._sim.pump()

    def _return(self, place: SimWorker) -> None:
        place.down = False
        place.changed()
        self._sim.pump()

    def _lose_writer(self, place: SimWorker) -> None:
        sim = self._sim
        sim.settle(place)
        place.node.stop()
        lost = [flight for flight in sim.active.values() if flight.decode == place.info.worker_id]
        place.die(sim.fresh_node(place))
        for flight in lost:
            sim.drop(flight)
        self.moved += len(lost)
        sim.put_back([self._leg(flight) for flight in lost])

    def _lose_reader(self, place: SimWorker) -> None:
        sim = self._sim
        lost = [flight for flight in sim.active.values() if flight.prefill == place.info.worker_id]
        lost = [flight for flight in lost if sim.awaits_kv(flight)]
        place.die(sim.fresh_node(place))
        self.read_again += len(lost)
        for flight in lost:
            sim.lose_prefill_worker(flight)

    def _leg(self, flight: Flight) -> Flight:
        """What is left of an answer: its prompt with what was written, and the tokens that are still to be."""
        return flight.again(self._sim.new_index(), self._sim.block)
