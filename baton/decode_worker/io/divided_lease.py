"""Puts together what the hosts of a worker's ranks have received under one lease, each its part of every page.

Knows nothing of connections or frames. Host 0 is the lead's. A block counts once every host has verified its part;
the commit counts once all hosts have one of the same epoch.
"""

from __future__ import annotations

from collections.abc import Iterable

from baton.decode_worker.io.intake_lease import IntakeLease
from baton.decode_worker.io.receiver_orders import TakeLease
from baton.protos.channel import Commit


class DividedLease:
    """Merges the reports of ``hosts`` hosts on the streams of ``lease``, the lead's.

    ``committed`` says that the engine was told of a commit, ``ends`` that the lease is being closed, ``withdrawn``
    that the other hosts take no streams of it, because whole pages came to the lead's.
    """

    def __init__(self, lease: IntakeLease, hosts: int, take: TakeLease) -> None:
        self.lease, self.take = lease, take  # the latter is the order to the other hosts
        self.committed = self.ends = self.withdrawn = False
        self.complete: set[int] = set()  # blocks, by index, that were told to the engine
        self._had = [set[int]() for _ in range(hosts)]
        self._open: dict[int, set[int]] = {}  # hosts with streams, by epoch
        self._commits: dict[int, Commit] = {}
        self._stopped: set[int] = set()  # epochs

    def opened(self, host: int, epoch: int) -> bool:
        """Records that ``host`` has a stream of ``epoch``; returns whether it is the first host with one."""
        if host == 0 and not self.lease.divided:
            self._had[0] = set(self.complete)  # whole pages are written over what came in parts
        found = self._open.setdefault(epoch, set())
        found.add(host)
        return len(found) == 1

    def closed(self, host: int, epoch: int) -> bool:
        """Records that ``host`` has no stream of ``epoch`` any more; returns whether no host has one now."""
        found = self._open.get(epoch)
        if found is None or host not in found:
            return False
        found.discard(host)
        if not found:
            del self._open[epoch]
        return not found

    def arrived(self, host: int, blocks: Iterable[int]) -> tuple[int, ...]:
        """Records that ``host`` has verified its part of ``blocks``; returns those that all hosts have by that."""
        self._had[host].update(blocks)
        fresh = [block for block in blocks if all(block in had for had in self._had)]
        return self.whole(fresh)

    def whole(self, blocks: Iterable[int]) -> tuple[int, ...]:
        """Records that ``blocks`` are complete; returns those that weren't before."""
        fresh = tuple(sorted({*blocks} - self.complete))
        self.complete.update(fresh)
        self.lease.completed(fresh)
        return fresh

    def commit(self, host: int, said: Commit) -> Commit | None:
        """Records that the senders to ``host`` are done; returns the commit once those to all hosts are."""
        if said.epoch != self.lease.epoch or self.ends:
            return None
        self._commits[host] = said
        if len(self._commits) < len(self._had):
            return None
        self.committed = True
        return self._commits[0]

    def rearm(self) -> None:
        """Begins another epoch, for which every host's streams have to commit again. Other hosts that took no
        streams any more begin anew: of what came to them before, only what is complete counts.
        """
        if self.withdrawn:
            self._had[1:] = [set(self.complete) for _ in self._had[1:]]
        self._commits.clear()
        self.withdrawn = False
        self.lease.committing = False

    def stops(self, epoch: int) -> bool:
        """Returns whether the other hosts' streams of ``epoch`` are to end now, because those of one have."""
        if self.committed or self.ends or self.withdrawn or epoch in self._stopped:
            return False
        self._stopped.add(epoch)
        return True

    def has_stopped(self, epoch: int) -> bool:
        """Returns whether every stream of ``epoch`` is to end, because those of one host have."""
        return epoch in self._stopped and not self.committed and not self.ends

    def open_epochs(self) -> list[int]:
        """Returns the epochs of which streams are open on some host."""
        return sorted(self._open)
