"""One end of a channel of the nccl transport: its staging memory, and what the mover says of it. Torch-free.

Knows nothing of streams; of frames only how many of their blocks fit one message.
"""

from __future__ import annotations

import asyncio
import struct

import msgspec

from baton.kv.memory import PageMemory
from baton.kv.transport.frames import Frame
from baton.kv.transport.moving import Broken, Done, Join, Joined, Move, MoverClient

READY = b"+"  # the receiver's first byte: the stream is taken
STREAM_ID = struct.Struct("<8sI4s")  # the hello's: channel, messages over it so far, random


class Channel:
    """One end of a channel: staging memory, and what the mover said. ``count`` messages have gone over it."""

    def __init__(self, mover: MoverClient, join: Join, half_bytes: int) -> None:
        self.staging = PageMemory.create(2, half_bytes)
        self.name, self.half_bytes = join.channel, half_bytes
        self.count = self.done = 0
        self.joined, self.why = False, ""
        self.changed = asyncio.Event()
        self._mover = mover
        mover.join(msgspec.structs.replace(join, staging_bytes=2 * half_bytes), self.staging, self.hear)

    def hear(self, message: Joined | Done | Broken) -> None:
        """The mover says."""
        if isinstance(message, Joined):
            self.joined = True
        elif isinstance(message, Done):
            self.done += 1
        else:
            self.why = message.why or "it broke"
        self.changed.set()

    def half(self, number: int) -> memoryview:
        """Where message ``number`` lies."""
        return self.staging.page(number % 2)

    def move(self, size: int) -> None:
        """Send or receive the next message."""
        self._mover.move(Move(self.name, self.count, self.count % 2 * self.half_bytes, size))
        self.count += 1

    def leave(self) -> None:
        """Close it; the mover unmaps its staging when it has let go."""
        self._mover.leave(self.name)
        self.why = self.why or "it was closed"
        self.staging.close()


def parts(frame: Frame, half_bytes: int) -> list[range]:
    """Which blocks of a frame go in which message: as many as half the staging memory holds."""
    most, count = half_bytes // frame.unit, len(frame.blocks)
    return [range(at, min(at + most, count)) for at in range(0, count, most)]
