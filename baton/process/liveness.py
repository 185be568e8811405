"""A file that is touched while a worker's gRPC health is SERVING, for probes that have no certificate.

Knows nothing of what makes a worker healthy. Under mTLS a kubelet can't call the health service; a command in the
pod can look at the age of ``<slot>.alive``. A blocked event loop lets the file grow old, as a stuck engine does.
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
    """Interface of the servicer of grpc.health.v1."""

    async def Check(self, request: health_pb2.HealthCheckRequest, context: None) -> health_pb2.HealthCheckResponse:
        """Returns the status of one service; the empty name is the whole worker."""


def alive_file(slot_dir: str, slot: str) -> Path:
    """Returns the path of the file that is touched while the worker of ``slot`` is healthy."""
    return Path(slot_dir) / f"{slot}.alive"


async def beat(health: Health, file: Path, every_s: float = BEAT_S) -> None:
    """Until cancelled, touches ``file`` every ``every_s`` seconds while ``health`` is SERVING.

    A disk that hangs doesn't block the event loop.
    """
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
