"""Receives all handoffs to a decode worker, in its I/O process: which stream may write to which lease.

Knows nothing of gRPC or sockets, of the page pool or of sequences. The engine says which pages a lease may fill
(``handoff_leases.py``); a stream writes only while its lease, epoch, shard, indices and hashes are all right, and
only before the commit (``handoff_sink.py``). Everything runs on one event loop and nothing waits: a stream that was
closed, or whose lease moved on, writes no more from that moment.

    OPEN -> ReceiveOpened · BLOCK … -> BlocksReceived · COMMIT -> Commit, Committed -> ACK · end -> ReceiveClosed
"""

from __future__ import annotations

from baton.decode_worker.io.handoff_leases import HandoffLeases
from baton.decode_worker.io.handoff_sink import HandoffSink
from baton.kv.wire.base import ReplyStream, Sink


class Intake(HandoffLeases):
    """Receives all handoffs to this worker, each stream by a ``HandoffSink``."""

    def accept(self, line: ReplyStream) -> Sink:
        """Returns the handler of the frames of a transport's new stream; replies are written to ``line``."""
        return HandoffSink(self, line)
