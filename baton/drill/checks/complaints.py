"""Turns errors that the product logs in a simulated run into violations. Knows nothing of what else must hold."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from baton.drill.checks.judge import Judge
from baton.drill.scenario import Fault, FaultKind

# Errors that the product rightly logs under a fault: a Redis that comes back with what it knew before, or whose
# answers broke off, may name a dead life's lease on a slot. The successor began while Redis was away, and can't
# tell it from another node's.
# What fails for want of memory is nobody's mistake, and is named.
JUSTIFIED: Mapping[FaultKind, str] = {
    "redis_forgets": "is served from another node now",
    "torn": "is served from another node now",
    "no_memory": "MemoryError",
}


class Complaints(logging.Handler):
    """A log handler that turns errors logged by the product into violations, unless one of ``faults`` justifies
    them.
    """

    def __init__(self, judge: Judge, faults: Iterable[Fault] = ()) -> None:
        super().__init__(logging.ERROR)
        self._judge = judge
        self._justified = [JUSTIFIED[fault.kind] for fault in faults if fault.kind in JUSTIFIED]

    def emit(self, record: logging.LogRecord) -> None:
        """Reports ``record`` as a violation."""
        error = f" {record.exc_info[1]!r}" if record.exc_info else ""
        said = f"logged: {record.getMessage()}{error}"
        if not any(part in said for part in self._justified):
            self._judge.violated(said)
