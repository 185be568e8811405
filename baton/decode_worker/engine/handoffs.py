"""The leases of all handoffs to a decode engine, by request: who may still write pages, and for how long.

Knows nothing of sequences or of the batch. Torch-free. A lease stays here after its request has ended, until nobody
can write its pages any more.
"""

from __future__ import annotations

from collections.abc import Callable, Container

from baton.decode_worker.engine.leases import HandoffLease
from baton.engine.plan import Mirror
from baton.kv.pages.pool import PageLease
from baton.protos import channel as ch
from baton.protos.errors import LeaseUnknown


class HandoffTable:
    """Keeps the leases of handoffs by request's key. ``requests`` are those that have not ended.

    ``clock`` gives monotonic seconds; ``mirror`` is the device's copy of the pages, None where there is none.
    """

    def __init__(self, requests: Container[int], clock: Callable[[], float], mirror: Mirror | None) -> None:
        self._requests, self._clock, self._mirror = requests, clock, mirror
        self._leases: dict[int, HandoffLease] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def begin(
        self, key: int, lease_id: bytes, pages: PageLease, ttl_s: float, state: PageLease | None, slots: int = 0
    ) -> None:
        """Lets the pages of request ``key`` be written, and those of its ``state``, within ``ttl_s`` seconds.

        The first ``slots`` take blocks that whoever reads the prompt chooses.
        """
        self._leases[key] = HandoffLease(lease_id, pages, ttl_s, self._clock(), state, slots)

    def get(self, key: int) -> HandoffLease | None:
        """Returns the lease of a request; None where it has none."""
        return self._leases.get(key)

    # ---- what the I/O process says ----

    def rearm(self, message: ch.Rearm) -> ch.Rearmed:
        """Begins a second prefill under the message's epoch. Raises LeaseUnknown and HandoffRefused."""
        lease = self._leases.get(message.key)
        if lease is None or message.key not in self._requests:
            raise LeaseUnknown("the lease has ended; admit the request again", "lease")
        lease.rearm(message.lease, message.epoch, self._clock())
        return ch.Rearmed(message.key, lease.epoch, lease.received)

    def opened(self, message: ch.ReceiveOpened) -> None:
        """Notes that a stream may write from now on."""
        lease = self._leases.get(message.key)
        if lease is not None:
            lease.opened(message.epoch, self._clock())
            if self._mirror is not None:
                self._mirror.opened([lease.table[block] for block in lease.outstanding])

    def closed(self, message: ch.ReceiveClosed) -> None:
        """Notes that a stream writes no more."""
        lease = self._leases.get(message.key)
        if lease is not None:
            lease.closed(message.epoch, self._clock())
            self.forget_settled(message.key)

    def arrived(self, message: ch.BlocksReceived) -> None:
        """Counts blocks that were verified and written."""
        lease = self._leases.get(message.key)
        if lease is not None:
            lease.arrived(message.blocks, self._clock())
            if message.resident and self._mirror is not None:
                self._mirror.landed(message.key, lease.table, message.resident)

    def shut(self, key: int) -> None:
        """Closes the gate of a request's lease: its pages come free once the streams in flight are closed."""
        if key in self._leases:
            self._leases[key].shut()
            self.forget_settled(key)

    # ---- their ends ----

    def withdraw(self, key: int) -> None:
        """Forgets the lease of an admission that failed, of which nobody was told."""
        if (lease := self._leases.pop(key, None)) is not None:
            lease.shut()

    def forget_settled(self, key: int) -> None:
        """Forgets the lease of a request that has ended, once nobody can write its pages."""
        lease = self._leases.get(key)
        if lease is not None and lease.settled and key not in self._requests:
            del self._leases[key]

    def overdue(self) -> list[int]:
        """Returns the requests whose leases ran out without progress."""
        now = self._clock()
        return [key for key, deadline in self._deadlines() if deadline <= now]

    def patience(self, most: float) -> float:
        """Returns the seconds until the next lease runs out, ``most`` at most."""
        now = self._clock()
        return min([most, *(deadline - now for _, deadline in self._deadlines())])

    def _deadlines(self) -> list[tuple[int, float]]:
        found = [(key, lease.deadline) for key, lease in self._leases.items() if key in self._requests]
        return [(key, deadline) for key, deadline in found if deadline is not None]
