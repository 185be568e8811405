"""Fair turns: items of many tenants, a few at a time, in turns of their tenants. Pure.

Knows nothing of what the items are, or of time. Tenants take turns in a ring, so that a tenant waits for at most
one item of each other tenant, however many those have.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)
Tenant = Hashable


class Turns(Generic[T]):
    """Lets up to ``slots`` items run at once, ``each`` per tenant; the next is of a tenant with the fewest running.

    ``join`` an item, call ``next`` until it returns None, and ``leave`` at the item's end.
    """

    def __init__(self, slots: int, each: int = 1) -> None:
        self._slots, self._each = slots, each
        self._waiting: OrderedDict[Tenant, deque[T]] = OrderedDict()
        self._running: dict[Tenant, list[T]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def waiting(self, tenant: Tenant) -> int:
        """Returns the number of items of ``tenant`` that wait."""
        return len(self._waiting.get(tenant, ()))

    def join(self, tenant: Tenant, item: T) -> None:
        """Queues ``item`` behind the tenant's others."""
        self._waiting.setdefault(tenant, deque()).append(item)

    def next(self) -> T | None:
        """Returns an item that starts running now; None if all slots are taken or no item may start."""
        if not self._waiting or sum(map(len, self._running.values())) >= self._slots:
            return None
        tenant = min(self._waiting, key=self._under_way)  # of several the one that is first in the ring
        if self._under_way(tenant) >= self._each:
            return None
        queue = self._waiting.pop(tenant)
        item = queue.popleft()
        self._running.setdefault(tenant, []).append(item)
        if queue:
            self._waiting[tenant] = queue  # at the ring's end
        return item

    def leave(self, tenant: Tenant, item: T) -> None:
        """Removes ``item``, waiting or running; does nothing if it has left before."""
        if item in (running := self._running.get(tenant, [])):
            running.remove(item)
            if not running:
                del self._running[tenant]
        elif item in (queue := self._waiting.get(tenant, deque())):
            queue.remove(item)
            if not queue:
                del self._waiting[tenant]

    def _under_way(self, tenant: Tenant) -> int:
        return len(self._running.get(tenant, ()))
