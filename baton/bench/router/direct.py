"""Measures a decode worker's time to first token without a router, by one gRPC session with one request at a time.

Knows nothing of HTTP.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import grpc.aio

from baton.protos.convert import sampling_to_pb
from baton.protos.nouns import PROTOCOL, Sampling
from baton.protos.v1 import worker_pb2 as w
from baton.protos.v1 import worker_pb2_grpc as stubs


class DirectWorker:
    """A session with a decode worker, for measuring its time to first token."""

    def __init__(self, call: grpc.aio.StreamStreamCall) -> None:
        self._call = call
        self._serial = 0

    async def ttft(self, prompt: Sequence[int], max_tokens: int) -> float:
        """Returns the seconds from Admit to the first token of an answer with ``max_tokens`` tokens, which it reads
        to its end.
        """
        self._serial += 1
        sampling = sampling_to_pb(Sampling(temperature=0.0, max_tokens=max_tokens, ignore_eos=True))
        admit = w.Admit(
            request_id=f"direct-{self._serial}", token_ids=prompt, prompt_tokens=len(prompt), sampling=sampling,
            local=True,
        )  # fmt: skip
        sent, first = time.perf_counter(), 0.0
        await self._call.write(w.SessionUp(admit=admit))
        while True:
            down = await self._call.read()
            for output in down.tokens.outputs:
                first = first or time.perf_counter() - sent
                if output.run.finish_reason:
                    return first


@asynccontextmanager
async def direct(address: str) -> AsyncIterator[DirectWorker]:
    """Opens a session with the worker at ``address``; yields it and closes it at the end."""
    async with grpc.aio.insecure_channel(address) as channel:
        call = stubs.DecodeWorkerStub(channel).Session()
        await call.write(w.SessionUp(hello=w.Hello(router_id="bench", protocol=PROTOCOL)))
        await call.read()
        yield DirectWorker(call)
        call.cancel()
