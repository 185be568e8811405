"""The sources of time, identifiers, channels and engine of a worker's I/O process, which tests replace."""

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
from baton.process.effort import Efforts
from baton.protos.channel import EngineReady, ToEngine, ToIo
from baton.tls.identity import Identity
from baton.tls.rpc import Dialer


class EngineChannelEnd(Protocol):
    """Declares what the I/O process needs of its end of the engine's channel; ``worker.channel.IoChannel``
    implements it.
    """

    def send(self, message: ToEngine) -> None:
        """Queues a message for the engine; never waits."""

    def __aiter__(self) -> AsyncIterator[ToIo]:
        """Iterates over the engine's messages until it closes the channel."""


class Engine(Protocol):
    """Declares what a role needs of its engine; ``worker.engine_process.EngineProcess`` implements it."""

    memory: PageMemory
    ready: EngineReady

    @property
    def channel(self) -> EngineChannelEnd:
        """Returns the I/O process's end of the channel."""

    def efforts(self) -> Efforts:
        """Returns the seconds that each of its threads computed or waited for a core; empty where nobody knows."""


class WorkerEnvironment(msgspec.Struct, frozen=True):
    """Gives time, identifiers and connections to other workers.

    ``clock`` is monotonic seconds, ``wall_clock`` Unix seconds, ``copy_clock`` CPU seconds of the calling thread,
    ``new_id`` an identifier never used before. ``sender(name, memory)`` makes the KV transport ``name``.
    """

    clock: Callable[[], float]
    wall_clock: Callable[[], float]
    copy_clock: Callable[[], float]
    new_id: Callable[[], str]
    dialer: Dialer
    sender: Callable[[str, PageMemory], Transport]

    @classmethod
    def real(cls, identity: Identity | None) -> WorkerEnvironment:
        """Returns the environment with this machine's clocks and randomness, and connections that use
        ``identity``'s certificate (None: plaintext).
        """
        return cls(
            clock=time.monotonic,
            wall_clock=time.time,
            copy_clock=time.thread_time,
            new_id=partial(secrets.token_hex, 8),
            dialer=Dialer(identity),
            sender=partial(transport.sender, identity=identity),
        )
