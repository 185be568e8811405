"""A worker of another process that takes KV by nccl: prints its address, acknowledges every frame with blocks.

python -m tests.kv.transport.far_receiver
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from baton.kv.transport import nccl
from baton.kv.wire import frames
from baton.kv.wire.base import ReplyStream
from baton.kv.wire.frames import Frame
from baton.protos.errors import BatonError


class Sink:
    """Says back what landed: the checksums of the bytes that lie here."""

    def __init__(self, line: ReplyStream) -> None:
        self._line = line

    def take(self, frame: Frame) -> None:
        """Does nothing with the frame."""

    def place(self, frame: Frame) -> Sequence[memoryview]:
        return [memoryview(bytearray(frame.unit)) for _ in frame.blocks]

    def landed(self, frame: Frame, checksums: Sequence[int], resident: bool = False) -> None:
        frames.check_blocks(frame, checksums)
        self._line.reply(frames.ack(frame, [block.index for block in frame.blocks]))

    def over(self, error: BatonError | None) -> None:
        self._line.end()


async def serve() -> None:
    """Receives until stdin ends."""
    server, address = nccl.listen("127.0.0.1", Sink)
    print(address, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    server.close()


if __name__ == "__main__":
    asyncio.run(serve())
