"""Manages the adapters in an engine's memory: their users, loading, and eviction if there is no room. Torch-free.

Knows nothing of steps or of the channel's requests. Single-threaded, between two steps; files are read elsewhere
(``reading.py``), and what was read is held in short pieces, one between two steps, so that steps don't wait. An
adapter that a sequence uses is never evicted; if it is unloaded, it takes no new sequences and is removed after
the last one.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import NamedTuple, Protocol

import msgspec

from baton.engine.adapters.host import AdapterHost
from baton.engine.adapters.packed import PackedAdapter
from baton.protos import channel as ch
from baton.protos.adapter_id import adapter_id
from baton.protos.errors import (
    AdapterNotLoaded,
    AdapterRefused,
    AdaptersFull,
    AdapterUnknown,
    BatonError,
    RankLost,
    Unavailable,
    to_info,
)
from baton.protos.nouns import AdapterInfo, AdapterLimits

log = logging.getLogger("baton.engine")

Answer = ch.AdapterIs | ch.AdaptersAre | ch.AdapterFailed | ch.AdaptersChanged
NONE = AdapterLimits(0, 0, 0)


class ReadAdapter(NamedTuple):
    """An adapter that was read: its description and its packed matrices."""

    info: AdapterInfo
    packed: PackedAdapter


class Reading(Protocol):
    """The reading of one adapter, in progress; implemented by ``reading.ForkedReading``."""

    def result(self) -> ReadAdapter | BatonError | None:
        """Returns the adapter or the error; None while it is being read."""

    def close(self) -> None:
        """Ends the reading, whether or not its result was taken."""


StartReading = Callable[[ch.AdapterPlace], Reading]


class HeldAdapter:
    """An adapter in memory, with the keys of the sequences that use it."""

    def __init__(self, info: AdapterInfo) -> None:
        self.info = info
        self.users: set[int] = set()
        self.pinned, self.leaving = info.pinned, False

    @property
    def evictable(self) -> bool:
        """Returns whether it may be evicted: it is neither pinned nor in use."""
        return not (self.pinned or self.users)

    def told(self) -> AdapterInfo:
        """Returns the adapter's description with its current state: pinned, users, and whether it is being
        unloaded.
        """
        return msgspec.structs.replace(self.info, pinned=self.pinned, running=len(self.users), leaving=self.leaving)


class AdapterTable:
    """Manages the adapters of one engine. ``host`` applies them; without one, none can be loaded.

    ``limits`` bounds their number and bytes, ``start`` begins to read one. The methods that answer requests yield
    messages to the I/O process.
    """

    def __init__(
        self, host: AdapterHost | None = None, limits: AdapterLimits = NONE, start: StartReading | None = None
    ) -> None:
        self._host, self._limits, self._start = host, limits, start
        self._held: dict[str, HeldAdapter] = {}  # the least recently used first
        self._used: dict[int, str] = {}
        self._asked: deque[ch.LoadAdapter] = deque()
        self._reading: Reading | None = None
        self._taking: Generator[None, None, Answer] | None = None  # of what was read, to be held
        self._told: tuple[str, ...] = ()

    # ---- requests ----

    @property
    def applies(self) -> bool:
        """Returns whether this engine can apply adapters at all."""
        return self._host is not None

    @property
    def ids(self) -> tuple[str, ...]:
        """Returns the ids of the adapters that take requests, sorted."""
        return tuple(sorted(name for name, held in self._held.items() if not held.leaving))

    def require(self, adapter: str) -> None:
        """Raises AdapterNotLoaded unless ``adapter`` is empty or takes requests here."""
        held = self._held.get(adapter)
        if adapter and (held is None or held.leaving):
            raise AdapterNotLoaded(f"adapter {adapter!r} is not loaded here; load it, or ask another", "adapter_id")

    def rank_of(self, adapter: str) -> int:
        """Returns the largest rank of the matrices of ``adapter``; 0 if it isn't in memory."""
        held = self._held.get(adapter)
        return 0 if held is None else held.info.rank

    def use(self, key: int, adapter: str) -> None:
        """Records that the sequence of ``key`` uses ``adapter`` (may be empty) until ``release(key)``. Raises
        AdapterNotLoaded.
        """
        self.require(adapter)
        if adapter:
            held = self._held[adapter] = self._held.pop(adapter)  # the youngest now
            held.users.add(key)
            self._used[key] = adapter

    def release(self, key: int) -> None:
        """Ends the use that ``use`` began under ``key``; a second call does nothing."""
        adapter = self._used.pop(key, None)
        if adapter is None:
            return
        held = self._held[adapter]
        held.users.discard(key)
        if held.leaving and not held.users:
            self._drop(adapter)

    # ---- loading ----

    @property
    def reading(self) -> bool:
        """Returns whether an adapter is being loaded; if so, ``turn`` has to be called soon."""
        return self._reading is not None or self.holding

    @property
    def holding(self) -> bool:
        """Returns whether an adapter was read and isn't held yet; if so, ``turn`` has something to do at once."""
        return self._taking is not None

    def load(self, message: ch.LoadAdapter) -> Iterator[Answer]:
        """Begins to load an adapter, and yields messages if it is loaded already or can't be."""
        held = self._held.get(adapter_id(message.source.name, message.source.digest))
        if held is not None and message.source.digest:
            yield self._again(message, held)
        elif self._host is None or self._start is None or not self._limits.max_loaded:
            text = "this worker applies no adapters: set worker.adapters or adapters.root, on the cpu"
            yield ch.AdapterFailed(message.ticket, to_info(AdapterRefused(text, "adapters")))
            return
        else:
            self._asked.append(message)
            self._begin()
        yield from self._changes()

    def turn(self) -> Iterator[Answer]:
        """Does a short piece of holding the adapter whose reading has ended; after the last one begins the next
        reading, and yields the answers. What fails fails that adapter alone. Raises RankLost.
        """
        try:
            answer = self._piece()
        except RankLost:
            raise
        except Exception as error:
            answer = self._failed(self._asked[0], error)
        if answer is None:
            return
        self.close()
        self._reading = self._taking = None
        self._asked.popleft()
        yield answer
        self._begin()
        yield from self._changes()

    def _piece(self) -> Answer | None:
        """Returns the answer about the adapter that is being loaded; None while there is more to do."""
        if self._taking is None:
            if self._reading is None or (found := self._reading.result()) is None:
                return None
            self._reading.close()
            self._reading, self._taking = None, self._take(self._asked[0], found)
        try:
            next(self._taking)
        except StopIteration as done:
            answer: Answer = done.value
            return answer
        return None

    def _failed(self, message: ch.LoadAdapter, error: Exception) -> ch.AdapterFailed:
        if not isinstance(error, BatonError):
            log.error("adapter %r could not be loaded", message.source.path, exc_info=error)
        if isinstance(error, OSError):
            text = f"adapter {message.source.path!r}: no memory or descriptor to spare for it: {error.strerror}"
            error = Unavailable(f"{text}; load it again", "lora_path")
        return ch.AdapterFailed(message.ticket, to_info(error))

    def hold(self, found: ReadAdapter, pinned: bool = False) -> None:
        """Holds an adapter from now on, evicting others if necessary. Raises AdaptersFull."""
        deque(self._hold(found, pinned), maxlen=0)

    def _hold(self, found: ReadAdapter, pinned: bool) -> Generator[None, None, HeldAdapter]:
        assert self._host is not None
        held = self._held.get(found.info.id)
        if held is None:
            self._make_room(found.info)
            yield from self._host.holding(found.info.id, found.packed)
            held = self._held[found.info.id] = HeldAdapter(found.info)
        held.pinned, held.leaving = held.pinned or pinned, False
        return held

    def unload(self, message: ch.UnloadAdapter) -> Iterator[Answer]:
        """Stops new requests on an adapter, removes it at once or with its last sequence, and yields the
        answers.
        """
        held = self._held.get(message.adapter)
        if held is None or held.leaving:
            error = AdapterUnknown(f"adapter {message.adapter!r} is not loaded here", "id")
            yield ch.AdapterFailed(message.ticket, to_info(error))
            return
        held.leaving = True
        yield ch.AdapterIs(message.ticket, held.told())
        if not held.users:
            self._drop(message.adapter)
        yield from self._changes()

    def listed(self, message: ch.ListAdapters) -> ch.AdaptersAre:
        """Returns the answer that lists every adapter in memory, the least recently used first."""
        return ch.AdaptersAre(message.ticket, tuple(held.told() for held in self._held.values()))

    def announced(self) -> ch.AdaptersChanged:
        """Returns the message that announces which adapters take requests."""
        self._told = self.ids
        return ch.AdaptersChanged(self._told)

    def close(self) -> None:
        """Ends the reading in progress, if any."""
        if self._reading is not None:
            self._reading.close()

    def _begin(self) -> None:
        if not self.reading and self._asked:
            assert self._start is not None
            self._reading = self._start(self._asked[0].source)

    def _take(self, message: ch.LoadAdapter, found: ReadAdapter | BatonError) -> Generator[None, None, Answer]:
        if isinstance(found, BatonError):
            raise found
        held = yield from self._hold(found, message.pinned)
        return ch.AdapterIs(message.ticket, held.told())

    def _again(self, message: ch.LoadAdapter, held: HeldAdapter) -> Answer:
        held.pinned, held.leaving = held.pinned or message.pinned, False
        self._held[held.info.id] = self._held.pop(held.info.id)
        return ch.AdapterIs(message.ticket, held.told())

    def _make_room(self, info: AdapterInfo) -> None:
        """Evicts the least recently used adapters until there is room; raises AdaptersFull, evicting none, if that
        doesn't suffice.
        """
        going: list[str] = []
        count, size = len(self._held) + 1, sum(held.info.bytes for held in self._held.values()) + info.bytes
        for adapter, held in self._held.items():
            if count <= self._limits.max_loaded and size <= self._limits.max_bytes:
                break
            if held.evictable:
                going.append(adapter)
                count, size = count - 1, size - held.info.bytes
        if count > self._limits.max_loaded or size > self._limits.max_bytes:
            text = f"{info.id} needs {info.bytes} bytes: all others are pinned or in use; unload one"
            raise AdaptersFull(f"{text}, or raise adapters.max_loaded or .max_bytes", "adapters", retry_after_s=1.0)
        for adapter in going:
            self._drop(adapter)

    def _drop(self, adapter: str) -> None:
        assert self._host is not None
        del self._held[adapter]
        self._host.drop(adapter)

    def _changes(self) -> Iterator[ch.AdaptersChanged]:
        if self.ids != self._told:
            yield self.announced()
