"""The interface by which the router reads the roster of workers; ``cluster.membership.PolledRoster`` implements
it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from baton.protos.measurements import WorkerLoad
from baton.protos.nouns import WorkerInfo


class RosterEntry(Protocol):
    """Describes one worker, as it last described itself."""

    @property
    def info(self) -> WorkerInfo:
        """Returns the worker's identity, role and state."""

    @property
    def load(self) -> WorkerLoad:
        """Returns the worker's load, which is up to a heartbeat old."""

    @property
    def age_s(self) -> float:
        """Returns the seconds since the worker's last heartbeat."""


class RosterReader(Protocol):
    """Lists the workers that have joined the cluster."""

    def snapshot(self) -> Mapping[str, RosterEntry]:
        """Returns the entries by worker id, without waiting for Redis."""
