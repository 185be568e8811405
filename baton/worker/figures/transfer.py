"""Figures of a worker's KV handoffs: bytes, per peer, and refused frames; for /metrics and its load.

Knows nothing of engines or of how a handoff works.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection

from baton.cluster.metering.telemetry import WorkerMetrics
from baton.cost.fit import TransferFit
from baton.prefill_worker.io.handoff import HandoffReport
from baton.protos.errors import (
    AlreadyCommitted,
    BatonError,
    Cancelled,
    DeadlineExceeded,
    Draining,
    HandoffRefused,
    LeaseUnknown,
    StaleEpoch,
)
from baton.protos.measurements import KvLink, KvPair
from baton.worker.figures.rates import Rates

UNKNOWN = "unknown"  # the peer of a handoff that reached nobody
IN_A_ROW = 3  # failed handoffs to one worker, without a complete one between, that are no accident
WHY_CHARS = 200  # of an error that is kept for operators
# Ends of handoffs that say nothing of the way between two workers: somebody left, or the lease was taken back.
NO_FAULT = (AlreadyCommitted, Cancelled, DeadlineExceeded, Draining, LeaseUnknown, StaleEpoch)


class TransferFigures:
    """Counts the KV handoffs of one role; ``fit`` learns transfer times, and outlives the role. ``clock`` is in
    monotonic seconds.
    """

    def __init__(self, metrics: WorkerMetrics, fit: TransferFit, clock: Callable[[], float]) -> None:
        self._metrics, self._fit, self._clock = metrics, fit, clock
        self._rates = Rates(clock)
        self._rates.now({})
        self._pairs: dict[str, KvPair] = {}
        self._links: dict[str, KvLink] = {}
        self._gone: set[str] = set()  # peers that aren't decode workers of the cluster at present
        self._refused: Counter[str] = Counter()
        self._received: Counter[str] = Counter()
        self._in_a_row: Counter[str] = Counter()  # failed handoffs since the last complete one, by peer
        self._failed_at: dict[str, float] = {}  # when the last of those was counted
        self._why: dict[str, str] = {}  # last error by peer, of handoffs and of attempts to reach it
        self._unmet: dict[str, str] = {}  # incarnation by peer, of those that couldn't be reached
        self._met: dict[str, str] = {}  # and of those that could, last

    def completed(self, peer: str, report: HandoffReport) -> None:
        """Counts one complete handoff to decode worker ``peer``."""
        self._metrics.transfer_blocks.inc(report.shipped_blocks)
        self._metrics.transfer_bytes.inc(report.shipped_bytes)
        self._metrics.transfer_seconds.observe(report.exposed_s)
        if report.shipped_bytes:
            self._fit.observe(report.shipped_bytes, report.busy_s)
        peer = peer or UNKNOWN
        self._metrics.transferred(peer, "ok", report.shipped_bytes)
        self._works(peer)
        old = self._pairs.get(peer, KvPair(peer))
        self._pairs[peer] = KvPair(peer, old.transfers + 1, old.failures, old.bytes + report.shipped_bytes)
        self._rates.now({pair.peer: pair.bytes for pair in self._pairs.values()})

    def failed(self, peer: str, error: BatonError, began: float) -> None:
        """Counts one failed handoff to decode worker ``peer``, which began at ``began`` on the clock.

        Handoffs that ran at the same time are one failure in a row: what ended one, such as a lost connection,
        ended all of them.
        """
        peer = peer or UNKNOWN
        self._metrics.transferred(peer, error.label)
        old = self._pairs.get(peer, KvPair(peer))
        self._pairs[peer] = KvPair(peer, old.transfers, old.failures + 1, old.bytes)
        between = isinstance(error, HandoffRefused) or error.param == "decode_address"  # else of the prompt
        if between and not isinstance(error, NO_FAULT):
            self._why[peer] = error.message[:WHY_CHARS]
            if began >= self._failed_at.get(peer, began):
                self._in_a_row[peer] += 1
                self._failed_at[peer] = self._clock()

    def met(self, peer: str, incarnation: str, error: BatonError | None = None) -> None:
        """Notes that ``incarnation`` of decode worker ``peer`` was reached, or the ``error`` that it couldn't be.

        What was known of an earlier incarnation is forgotten.
        """
        if error is not None:
            self._unmet[peer], self._why[peer] = incarnation, error.message[:WHY_CHARS]
            self._pairs.setdefault(peer, KvPair(peer))
        elif peer in self._unmet or self._met.get(peer, incarnation) != incarnation:
            self._works(peer)
        if error is None:
            self._met[peer] = incarnation

    def _works(self, peer: str) -> None:
        self._unmet.pop(peer, None)
        self._why.pop(peer, None)
        self._in_a_row.pop(peer, None)
        self._failed_at.pop(peer, None)

    def _obstacle(self, peer: str) -> str:
        """Returns why nothing can be handed over to ``peer``; "" if something can, or nobody knows."""
        fails = peer in self._unmet or self._in_a_row[peer] >= IN_A_ROW
        return self._why.get(peer, "") if fails else ""

    def link(self, link: KvLink, reason: str) -> None:
        """Records the transport to a decode worker; ``reason`` says why not the best one, or is ""."""
        self._metrics.linked(link.peer, link.transport, link.bytes_per_s, reason)
        self._links[link.peer] = link
        self._gone.discard(link.peer)

    def present(self, peers: Collection[str]) -> None:
        """Notes that ``peers`` are the decode workers of the cluster; others aren't shown meanwhile."""
        gone = {peer for peer in (*self._links, *self._pairs) if peer not in peers}
        for peer in self._links.keys() & (gone ^ self._gone):
            self._metrics.in_use(peer, self._links[peer].transport, peer not in gone)
        self._gone = gone

    def refusals(self, totals: Counter[str]) -> None:
        """Counts refused handoff frames; ``totals`` are those since the start, by error label."""
        for label, count in (totals - self._refused).items():
            for _ in range(count):
                self._metrics.refused(label)
        self._refused = Counter(totals)

    def received(self, totals: Counter[str]) -> None:
        """Counts KV bytes that handoffs brought; ``totals`` are those since the start, by host."""
        for host, size in (totals - self._received).items():
            self._metrics.received(host, size)
        self._received = Counter(totals)

    @property
    def links(self) -> tuple[KvLink, ...]:
        """Returns the measured link to each decode worker that is there."""
        return tuple(link for link in self._links.values() if link.peer not in self._gone)

    @property
    def pairs(self) -> tuple[KvPair, ...]:
        """Returns the counts per decode worker that is there, with bytes per second over the last seconds."""
        rates = self._rates.per_second()
        return tuple(
            KvPair(p.peer, p.transfers, p.failures, p.bytes, rates.get(p.peer, 0.0), self._obstacle(p.peer))
            for p in self._pairs.values()
            if p.peer not in self._gone
        )
