"""The estimated bytes that requests in flight hold in this router, and who gives way where these would be too many.

Memory is shared by all models and tenants, so the tenant whose waiting requests hold the most of it gives way: the
longest queue is pushed out (Suter, Lakshman, Stiliadis, Choudhury 1999, "Buffer management schemes for supporting
TCP in gigabit routers with per-flow queueing"). Knows nothing of order, workers or errors.
"""

from __future__ import annotations

from collections.abc import Iterator

from baton.router.dispatch.ticket import Ticket


class _Tenant:
    """A tenant's waiting requests in the order in which they came, and their bytes by the tenant's weight."""

    __slots__ = ("share", "tickets")

    def __init__(self) -> None:
        self.tickets: dict[Ticket, None] = {}
        self.share = 0.0


class HeldBytes:
    """Counts the bytes of requests in flight, ``most`` at most, and which tenants' requests wait."""

    def __init__(self, most: int) -> None:
        self.most, self.total = most, 0
        self._tenants: dict[str, _Tenant] = {}

    def take(self, ticket: Ticket) -> None:
        """Counts the bytes of a request that comes, and waits."""
        ticket.held_bytes = ticket.load.size
        self.total += ticket.held_bytes
        tenant = self._tenants.setdefault(ticket.load.tenant, _Tenant())
        tenant.tickets[ticket] = None
        tenant.share += _share(ticket)

    def placed(self, ticket: Ticket) -> None:
        """Notes that a request no longer waits, so that it can't give way; it holds its bytes still. Idempotent."""
        tenant = self._tenants.get(ticket.load.tenant)
        if tenant is not None and ticket in tenant.tickets:
            del tenant.tickets[ticket]
            tenant.share -= _share(ticket)
            if not tenant.tickets:
                del self._tenants[ticket.load.tenant]

    def let_go(self, ticket: Ticket) -> None:
        """Subtracts the bytes of a request that is over. Idempotent."""
        self.total -= ticket.held_bytes
        ticket.held_bytes = 0

    def yielding(self, newcomer: Ticket) -> list[Ticket] | None:
        """Returns the waiting requests that have to give way to ``newcomer``, None if it has to go itself.

        A tenant gives way with its youngest requests, as long as what waits of it holds more, by its weight, than
        what waits of the newcomer's tenant would.
        """
        excess, found = self.total + newcomer.load.size - self.most, list[Ticket]()
        if excess <= 0:
            return found
        shares = {name: tenant.share for name, tenant in self._tenants.items()}
        youngest: dict[str, Iterator[Ticket]] = {n: reversed(t.tickets) for n, t in self._tenants.items()}
        own = shares.pop(newcomer.load.tenant, 0.0) + _share(newcomer)
        while excess > 0:
            name = max(shares, key=shares.__getitem__, default="")
            if shares.get(name, 0.0) <= own:
                return None
            ticket = next(youngest[name], None)
            if ticket is None:
                return None
            shares[name] -= _share(ticket)
            excess -= ticket.held_bytes
            found.append(ticket)
        return found


def _share(ticket: Ticket) -> float:
    return ticket.load.size / ticket.load.weight
