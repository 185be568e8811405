"""Reads other processes' registered memory by NIXL (https://github.com/ai-dynamo/nixl).

Knows nothing of frames or streams. NIXL is optional (``pip install 'baton-serve[nixl]'``); it is loaded with the
first agent, and its exceptions become ConfigErrors. Agents run UCX, which finds the network by itself (UCX_TLS,
UCX_NET_DEVICES), with NIXL's progress thread: over TCP the *owner* of memory must make progress for another's read,
of which the owner's event loop doesn't know.

All calls that read are made by one thread per agent, because the first one to a peer connects, which takes seconds;
a future tells the event loop that a read has ended.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import logging
import mmap
import os
import queue
import threading
import time
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

from baton.kv.memory import copying
from baton.protos.errors import ConfigError

log = logging.getLogger("baton.kv")

API = "nixl._api"
EXTRA = "install it with pip install 'baton-serve[nixl]', or take another kv_transport"
PROGRESS_THREAD = True
POLL_S = 0.0002  # seconds between two checks of reads in progress, because NIXL offers no descriptor to wait on
MOST_METADATA = (
    3072  # bytes of an agent's metadata, because a hello carries them; a network device takes some hundred
)
ABANDONED_S = 20.0  # seconds after which a cancelled read that hasn't ended is given up

Piece = tuple[int, int]  # address, bytes


def installed() -> bool:
    """Returns whether the NIXL package is installed."""
    return importlib.util.find_spec("nixl") is not None


def library() -> ModuleType:
    """Returns NIXL's Python module. Raises ConfigError if it isn't installed or can't be loaded."""
    try:
        return importlib.import_module(API)
    except Exception as error:  # a library of it that is missing is an OSError, and its own checks raise others
        raise ConfigError(f"kv_transport nixl: NIXL can't be loaded ({error}); {EXTRA}", "kv_transport") from None


class NixlAgent:
    """Owns one NIXL agent and the memory registered with it. Its methods may be called from any thread, one at a
    time.
    """

    def __init__(self) -> None:
        api = library()
        self.name = f"baton-{os.getpid()}-{os.urandom(4).hex()}"
        try:
            config = api.nixl_agent_config(enable_prog_thread=PROGRESS_THREAD, backends=["UCX"])
            self._agent = api.nixl_agent(self.name, config)
        except Exception as error:
            raise ConfigError(f"kv_transport nixl: no UCX agent can be made ({error})", "kv_transport") from None
        self._registered: list[object] = []

    def register(self, view: memoryview) -> int:
        """Registers ``view``, so that anyone who has the agent's metadata can read and write it; returns its
        address.

        Raises ConfigError.
        """
        at = copying.address(view)
        try:
            self._registered.append(self._agent.register_memory([(at, len(view), 0, "")], mem_type="DRAM"))
        except Exception as error:
            raise ConfigError(
                f"kv_transport nixl: {len(view)} bytes can't be registered ({error})", "kv_transport"
            ) from None
        return at

    def metadata(self) -> bytes:
        """Returns the agent's metadata, which others need to read its registered memory. Raises ConfigError if it
        is too long.
        """
        found = bytes(self._agent.get_agent_metadata())
        if len(found) > MOST_METADATA:
            text = f"kv_transport nixl: {len(found)} bytes describe this host's networks, {MOST_METADATA} at most; "
            raise ConfigError(text + "name fewer in UCX_NET_DEVICES", "kv_transport")
        return found

    def know(self, metadata: bytes) -> str:
        """Adds the agent that ``metadata`` describes, whose memory can then be read; returns its name."""
        found = self._agent.add_remote_agent(metadata)
        return found.decode() if isinstance(found, bytes) else str(found)

    def forget(self, name: str) -> None:
        """Removes the agent ``name`` that ``know`` added."""
        self._agent.remove_remote_agent(name)

    def start(self, name: str, local: Sequence[Piece], remote: Sequence[Piece]) -> object:
        """Starts a read of the ``remote`` pieces of agent ``name`` into ``local`` pieces of the same sizes; returns
        its handle.
        """
        ours, theirs = (
            self._agent.get_xfer_descs([(at, size, 0) for at, size in of], mem_type="DRAM")
            for of in (local, remote)
        )
        handle = self._agent.initialize_xfer("READ", ours, theirs, name)
        self._agent.transfer(handle)
        return handle

    def ended(self, handle: object) -> bool:
        """Returns whether a read has ended, and if so releases its handle. Raises ConfigError or NIXL's own error
        if the read failed.
        """
        state = self._agent.check_xfer_state(handle)
        if state == "PROC":
            return False
        self._agent.release_xfer_handle(handle)
        if state != "DONE":
            raise ConfigError(f"NIXL says {state} of a read", "kv_transport")
        return True

    def give_up(self, handle: object) -> None:
        """Releases the handle of a read that hasn't ended."""
        self._agent.release_xfer_handle(handle)

    def close(self) -> None:
        """Deregisters all memory that ``register`` registered."""
        for descriptions in self._registered:
            self._agent.deregister_memory(descriptions)
        self._registered.clear()
        self._agent = None


