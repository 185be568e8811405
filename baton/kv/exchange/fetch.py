"""Fetches cached KV blocks from another worker, by its Fetch RPC. Torch-free.

Knows nothing of pages or of what the blocks are for. Hash and checksum are checked by kv/exchange/filling.py.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import TypeAlias

import grpc
import grpc.aio

from baton.kv.exchange.source import FetchedPage
from baton.kv.transport.grpc import CHANNEL_OPTIONS
from baton.protos import convert
from baton.protos.errors import WorkerLost
from baton.protos.nouns import KvLayout
from baton.protos.rpc import heed_cancel
from baton.protos.v1 import worker_pb2 as w
from baton.protos.v1 import worker_pb2_grpc as stubs
from baton.tls.rpc import PLAIN, Dialer

FetchCall: TypeAlias = "grpc.aio.UnaryStreamCall[w.FetchRequest, w.FetchedBlock]"

KEPT_CHANNELS = 64  # channels kept, the oldest is dropped first


class BlockFetcher:
    """Fetches KV blocks of ``layout`` from other workers, over one gRPC channel to each, kept open."""

    def __init__(self, model_id: str, layout: KvLayout, dialer: Dialer = PLAIN) -> None:
        self._dialer, self._generation = dialer, dialer.generation
        self._model_id, self._layout = model_id, convert.layout_to_pb(layout)
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def blocks(self, address: str, hashes: tuple[bytes, ...]) -> AsyncGenerator[FetchedPage, None]:
        """Yields blocks for ``hashes``, in order, up to the first that the worker at ``address`` doesn't have.
        Raises WorkerLost if the call fails.
        """
        request = w.FetchRequest(model_id=self._model_id, hashes=hashes, layout=self._layout)
        call = stubs.WorkerStub(self._channel(address)).Fetch(request)
        try:
            while (block := await self._read(call, address)) is not None:
                yield FetchedPage(block.hash, block.checksum, block.data)
        finally:
            call.cancel()

    async def close(self) -> None:
        """Closes every gRPC channel."""
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()

    async def _read(self, call: FetchCall, address: str) -> w.FetchedBlock | None:
        try:
            block = await call.read()
        except grpc.aio.AioRpcError as error:
            heed_cancel()
            raise WorkerLost(f"Fetch from {address}: {error.code().name}: {error.details()}") from None
        heed_cancel()
        return None if block is grpc.aio.EOF else block

    def _channel(self, address: str) -> grpc.aio.Channel:
        if self._generation != self._dialer.generation:
            self._generation = self._dialer.generation
            self._channels.clear()  # of the old certificate; calls in flight keep theirs
        if address not in self._channels and len(self._channels) >= KEPT_CHANNELS:
            del self._channels[next(iter(self._channels))]  # its calls in flight keep it alive until they end
        if address not in self._channels:
            self._channels[address] = self._dialer.channel(address, options=CHANNEL_OPTIONS)
        return self._channels[address]
