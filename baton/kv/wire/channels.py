"""Implements one end of a channel of the nccl transport: its staging memory and its progress. Torch-free.

Knows nothing of streams; of frames only how many of their blocks fit into a message. If our engine shares its pages
on a GPU, staging memory is on that GPU, and kernels fill and empty it; otherwise it is on the host.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence
from functools import partial

import msgspec

from baton.kv.memory import copying
from baton.kv.memory.device_pages import DevicePages
from baton.kv.memory.host_pages import PageMemory
from baton.kv.wire.frames import Frame
from baton.kv.wire.moving import ChannelBroken, ChannelJoined, JoinChannel, MoveBytes, MoveDone, MoverClient
from baton.protos.errors import BatonError
from baton.protos.measurements import SharedPages

# Bytes of half the staging memory (a page, if that is larger): one message is sent while the next is copied.
HALF_BYTES = 8 << 20
READY = b"+"  # the receiver's first byte: it has accepted the stream
STREAM_ID = struct.Struct("<8sI4s")  # the hello's: channel, messages over it so far, random


class StagingChannel:
    """One end of a channel, a torch.distributed group of two: its staging memory, two halves of ``half_bytes``, and
    its messages' count.

    ``count`` messages were given to the mover (the process that calls torch.distributed) so far, ``done`` of them
    are complete. ``why`` says why the channel is closed; it is empty while it works.
    """

    def __init__(
        self, mover: MoverClient, join: JoinChannel, half_bytes: int, pages: DevicePages | None = None
    ) -> None:
        self.staging = PageMemory.create(2, half_bytes)
        self.name, self.half_bytes, self.pages = join.channel, half_bytes, pages
        self.count = self.done = 0
        self.joined, self.why = False, ""
        self.changed = asyncio.Event()
        self._mover, self._at = mover, 0
        join = msgspec.structs.replace(join, staging_bytes=2 * half_bytes)
        if pages is not None:
            self._at = pages.cuda.allocate(2 * half_bytes)
        try:
            if pages is not None:
                shared = SharedPages(pages.card, pages.cuda.share(self._at), 2 * half_bytes)
                join = msgspec.structs.replace(join, device=shared)
            mover.join(join, self.staging, self.hear)
        except BatonError:
            self.leave()
            raise

    def hear(self, message: ChannelJoined | MoveDone | ChannelBroken) -> None:
        """Handles a report of the mover, the process that calls torch.distributed, and sets the event
        ``changed``.
        """
        if isinstance(message, ChannelJoined):
            self.joined = True
        elif isinstance(message, MoveDone):
            self.done += 1
        else:
            self.why = message.why or "it broke"
        self.changed.set()

    def half(self, number: int) -> memoryview:
        """Returns the half of the host's staging memory that message ``number`` uses."""
        return self.staging.page(number % 2)

    def on_card(self, number: int) -> int:
        """Returns the GPU address of the half that message ``number`` uses."""
        return self._at + number % 2 * self.half_bytes

    def put(self, payload: Sequence[memoryview], unit: int) -> None:
        """Copies the blocks of the next message, ``unit`` bytes each, from host memory to staging."""
        if self.pages is None:
            half = self.half(self.count)
            copying.copy([half[i * unit : (i + 1) * unit] for i in range(len(payload))], payload)
            return
        for number, view in enumerate(payload):
            self.pages.cuda.upload(self.on_card(self.count) + number * unit, view)
        self.pages.cuda.wait()

    def take(self, number: int, places: Sequence[memoryview], unit: int) -> list[int]:
        """Copies the blocks of message ``number``, ``unit`` bytes each, to ``places`` on the host; returns the
        checksums of the copies.
        """
        if self.pages is None:
            begin = copying.address(self.half(number))
            return copying.copy_from(places, [begin + i * unit for i in range(len(places))])
        for index, place in enumerate(places):
            self.pages.cuda.download(place, self.on_card(number) + index * unit)
        return copying.checksums(places)

    def move(self, size: int) -> None:
        """Makes the mover process send or receive the next message, ``size`` bytes, by torch.distributed."""
        self._mover.move(MoveBytes(self.name, self.count, self.count % 2 * self.half_bytes, size))
        self.count += 1

    def leave(self) -> None:
        """Closes this end of the channel. Staging memory is freed once the mover no longer uses it."""
        self.why = self.why or "it was closed"
        self.staging.close()
        free = None
        if self.pages is not None and self._at:
            free, self._at = partial(self.pages.cuda.free, self._at), 0
        self._mover.leave(self.name, free)


def parts(frame: Frame, half_bytes: int) -> list[range]:
    """Returns, for each message, the range of blocks of ``frame`` that it carries: as many as fit into
    ``half_bytes``.
    """
    most, count = half_bytes // frame.unit, len(frame.blocks)
    return [range(at, min(at + most, count)) for at in range(0, count, most)]
