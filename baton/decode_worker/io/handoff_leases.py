"""The leases that handoffs to a decode worker may fill at present, in its I/O process.

Knows nothing of frames, sockets or sequences. The engine says which pages a lease may fill (``register``).
Everything runs on one event loop and nothing waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from baton.decode_worker.io.intake_lease import IntakeLease
from baton.kv.layout.extents import Part
from baton.kv.memory.host_pages import PageMemory
from baton.protos.channel import SendToEngine
from baton.protos.errors import BatonError, LeaseUnknown, StaleEpoch
from baton.protos.nouns import KvLayout

LEAD = "lead"  # what metrics call the worker's own host


class HandoffLeases:
    """Holds the leases that handoffs to this worker may fill, its pages and its channel to the engine.

    ``send_to_engine`` must not block. Where ranks of several ``hosts`` take their parts of every page, ``part`` is
    what comes to this one, which ``leads`` unless it is another than the lead's.
    """

    def __init__(
        self,
        memory: PageMemory,
        layout: KvLayout,
        fingerprint: str,
        send_to_engine: SendToEngine,
        part: Part = (),
        hosts: int = 1,
        leads: bool = True,
    ) -> None:
        self.part, self.hosts, self.leads = part, hosts, leads
        self.refusals: Counter[str] = Counter()
        self.received_blocks = 0
        self.received_bytes = 0
        self.memory = memory
        self.layout = layout
        self.fingerprint = fingerprint
        self.tell = send_to_engine
        self._by_key: dict[int, IntakeLease] = {}
        self._by_id: dict[bytes, IntakeLease] = {}
        self._scratch = memoryview(b"")

    # ---- what the engine and the session say -----------------------------------------------------------

    def register(self, lease: IntakeLease) -> None:
        """Opens a lease: streams may write what it allows from now on."""
        self._by_key[lease.key] = self._by_id[lease.lease_id] = lease

    def rearm(self, key: int, epoch: int) -> None:
        """Accepts only streams of ``epoch`` for the lease from now on; received blocks are kept, except selected
        ones.

        Call it before the engine is told.
        """
        lease = self._by_key.get(key)
        if lease is None or epoch <= lease.epoch:
            return
        lease.rearm(epoch)
        for stream in lease.open_streams:
            stream.stop(StaleEpoch(f"epoch {epoch} took over from {stream.epoch}", "epoch"))

    def stop(self, key: int, epoch: int, error: BatonError) -> None:
        """Ends the open streams of ``epoch`` for the lease of request ``key`` with ``error``."""
        lease = self._by_key.get(key)
        for stream in () if lease is None else lease.open_streams:
            if stream.epoch == epoch:
                stream.stop(error)

    def known(self, key: int) -> IntakeLease | None:
        """Returns the open lease of request ``key``; None if there is none."""
        return self._by_key.get(key)

    def when_known(self, key: int, then: Callable[[], None]) -> None:
        """Calls ``then`` once every host takes streams of the lease of request ``key`` and its epoch."""
        then()

    def close(self, key: int, error: BatonError | None = None) -> None:
        """Closes the lease of request ``key``: nothing is written for it any more. Open streams end with
        ``error``.
        """
        lease = self._by_key.pop(key, None)
        if lease is None:
            return
        del self._by_id[lease.lease_id]
        for stream in lease.open_streams:  # none once committed: those have had their last ACK
            stream.stop(error or LeaseUnknown("the lease was closed; the request has ended here", "lease"))

    def on_committed(self, key: int, epoch: int) -> None:
        """Sends the last acknowledgement of a handoff that the engine has taken over."""
        lease = self._by_key.get(key)
        for stream in () if lease is None else lease.open_streams:
            if stream.epoch == epoch:
                stream.committed()

    @property
    def received(self) -> Counter[str]:
        """Returns the bytes of verified blocks by the host of the worker's ranks that took them."""
        return Counter({LEAD: self.received_bytes})

    @property
    def open_streams(self) -> int:
        """Returns the number of streams that may write."""
        return sum(len(lease.open_streams) for lease in self._by_key.values())

    # ---- what a stream asks -----------------------------------------------------------------------------

    def lease(self, lease_id: bytes) -> IntakeLease | None:
        """Returns the open lease with that id; None if there is none."""
        return self._by_id.get(lease_id)

    def count(self, blocks: int, size: int) -> None:
        """Adds ``blocks`` verified blocks of ``size`` bytes in total to the counters."""
        self.received_blocks += blocks
        self.received_bytes += size

    def scratch(self, size: int) -> memoryview:
        """Returns memory of ``size`` bytes whose content nobody reads; all callers share it."""
        if len(self._scratch) < size:
            self._scratch = memoryview(bytearray(size))
        return self._scratch[:size]
