"""A file that is young as long as a worker's gRPC health says SERVING: what a probe without a certificate can ask.

Knows nothing of what makes a worker healthy. Under mTLS a kubelet can't call the health service; a command in the
pod can look at ``<slot>.alive``. A loop that stands still lets it grow old, as an engine that is stuck does.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Protocol

from grpc_health.v1 import health_pb2

BEAT_S = 1.0  # seconds between two touches: a probe asks less often
log = logging.getLogger("baton.worker")
SERVING = health_pb2.HealthCheckResponse.SERVING


class Health(Protocol):
    """Names what is needed here of the servicer of grpc.health.v1."""

    async def Check(self, request: health_pb2.HealthCheckRequest, context: None) -> health_pb2.HealthCheckResponse:
        """Returns the status of one service; the empty name is the whole worker."""


def alive_file(slot_dir: str, slot: str) -> Path:
    """Returns where the alive file of ``slot`` lies."""
    return Path(slot_dir) / f"{slot}.alive"


async def beat(health: Health, file: Path, every_s: float = BEAT_S) -> None:
    """Touches ``file`` while ``health`` is SERVING, until it is cancelled. A disk that hangs holds up nobody."""
    complained = False
    while True:
        answer = await health.Check(health_pb2.HealthCheckRequest(), None)
        if answer.status == SERVING:
            try:
                await asyncio.to_thread(file.touch)
            except OSError as error:
                if not complained:
                    log.warning("probes will find this worker dead: %s", error)
                complained = True
        await asyncio.sleep(every_s)
