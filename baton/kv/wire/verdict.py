"""The verdict on the transports to one worker: which of those that were measured is taken, and why not another.

Knows nothing of how they are measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from baton.kv.wire.preflight import LinkSpeed
from baton.protos.errors import BatonError, HandoffRefused, WorkerLost
from baton.protos.nouns import WorkerInfo

MUCH_FASTER = 1.5  # factor; below it the order of preference decides, because a preflight is noisy
TYPICAL_BYTES = 16 << 20  # bytes of a handoff by which transports are compared


class TransportVerdict(msgspec.Struct, frozen=True):
    """Holds the result of measuring every transport to the worker of ``info``, of which ``best`` is to be used."""

    info: WorkerInfo
    best: str
    preferred: Sequence[str]
    measured: dict[str, LinkSpeed]
    failures: dict[str, BatonError]

    @property
    def reason(self) -> str:
        """Returns why the preferred transport isn't taken: "not_offered", "failed" or "slower"; "" if it is."""
        first = self.preferred[0]
        if self.best == first:
            return ""
        return "failed" if first in self.failures else "slower" if first in self.measured else "not_offered"


def pick(preferred: Sequence[str], measured: dict[str, LinkSpeed]) -> str:
    """Returns the first name of ``preferred`` that was measured, or a later one that is ``MUCH_FASTER``."""
    working = [name for name in preferred if name in measured]
    best = working[0]
    for name in working[1:]:
        if measured[name].seconds(TYPICAL_BYTES) * MUCH_FASTER < measured[best].seconds(TYPICAL_BYTES):
            best = name
    return best


def no_way(
    info: WorkerInfo, preferred: Sequence[str], offered: Iterable[str], failures: Mapping[str, BatonError]
) -> BatonError:
    """Returns the error that no transport to the worker of ``info`` works: HandoffRefused if it offers none of the
    ``preferred``, else WorkerLost with each one's failure.
    """
    if failures:
        why = "; ".join(f"{name}: {error.message}" for name, error in failures.items())
        return WorkerLost(f"no way to ship KV to {info.worker_id} works ({why})", "decode_address")
    return HandoffRefused(
        f"{info.worker_id} takes KV by {', '.join(sorted(offered))}, not by {', '.join(preferred)}: "
        "set worker.kv_transport alike on both workers, or to auto",
        "worker.kv_transport",
    )
