"""Says which host has which rank, and where hosts connect to one another. Knows nothing of sockets."""

from __future__ import annotations

import msgspec

LINK_S = 60.0  # seconds in which all connections must come about; hosts may still map their memory


class LinkPlan(msgspec.Struct, frozen=True):
    """Says where a worker's hosts take connections (``addresses``, IP and port, by host), and which rank is
    where.
    """

    token: bytes
    addresses: tuple[tuple[str, int], ...]
    places: tuple[int, ...]  # host of each rank

    def ranks_elsewhere(self, host: int) -> set[int]:
        """Returns the ranks that aren't on ``host``."""
        return {rank for rank, place in enumerate(self.places) if place != host}
