"""Measures the speed of a transport: sends blocks to a receiver, which verifies them.

Knows nothing of how a transport is chosen. PROBE frames are processed as blocks are (placed, received, hashed,
acknowledged), except that the receiver drops them.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable
from functools import cache

import msgspec

from baton.kv.memory.device_pages import DevicePages
from baton.kv.memory.host_pages import PageMemory
from baton.kv.wire import frames
from baton.kv.wire.base import HandoffStream, Transport, resident_bytes
from baton.kv.wire.frames import Block, Frame, Kind
from baton.protos.errors import BatonError, WorkerLost

PAGE_BYTES = 1 << 20  # bytes of one probe block
PAGES = 4  # pages that a measured handoff has
SMALL_BYTES = 4096  # bytes of the block whose round trip is taken as the fixed cost
ROUNDS = 3  # times that each size is measured; the quickest counts
SLOW_S = 0.1  # seconds; if one probe block takes longer, several at once aren't sent
BUSY_S = 0.4  # seconds in which a block that was slow is sent again, because the machines may be busy, not the link
TIMEOUT_S = 5.0  # seconds for a preflight
# Seconds, if TIMEOUT_S isn't enough: nccl's movers load torch first, nixl's agents connect with the first read.
PATIENCE_S = {"nccl": 60.0, "nixl": 30.0}


class LinkSpeed(msgspec.Struct, frozen=True):
    """The measured speed of one transport to one receiver."""

    fixed_s: float  # seconds from sending a small frame to its acknowledgement
    bytes_per_s: float

    def seconds(self, size: int) -> float:
        """Returns the expected time for ``size`` bytes, in seconds."""
        return self.fixed_s + size / self.bytes_per_s


def probe_memory() -> PageMemory:
    """Returns memory of pages to send, because a preflight must not read pages that an engine may be writing. The
    first holds random bytes; ``measure`` fills the others once it needs them.
    """
    memory = PageMemory.create(PAGES, PAGE_BYTES)
    memory.page(0)[:] = _noise()
    return memory


@cache
def _noise() -> bytes:
    """Returns a page of random bytes, which no link compresses; cached because making them takes long."""
    return os.urandom(PAGE_BYTES)


async def measure_each(
    names: Iterable[str],
    attempt: Callable[[str, PageMemory], Awaitable[LinkSpeed]],
    device: DevicePages | None,
) -> tuple[dict[str, LinkSpeed], dict[str, BatonError]]:
    """Returns the speed of each transport of ``names`` that works, and the errors of the others.

    ``attempt(name, memory)`` measures one, with probe pages ``memory``; ``device`` are pages on a card, if any.
    """
    measured: dict[str, LinkSpeed] = {}
    failures: dict[str, BatonError] = {}
    memory = probe_memory()
    memory.device = device
    try:
        for name in names:
            try:
                measured[name] = await attempt(name, memory)
            except BatonError as error:  # also that it can't be encrypted
                failures[name] = error
    finally:
        memory.close()
    return measured, failures


async def measure(
    transport: Transport,
    address: str,
    memory: PageMemory,
    clock: Callable[[], float],
    timeout_s: float = TIMEOUT_S,
) -> LinkSpeed:
    """Returns the best speed of a few rounds over ``transport`` to ``address``. Raises WorkerLost, also after
    ``timeout_s`` seconds, or the receiver's refusal.
    """
    try:
        async with asyncio.timeout(timeout_s):
            stream = await transport.connect(address)
            try:
                fixed = await _fixed(stream, memory, clock)
                pages, whole, begun = 1, await _round(stream, memory, 1, PAGE_BYTES, clock), clock()
                while whole >= SLOW_S and clock() - begun < BUSY_S - whole:
                    whole = min(whole, await _round(stream, memory, 1, PAGE_BYTES, clock))
                if whole < SLOW_S:
                    pages = PAGES
                    for page in range(1, PAGES):
                        memory.page(page)[:] = _noise()
                    whole = min([await _round(stream, memory, PAGES, PAGE_BYTES, clock) for _ in range(ROUNDS)])
                if fixed > whole / 2:  # a machine that was busy then, or a long way
                    fixed = min(fixed, await _fixed(stream, memory, clock))
            finally:
                await stream.close()
    except TimeoutError:
        raise WorkerLost(f"a preflight to {address} took longer than {timeout_s:g} s", "decode_address") from None
    return LinkSpeed(fixed, pages * PAGE_BYTES / max(whole - fixed, 1e-6))


async def _fixed(stream: HandoffStream, memory: PageMemory, clock: Callable[[], float]) -> float:
    """Returns the seconds of the quickest of a few rounds of a small block."""
    return min([await _round(stream, memory, 1, SMALL_BYTES, clock) for _ in range(ROUNDS)])


async def _round(
    stream: HandoffStream, memory: PageMemory, count: int, size: int, clock: Callable[[], float]
) -> float:
    """Returns the seconds from the first byte sent to the last acknowledgement."""
    flags = frames.RESIDENT if resident_bytes(stream) else 0  # from card to card, where blocks go that way
    begun = clock()
    for page in range(count):
        data, table = memory.page(page)[:size], (Block(page, frames.NO_HASH),)
        frame = Frame(Kind.PROBE, flags=flags, unit=size, blocks=table, offsets=(page * PAGE_BYTES,))
        await stream.send(frame, [data])
    for _ in range(count):
        await _answer(stream)
    return clock() - begun


async def _answer(stream: HandoffStream) -> None:
    raw = await stream.receive()
    frame = None if raw is None else frames.decode(raw)
    if frame is None or (frame.kind, frame.subject) != (Kind.ACK, Kind.PROBE):
        said = "nothing" if frame is None else frame.kind.name
        raise WorkerLost(f"the receiver answered a probe with {said}", "decode_address")
