"""Limits the number of connections to a data port that have shown no lease yet.

Knows nothing of frames. A connection leaves this set when its stream's first frame is accepted, which takes a
lease. A new connection is always admitted: if there are too many, the oldest one of the address that has most is
closed, so that a peer that connects a thousand times only harms itself.
"""

from __future__ import annotations

from collections import Counter
from typing import Protocol

MAX_STRANGERS = 512  # connections without a lease, in all
# Connections without a lease from one address. Sixteen senders of one host that connect at once, by four lanes
# each, have 64.
MAX_FROM_ONE = 256


class DataPortConnection(Protocol):
    """A connection that can be closed to make room."""

    def close(self, reset: bool = False) -> None:
        """Closes the connection at once; with ``reset`` its peer sees a broken connection."""


class UnleasedConnections:
    """The connections that have not shown a lease, the oldest first; its length is their number."""

    def __init__(self) -> None:
        self._from: dict[DataPortConnection, str] = {}
        self._counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._from)

    def add(self, connection: DataPortConnection, address: str) -> None:
        """Admits a connection from ``address``, closing another one if there are too many."""
        if self._counts[address] >= MAX_FROM_ONE:
            self._close_oldest(address)
        elif len(self._from) >= MAX_STRANGERS:
            self.make_room()
        self._from[connection] = address
        self._counts[address] += 1

    def remove(self, connection: DataPortConnection) -> str:
        """Removes a connection that was closed or has shown a lease; returns its address, empty if it was not in
        the set.
        """
        address = self._from.pop(connection, "")
        if address:
            self._counts -= Counter((address,))
        return address

    def make_room(self) -> None:
        """Closes the oldest connection of the address that has most."""
        if self._counts:
            self._close_oldest(self._counts.most_common(1)[0][0])

    def _close_oldest(self, address: str) -> None:
        oldest = next(connection for connection, known in self._from.items() if known == address)
        self.remove(oldest)
        oldest.close(reset=True)
