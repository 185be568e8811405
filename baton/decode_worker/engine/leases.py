"""One handoff's lease on the receiving side: its epoch, what has arrived, and who may still write its pages.

Knows nothing of streams, channels or sequences. Torch-free; owned by the engine process. The I/O process may open a
receive at any moment until it says that it won't: that is the *gate*. Commit and Cancel close the gate (the I/O
process refuses further frames before it sends either); each receive in flight is closed by ReceiveClosed. Pages of
an ended lease are reused only when the gate and all receives are closed.
"""

from __future__ import annotations

from collections.abc import Iterable

from baton.kv.pages.pool import PageLease
from baton.protos.errors import AlreadyCommitted, LeaseUnknown, StaleEpoch


class HandoffLease:
    """The lease of a request whose prompt another worker computes. Times are monotonic seconds.

    ``state`` are the pages for recurrent state, which is sent after the prompt's blocks. The first ``slots`` blocks
    are selected by the prefill worker, so that all of them must come from the same one.
    """

    def __init__(
        self,
        lease_id: bytes,
        pages: PageLease,
        ttl_s: float,
        now: float,
        state: PageLease | None = None,
        slots: int = 0,
    ):
        self.lease_id = lease_id
        self._slots = slots
        self.epoch = 1
        self.committed = False
        self._deadline = now + ttl_s
        self._ttl_s = ttl_s
        self._leases = [pages] if state is None else [pages, state]
        self._missing = {*pages.lacking, *range(len(pages.pages), len(self.table))}
        self._arrived: set[int] = set()
        self._writers: set[int] = set()
        self._gate = True
        if state is not None:
            state.hold()
        pages.hold()

    @property
    def complete(self) -> bool:
        """Returns whether every block has arrived."""
        return not self._missing

    @property
    def outstanding(self) -> list[int]:
        """Returns the indices of the blocks that have not arrived, in order."""
        return sorted(self._missing)

    @property
    def table(self) -> list[int]:
        """Returns the pages by block index, those of a state last; without a state it is the lease's own list."""
        pages, *state = self._leases
        return [*pages.landing, *state[0].pages] if state else pages.landing

    @property
    def settled(self) -> bool:
        """Returns whether nobody can write the pages any more."""
        return not self._gate and not self._writers

    @property
    def received(self) -> tuple[int, ...]:
        """Returns the indices of the blocks that arrived, in any epoch, in order."""
        return tuple(sorted(self._arrived))

    @property
    def deadline(self) -> float | None:
        """Returns the time at which the lease ends without progress; None once committed, and while a stream is
        open.
        """
        return None if self.committed or self._writers else self._deadline

    def opened(self, epoch: int, now: float) -> None:
        """Registers that a stream of ``epoch`` may write from now on."""
        if not self.settled:
            self._writers.add(epoch)
            self._progress(now)

    def closed(self, epoch: int, now: float) -> None:
        """Registers that the stream of ``epoch`` writes no more."""
        if epoch in self._writers:
            self._writers.discard(epoch)
            self._progress(now)
            self._settle()

    def arrived(self, blocks: Iterable[int], now: float) -> None:
        """Registers blocks that were verified and written, also late ones of an earlier epoch."""
        fresh = self._missing.intersection(blocks)
        self._missing -= fresh
        self._arrived |= fresh
        if fresh:
            self._progress(now)

    def rearm(self, lease_id: bytes, epoch: int, now: float) -> None:
        """Begins a second prefill with ``epoch``; blocks that arrived are kept, except those that the first one
        selected.

        Raises HandoffRefused or a subclass of it: LeaseUnknown, AlreadyCommitted, StaleEpoch.
        """
        if lease_id != self.lease_id:
            raise LeaseUnknown("that lease is not this request's; admit it again", "lease")
        if self.committed:
            raise AlreadyCommitted("the handoff is complete: nothing to rearm", "epoch")
        if epoch != self.epoch + 1:
            raise StaleEpoch(f"epoch {epoch} can't follow {self.epoch}; send {self.epoch + 1}", "epoch")
        self.epoch = epoch
        chosen = {block for block in self._arrived if block < self._slots}
        self._arrived -= chosen
        self._missing |= chosen
        self._progress(now)

    def commit(self) -> None:
        """Passes the pages to the sequence, because the prompt is complete."""
        self.committed = True
        self.shut()

    def shut(self) -> None:
        """Closes the gate: the I/O process opens no more receives for this lease."""
        if self._gate:
            self._gate = False
            self._settle()

    def _settle(self) -> None:
        if self.settled:
            for lease in self._leases:
                lease.release()

    def _progress(self, now: float) -> None:
        self._deadline = now + self._ttl_s
