"""Where a worker's I/O process takes time, identifiers, channels and its engine from. Knows nothing of roles."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Protocol

import msgspec

from baton.kv import transport
from baton.kv.memory.host_pages import PageMemory
from baton.kv.wire.base import Transport
from baton.protos.channel import EngineReady, ToEngine, ToIo
from baton.tls.identity import Identity
from baton.tls.rpc import Dialer


class EngineChannelEnd(Protocol):
    """Names what the I/O process needs of its end of the engine's channel; ``worker.channel.IoChannel`` has it."""

    def send(self, message: ToEngine) -> None:
        """Queues a message and never blocks."""

    def __aiter__(self) -> AsyncIterator[ToIo]:
        """Iterates over the engine's messages until it is gone."""


class Engine(Protocol):
    """Names what a role needs of its engine; ``worker.engine_process.EngineProcess`` has it."""

    memory: PageMemory
    ready: EngineReady

    @property
    def channel(self) -> EngineChannelEnd:
        """Returns our end of the channel."""


class WorkerEnvironment(msgspec.Struct, frozen=True):
    """Gives time, identifiers and ways to other workers.

    ``clock`` in monotonic seconds, ``wall_clock`` in seconds since 1970, ``copy_clock`` in seconds that the asking
    thread computed, ``new_id`` an identifier that was never used before. ``sender(name, memory)`` makes the
    transport ``name``.
    """

    clock: Callable[[], float]
    wall_clock: Callable[[], float]
    copy_clock: Callable[[], float]
    new_id: Callable[[], str]
    dialer: Dialer
    sender: Callable[[str, PageMemory], Transport]

    @classmethod
    def real(cls, identity: Identity | None) -> WorkerEnvironment:
        """Returns this machine's own clocks and randomness, with connections of ``identity``."""
        return cls(
            clock=time.monotonic,
            wall_clock=time.time,
            copy_clock=time.thread_time,
            new_id=partial(secrets.token_hex, 8),
            dialer=Dialer(identity),
            sender=partial(transport.sender, identity=identity),
        )
