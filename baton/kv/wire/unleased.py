"""Who is connected to a data port: peers that hold a lease, and strangers, of whom there may be few at once.

Knows nothing of frames. A stranger becomes a peer as its stream's first frame is accepted, which takes a lease. A
new connection is always let in: where there are too many strangers, the oldest of the address that has most makes
room, so that whoever connects a thousand times shuts nobody out but himself.
"""

from __future__ import annotations

from collections import Counter
from typing import Protocol

MAX_STRANGERS = 512
MAX_FROM_ONE = 256  # of one address; a host of sixteen senders that all connect at once, by four lanes each, has 64


class DataPortConnection(Protocol):
    """A connection."""

    def close(self, reset: bool = False) -> None:
        """Now."""


class UnleasedConnections:
    """Connections that have not shown a lease, the oldest first."""

    def __init__(self) -> None:
        self._from: dict[DataPortConnection, str] = {}
        self._counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._from)

    def add(self, connection: DataPortConnection, address: str) -> None:
        """Let it in, in the place of another where there are too many."""
        if self._counts[address] >= MAX_FROM_ONE:
            self._close_oldest(address)
        elif len(self._from) >= MAX_STRANGERS:
            self.make_room()
        self._from[connection] = address
        self._counts[address] += 1

    def remove(self, connection: DataPortConnection) -> str:
        """It is closed, or a stranger no more; its address, empty if it was none."""
        address = self._from.pop(connection, "")
        if address:
            self._counts -= Counter((address,))
        return address

    def make_room(self) -> None:
        """Close the oldest of the address that has most."""
        if self._counts:
            self._close_oldest(self._counts.most_common(1)[0][0])

    def _close_oldest(self, address: str) -> None:
        oldest = next(connection for connection, known in self._from.items() if known == address)
        self.remove(oldest)
        oldest.close(reset=True)
