"""Asks decode workers what they say of themselves, and says on which host this process is.

Knows nothing of transports.
"""

from __future__ import annotations

from pathlib import Path

import grpc
import grpc.aio

from baton.protos import convert, version
from baton.protos.errors import WorkerLost
from baton.protos.nouns import WorkerInfo
from baton.protos.rpc import heed_cancel
from baton.protos.v1 import worker_pb2, worker_pb2_grpc
from baton.tls.rpc import PLAIN, Dialer

DESCRIBE_S = 5.0  # seconds that a worker has to describe itself


def this_host() -> str:
    """Returns the kernel's boot id, equal for two processes only on the same host; empty if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


async def ask_worker(address: str, dialer: Dialer = PLAIN) -> WorkerInfo:
    """Returns what the worker at ``address`` answers to Describe. Raises WorkerLost if it doesn't answer, or has an
    incompatible protocol version.
    """
    async with dialer.channel(address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        try:
            answer = await stub.Describe(worker_pb2.DescribeRequest(), timeout=DESCRIBE_S)
        except grpc.aio.AioRpcError as error:
            heed_cancel()
            said = f"{error.code().name}: {error.details()}"
            raise WorkerLost(f"the decode worker at {address} does not answer: {said}", "decode_address") from error
    if answer is None:  # how gRPC tells that a reply couldn't be read
        raise WorkerLost(f"what the decode worker at {address} answered can't be read", "decode_address")
    if not version.runs_with(answer.protocol):
        raise WorkerLost(version.refusal(answer.worker_id, answer.protocol, answer.version), "decode_address")
    return convert.info_from_pb(answer)
