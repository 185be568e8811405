"""The table of REST connections: limits in all and per address, which to close to make room, and which are too
slow.

Knows nothing of sockets or HTTP. A newcomer beyond the limits gets one of a few spare places, in which only health
and metrics are answered; there the oldest makes room, so a probe gets through however many connections hang.
"""

from __future__ import annotations

import enum
import socket
from collections import Counter
from collections.abc import Callable
from typing import Protocol

import msgspec

SPARE = 32  # connections beyond the limits, for probes and scrapers
YOUNG_S = 1.0  # a connection that has not asked yet is closed for another no sooner
SIX = 8  # bytes of an IPv6 address that name a client's network: whoever has one has all of it


class EdgeLimits(msgspec.Struct, frozen=True):
    """Limits connections, and what each may send before its caller is known: bytes, counts, seconds.

    ``min_body_rate`` is in bytes/s; ``max_per_address`` 0: any number.
    """

    max_header_bytes: int = 32 << 10
    max_headers: int = 128
    max_url_bytes: int = 8 << 10
    header_timeout_s: float = 10.0
    min_body_rate: float = 1024.0
    keep_alive_s: float = 65.0
    max_connections: int = 4096
    max_per_address: int = 1024


class Phase(enum.Enum):
    """Names what a connection is doing, from FRESH (no byte of a request yet) to ENDING (answered before its
    request was complete).
    """

    FRESH = enum.auto()
    HEAD = enum.auto()
    BODY = enum.auto()
    ANSWER = enum.auto()
    IDLE = enum.auto()
    ENDING = enum.auto()


class Connection(Protocol):
    """Declares what the table asks of a connection; ``since`` is when its phase began, on the table's clock."""

    phase: Phase
    since: float

    def drop(self) -> None:
        """Closes the connection now."""

    def look(self, now: float) -> None:
        """Closes the connection if it is too slow at time ``now`` of the table's clock."""


class ConnectionEntry(msgspec.Struct, eq=False):
    """Keeps one connection's place from accept to end; in a ``spare`` place only health and metrics are
    answered.
    """

    address: bytes
    spare: bool = False
    connection: Connection | None = None


class ConnectionTable:
    """Keeps the places of one listener's connections; ``refused`` counts newcomers beyond the limits."""

    def __init__(self, limits: EdgeLimits, clock: Callable[[], float]) -> None:
        self.limits, self.clock = limits, clock
        self._entries: dict[ConnectionEntry, None] = {}  # in order of arrival
        self._spares: dict[ConnectionEntry, None] = {}
        self._of: Counter[bytes] = Counter()
        self.refused = 0

    def __len__(self) -> int:
        return len(self._entries) + len(self._spares)

    def enter(self, host: str) -> ConnectionEntry | None:
        """Returns a place for a connection from ``host``, perhaps closing an idle one; None if all spare places are
        in a handshake.
        """
        address, most = network_of(host), self.limits.max_per_address
        crowded = bool(most) and self._of[address] >= most
        if not crowded and (len(self._entries) < self.limits.max_connections or self._evict()):
            entry = ConnectionEntry(address)
            self._entries[entry] = None
            self._of[address] += 1
            return entry
        self.refused += 1
        if len(self._spares) >= SPARE and not self._drop_oldest_spare():
            return None
        entry = ConnectionEntry(address, spare=True)
        self._spares[entry] = None
        return entry

    def leave(self, entry: ConnectionEntry) -> None:
        """Frees the place of a connection that has ended. Idempotent."""
        if entry in self._entries:
            del self._entries[entry]
            self._of[entry.address] -= 1
            if not self._of[entry.address]:
                del self._of[entry.address]
        self._spares.pop(entry, None)

    def look(self) -> None:
        """Has every connection check its timeouts."""
        now = self.clock()
        for entry in [*self._entries, *self._spares]:
            if entry.connection is not None:
                entry.connection.look(now)

    def make_room(self, count: int) -> None:
        """Closes up to ``count`` connections that are idle, or slow to send a request, for over YOUNG_S."""
        for _ in range(count):
            if not self._evict(self.clock() - YOUNG_S):
                break

    def _evict(self, idle_since: float = float("inf")) -> bool:
        """Close the longest idle one, else the oldest that has not asked yet; False where there is none."""
        asking = (Phase.FRESH, Phase.HEAD)
        idle = [
            p
            for p in self._entries
            if p.connection is not None and p.connection.phase is Phase.IDLE and p.connection.since < idle_since
        ]
        before = self.clock() - YOUNG_S
        slow = [
            p
            for p in (() if idle else self._entries)
            if p.connection is not None and p.connection.phase in asking and p.connection.since < before
        ]
        found = min(idle or slow, key=_since, default=None)
        return found is not None and self._dropped(found)

    def _drop_oldest_spare(self) -> bool:
        found = next((entry for entry in self._spares if entry.connection is not None), None)
        return found is not None and self._dropped(found)

    def _dropped(self, entry: ConnectionEntry) -> bool:
        assert entry.connection is not None
        self.leave(entry)
        entry.connection.drop()
        return True


def network_of(host: str) -> bytes:
    """Returns the key by which connections are counted: an IPv4 address as text, or an IPv6 address's /64 network
    (8 bytes).
    """
    if ":" not in host:
        return host.encode()
    try:
        return socket.inet_pton(socket.AF_INET6, host.partition("%")[0])[:SIX]
    except OSError:
        return host.encode()


def _since(entry: ConnectionEntry) -> float:
    assert entry.connection is not None
    return entry.connection.since
