"""Injects deaths and returns of workers into a simulated cluster. Torch-free.

Knows nothing of how requests are placed. Requests continue as with the real router: a prompt whose prefill worker
died is prefilled by another, and the KV at its decode worker stays; an answer whose decode worker died is admitted
elsewhere as a prompt with its tokens so far, and its client sees a gap. Routers learn of a death at once, as from a
broken connection. A worker dies when its step is over, and comes back with empty caches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from baton.planner.simulator.faults import Failure
from baton.planner.simulator.flight import Flight
from baton.planner.simulator.machines import WorkerSimulation
from baton.planner.simulator.place_maker import SimDecode, SimPrefill
from baton.protos.errors import ConfigError


class FailureInjection:
    """Schedules the failures in ``sim``; counts deaths, answers that ``moved`` and prompts that were
    ``read_again``.

    Raises ConfigError for an unknown worker.
    """

    def __init__(self, sim: WorkerSimulation, failures: Sequence[Failure]) -> None:
        self._sim = sim
        self.deaths = self.moved = self.read_again = 0
        for failure in sorted(_apart(failures), key=lambda f: (f.at, f.worker)):
            place = self._place(failure.worker)
            sim.at(failure.at, lambda place=place: self._die(place))  # type: ignore[misc]
            if failure.until < math.inf:
                sim.at(failure.until, lambda place=place: self._return(place))  # type: ignore[misc]

    def _place(self, name: str) -> SimPrefill | SimDecode:
        places: list[SimPrefill | SimDecode] = [*self._sim.prefills.values(), *self._sim.decodes.values()]
        found = {place.name: place for place in places}
        if name not in found:
            raise ConfigError(f"there is no worker {name!r} to fail; there are {', '.join(found)}", "fail")
        return found[name]

    def _die(self, place: SimPrefill | SimDecode) -> None:
        if place.down:
            return
        self.deaths += 1
        worker_id = place.info.worker_id
        if worker_id in self._sim.decodes:
            self._lose_decode_worker(self._sim.decodes[worker_id])
        else:
            self._lose_prefill_worker(self._sim.prefills[worker_id])
        self._sim.pump()

    def _return(self, place: SimPrefill | SimDecode) -> None:
        place.down = False
        place.changed()
        self._sim.pump()

    def _lose_decode_worker(self, place: SimDecode) -> None:
        sim = self._sim
        sim.settle(place)
        place.node.stop()
        lost = [flight for flight in sim.active.values() if flight.decode == place.info.worker_id]
        sim.restart_decode(place)
        for flight in lost:
            sim.drop(flight)
        self.moved += len(lost)
        sim.put_back([self._leg(flight) for flight in lost])

    def _lose_prefill_worker(self, place: SimPrefill) -> None:
        sim = self._sim
        lost = [flight for flight in sim.active.values() if flight.prefill == place.info.worker_id]
        lost = [flight for flight in lost if sim.awaits_kv(flight)]
        sim.restart_prefill(place)
        self.read_again += len(lost)
        for flight in lost:
            sim.lose_prefill_worker(flight)

    def _leg(self, flight: Flight) -> Flight:
        """Returns the rest of an answer: its prompt with what was written, and the tokens that are left."""
        return flight.again(self._sim.new_index(), self._sim.block)


def _apart(failures: Sequence[Failure]) -> list[Failure]:
    """Returns the failures with those of one worker that overlap as one: it is dead until the last of them ends."""
    found: dict[str, list[Failure]] = {}
    for failure in sorted(failures, key=lambda f: f.at):
        own = found.setdefault(failure.worker, [])
        if own and failure.at <= own[-1].until:
            own[-1] = msgspec.structs.replace(own[-1], until=max(own[-1].until, failure.until))
        else:
            own.append(failure)
    return [failure for own in found.values() for failure in own]
