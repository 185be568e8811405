"""Bounds how many connections to a data port have shown no lease yet.

Knows nothing of frames. A connection leaves this set when its stream's first frame is accepted, which takes a
lease. A new connection is always let in: where there are too many, the oldest one of the address that has most
makes room, so that whoever connects a thousand times shuts nobody out but himself.
"""

from __future__ import annotations

from collections import Counter
from typing import Protocol

MAX_STRANGERS = 512  # connections without a lease, in all
# Connections without a lease from one address. Sixteen senders of one host that connect at once, by four lanes
# each, have 64.
MAX_FROM_ONE = 256


class DataPortConnection(Protocol):
    """Describes what these bounds need to know of a connection: how to close it."""

    def close(self, reset: bool = False) -> None:
        """Closes the connection at once; with ``reset`` its peer sees a broken connection."""


class UnleasedConnections:
    """Holds the connections that have not shown a lease, the oldest first."""

    def __init__(self) -> None:
        self._from: dict[DataPortConnection, str] = {}
        self._counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._from)

    def add(self, connection: DataPortConnection, address: str) -> None:
        """Lets a connection from ``address`` in, closing another one where there are too many."""
        if self._counts[address] >= MAX_FROM_ONE:
            self._close_oldest(address)
        elif len(self._from) >= MAX_STRANGERS:
            self.make_room()
        self._from[connection] = address
        self._counts[address] += 1

    def remove(self, connection: DataPortConnection) -> str:
        """Forgets a connection that was closed or has shown a lease. Returns its address, empty if it was not
        here.
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
