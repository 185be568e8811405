"""A link that is slow and loses packets, in user space: for kernels without ``tc netem``.

Two TUN devices and a process of ours between them: it reads each IP packet that one host sends, drops it with
probability ``loss``, and hands it to the other host ``delay_s`` later (each way, so a round trip takes twice that).
The hosts' own TCP retransmits and backs off as on a real path. What it is not: as quick as a kernel's link (a few
hundred MB/s at most), nor does it reorder. Knows nothing of namespaces.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import select
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
MTU_BYTES = 65536
QUEUED_PACKETS = 20_000  # per direction; more are dropped, as a router does


class Roughness(NamedTuple):
    """Describes one direction: ``loss`` is a probability, ``seed`` decides which packets are lost."""

    delay_s: float = 0.0
    loss: float = 0.0
    seed: int = 1


class OneWay:
    """Packets of one direction: which go, and when. Time is passed in."""

    def __init__(self, rough: Roughness, seed: int) -> None:
        self.dropped = self.carried = 0
        self._rough, self._random = rough, random.Random(seed)
        self._waiting: deque[tuple[float, bytes]] = deque()

    def enter(self, packet: bytes, now: float) -> None:
        """A host sent it."""
        if self._random.random() < self._rough.loss or len(self._waiting) >= QUEUED_PACKETS:
            self.dropped += 1
        else:
            self._waiting.append((now + self._rough.delay_s, packet))

    def leave(self, now: float) -> list[bytes]:
        """Returns the packets that arrive by ``now``, in order."""
        due = []
        while self._waiting and self._waiting[0][0] <= now:
            due.append(self._waiting.popleft()[1])
        self.carried += len(due)
        return due

    def next_at(self) -> float | None:
        """Returns when the next packet arrives; None if none is under way."""
        return self._waiting[0][0] if self._waiting else None


def open_tun(name: str) -> int:
    """The descriptor of a new TUN device; it follows the device to another namespace. Raises OSError."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    try:
        fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    except OSError:
        os.close(fd)
        raise
    return fd


@contextlib.contextmanager
def running(rough: Roughness, names: tuple[str, str]) -> Iterator[tuple[OneWay, OneWay]]:
    """Devices ``names`` and the relay between them, while the block runs; its figures. Raises OSError."""
    first = open_tun(names[0])
    try:
        second = open_tun(names[1])
    except OSError:
        os.close(first)
        raise
    ways = (OneWay(rough, rough.seed), OneWay(rough, rough.seed + 1))
    over = threading.Event()
    relay = threading.Thread(target=_relay, args=(first, second, ways, over), daemon=True)
    relay.start()
    try:
        yield ways
    finally:
        over.set()
        relay.join()
        os.close(first)
        os.close(second)


def _relay(first: int, second: int, ways: tuple[OneWay, OneWay], over: threading.Event) -> None:
    poller, ends = select.poll(), ((first, second, ways[0]), (second, first, ways[1]))
    for fd in (first, second):
        poller.register(fd, select.POLLIN)
    while not over.is_set():
        times = [at for *_, way in ends if (at := way.next_at()) is not None]
        poller.poll(max(0.0, min(50.0, *((at - time.monotonic()) * 1e3 for at in times), 50.0)))
        for source, target, way in ends:
            for packet in _read(source):
                way.enter(packet, time.monotonic())
            for packet in way.leave(time.monotonic()):
                with contextlib.suppress(OSError):  # the device is down yet, or its queue is full
                    os.write(target, packet)


def _read(fd: int) -> Iterator[bytes]:
    """Yields up to 256 packets that are there, so that the other direction has its turn too."""
    with contextlib.suppress(OSError):
        for _ in range(256):
            yield os.read(fd, MTU_BYTES)