class Staging:
    """A registered buffer into which blocks are read before they are copied to their places."""

    def __init__(self, agent: NixlAgent, size: int) -> None:
        self.size = size
        self.view = memoryview(mmap.mmap(-1, size))
        self.at = agent.register(self.view)


class Remote(NamedTuple):
    """Identifies another process's memory: its agent's metadata, the address and the size in bytes."""

    metadata: bytes
    at: int
    size: int


class ReadRequest(NamedTuple):
    """A request to read the blocks at offsets ``places`` of a remote's memory, ``unit`` bytes each, side by side
    into ``into``.
    """

    remote: Remote
    places: tuple[int, ...]
    unit: int
    into: Staging
    done: asyncio.Future[None]


class NixlReader:
    """Reads remote memory on its own thread and reports to the event loop by futures. One agent serves all."""

    def __init__(self) -> None:
        self._agent = NixlAgent()
        self._loop = asyncio.get_running_loop()
        self._asked: queue.SimpleQueue[ReadRequest | None] = queue.SimpleQueue()
        self._names: dict[bytes, str] = {}
        self._under_way: list[tuple[object, ReadRequest, float]] = []
        self._idle: list[Staging] = []
        self._thread = threading.Thread(target=self._run, name="nixl-reads", daemon=True)
        self._thread.start()

    def staging(self, size: int) -> Staging:
        """Returns a buffer of ``size`` bytes or more for a read; pass it to ``give_back`` once no read uses it."""
        for at, found in enumerate(self._idle):
            if found.size >= size:
                return self._idle.pop(at)
        return Staging(self._agent, size)

    def give_back(self, staging: Staging) -> None:
        """Keeps ``staging`` for later reads."""
        self._idle.append(staging)

    def read(self, remote: Remote, places: Sequence[int], unit: int, into: Staging) -> asyncio.Future[None]:
        """Starts to read blocks of ``unit`` bytes at offsets ``places`` into ``into``; returns a future of its end,
        or ConfigError.

        If the future is cancelled, ``into`` is given back once the read has ended. A cancelled read that doesn't
        end within ABANDONED_S seconds is given up with its memory, to which NIXL may still write.
        """
        done = self._loop.create_future()
        self._asked.put(ReadRequest(remote, tuple(places), unit, into, done))
        return done

    def close(self) -> None:
        """Ends the thread; reads in progress are given up, and their futures get a ConfigError."""
        self._asked.put(None)
        self._thread.join(ABANDONED_S)

    def _run(self) -> None:
        while self._take():
            self._look()
            if self._under_way:
                time.sleep(POLL_S)
        for handle, read, _ in self._under_way:
            self._tell(read, ConfigError("the receiver was closed", "kv_transport"))
            self._agent.give_up(handle)
        self._agent.close()

    def _take(self) -> bool:
        """Starts the requested reads; waits for a request if no read is in progress. Returns False at the end."""
        while True:
            try:
                asked = self._asked.get(block=not self._under_way)
            except queue.Empty:
                return True
            if asked is None:
                return False
            self._start(asked)

    def _start(self, asked: ReadRequest) -> None:
        remote, unit = asked.remote, asked.unit
        try:
            if remote.metadata not in self._names:
                self._names[remote.metadata] = self._agent.know(remote.metadata)
            theirs = [(remote.at + place, unit) for place in asked.places]
            ours = [(asked.into.at + number * unit, unit) for number in range(len(asked.places))]
            handle = self._agent.start(self._names[remote.metadata], ours, theirs)
        except Exception as error:  # NIXL's errors share no base class but this
            self._failed(asked, error)
            return
        self._under_way.append((handle, asked, time.monotonic()))

    def _look(self) -> None:
        still = []
        for handle, read, began in self._under_way:
            try:
                if self._agent.ended(handle):
                    self._tell(read, None)
                elif read.done.cancelled() and time.monotonic() - began > ABANDONED_S:
                    self._agent.give_up(handle)
                else:
                    still.append((handle, read, began))
            except Exception as error:
                self._failed(read, error)
        self._under_way = still

    def _failed(self, read: ReadRequest, error: Exception) -> None:
        """Reports a failed read and forgets its sender, which announces itself again, in another process."""
        name = self._names.pop(read.remote.metadata, None)
        if name is not None:
            try:
                self._agent.forget(name)
            except Exception as other:
                log.warning("NIXL can't forget %s: %s", name, other)
        self._tell(read, ConfigError(f"NIXL can't read the sender's memory: {error}", "kv_transport"))

    def _tell(self, read: ReadRequest, error: ConfigError | None) -> None:
        def tell() -> None:
            if read.done.cancelled():
                self.give_back(read.into)
            elif error is None:
                read.done.set_result(None)
            else:
                read.done.set_exception(error)

        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(tell)
