"""The leases of all handoffs to a decode engine, by request: who may still write pages, and for how long.

Knows nothing of sequences or of the batch. Torch-free. A lease stays in the table after its request has ended,
until nobody can write its pages any more.
"""

from __future__ import annotations

from collections.abc import Callable, Container

from baton.decode_worker.engine.leases import HandoffLease
from baton.engine.abilities import Mirror
from baton.kv.pages.pool import PageLease
from baton.protos import channel as ch
from baton.protos.errors import LeaseUnknown


class HandoffTable:
    """The leases of handoffs by the request's channel key. ``requests`` contains the keys of requests that have not
    ended.

    ``clock`` gives monotonic seconds; ``mirror`` is the device's copy of the pages, None if there is none.
    """

    def __init__(self, requests: Container[int], clock: Callable[[], float], mirror: Mirror | None) -> None:
        self._requests, self._clock, self._mirror = requests, clock, mirror
        self._leases: dict[int, HandoffLease] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def begin(
        self, key: int, lease_id: bytes, pages: PageLease, ttl_s: float, state: PageLease | None, slots: int = 0
    ) -> None:
        """Opens a lease: the pages of request ``key`` and of its recurrent ``state`` may be written.

        It ends after ``ttl_s`` seconds without progress. The first ``slots`` blocks are those that the prefill
        worker selects.
        """
        self._leases[key] = HandoffLease(lease_id, pages, ttl_s, self._clock(), state, slots)

    def get(self, key: int) -> HandoffLease | None:
        """Returns the lease of request ``key``; None if it has none."""
        return self._leases.get(key)

    # ---- what the I/O process says ----

    def rearm(self, message: ch.Rearm) -> ch.Rearmed:
        """Begins a second prefill with the epoch in ``message``. Raises LeaseUnknown and HandoffRefused."""
        lease = self._leases.get(message.key)
        if lease is None or message.key not in self._requests:
            raise LeaseUnknown("the lease has ended; admit the request again", "lease")
        lease.rearm(message.lease, message.epoch, self._clock())
        return ch.Rearmed(message.key, lease.epoch, lease.received)

    def opened(self, message: ch.ReceiveOpened) -> None:
        """Registers that a stream may write to the lease's pages from now on."""
        lease = self._leases.get(message.key)
        if lease is not None:
            lease.opened(message.epoch, self._clock())
            if self._mirror is not None:
                self._mirror.opened([lease.table[block] for block in lease.outstanding])

    def closed(self, message: ch.ReceiveClosed) -> None:
        """Registers that a stream writes no more."""
        lease = self._leases.get(message.key)
        if lease is not None:
            lease.closed(message.epoch, self._clock())
            self.forget_settled(message.key)

    def arrived(self, message: ch.BlocksReceived) -> None:
        """Registers blocks that were verified and written."""
        lease = self._leases.get(message.key)
        if lease is not None:
            lease.arrived(message.blocks, self._clock())
            if message.resident and self._mirror is not None:
                self._mirror.landed(message.key, lease.table, message.resident)

    def shut(self, key: int) -> None:
        """Accepts no further streams for the request's lease; its pages are freed once the open streams are
        closed.
        """
        if key in self._leases:
            self._leases[key].shut()
            self.forget_settled(key)

    # ---- their ends ----

    def withdraw(self, key: int) -> None:
        """Removes the lease of an admission that failed, which no other process was told of."""
        if (lease := self._leases.pop(key, None)) is not None:
            lease.shut()

    def forget_settled(self, key: int) -> None:
        """Removes the lease of a request that has ended, once nobody can write its pages."""
        lease = self._leases.get(key)
        if lease is not None and lease.settled and key not in self._requests:
            del self._leases[key]

    def overdue(self) -> list[int]:
        """Returns the keys of requests whose leases have run out without progress."""
        now = self._clock()
        return [key for key, deadline in self._deadlines() if deadline <= now]

    def patience(self, most: float) -> float:
        """Returns the seconds until the next lease runs out, at most ``most``."""
        now = self._clock()
        return min([most, *(deadline - now for _, deadline in self._deadlines())])

    def _deadlines(self) -> list[tuple[int, float]]:
        found = [(key, lease.deadline) for key, lease in self._leases.items() if key in self._requests]
        return [(key, deadline) for key, deadline in found if deadline is not None]
