"""A network of in-memory connections between named processes, with delay, bandwidth, partitions and broken links.

A connection delivers in order in each direction, as TCP does; connections don't affect one another. While a
direction is cut its messages wait, as TCP would send them again; a connection that was cut for ``KEEPALIVE_S``
breaks. A half-open connection is broken at one end, and the other end learns of it after ``KEEPALIVE_S``. A torn
message breaks its connection: who reads bytes gets those that came before, who reads messages gets none of it.
Knows nothing of what the messages mean.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from typing import TypeVarTuple

import msgspec

from baton.drill.loop import seeded_loop
from baton.drill.machines.memory import Memory

KEEPALIVE_S = 15.0  # seconds without a way through after which both ends of a connection see it broken
FIN_BYTES = 20  # by which an end says that it closes a connection
STEP_S = 1e-7  # seconds between two deliveries of one direction at least, so that timers keep their order


class Conditions(msgspec.Struct, frozen=True):
    """The delay and the bandwidth of every connection in the network."""

    delay_s: float = 0.0003  # least delay in one direction
    jitter_s: float = 0.0005  # most that is added to the delay, at random
    bytes_per_s: float = 5e6  # of each connection and direction


Ts = TypeVarTuple("Ts")
Deliver = Callable[[], None]
Part = Callable[[int], None]  # delivers so many of a message's first bytes


class Direction:
    """One direction of a connection: delivers messages in order, each after its travel time."""

    def __init__(self, network: Network, source: str, target: str, break_now: Callable[[], None]) -> None:
        self._network, self.source, self.target, self._break_now = network, source, target, break_now
        self._last = 0.0
        self._held: deque[tuple[Deliver, int, Part | None]] = deque()
        self.broken = False

    def send(self, deliver: Deliver, size: int, part: Part | None = None) -> None:
        """Calls ``deliver`` once ``size`` bytes have travelled; never, if the connection breaks before.

        If the message is torn, ``part`` is called in its place with the number of bytes that came; None: they count
        for nothing.
        """
        if self.broken:
            return
        if self._network.is_cut(self.source, self.target) or self._held:
            self._held.append((deliver, size, part))
            return
        self._travel(deliver, size, part)

    def heal(self) -> None:
        """Sends the messages that waited for the end of a cut."""
        held, self._held = self._held, deque()
        for message in held:
            self._travel(*message)

    def _travel(self, deliver: Deliver, size: int, part: Part | None) -> None:
        share = self._network.torn(self.source, self.target)
        if share is not None:
            size = int(share * size)
            deliver = partial(self._tear, part, size)
        loop, conditions = seeded_loop(), self._network.conditions
        delay = conditions.delay_s + self._network.rng.uniform(0.0, conditions.jitter_s)
        took = delay + size / conditions.bytes_per_s
        self._last = max(self._last + STEP_S, loop.true_time() + took)
        loop.arrives_at(self._last, self._arrive, deliver)

    def _arrive(self, deliver: Deliver) -> None:
        if not self.broken:
            deliver()

    def _tear(self, part: Part | None, count: int) -> None:
        """Delivers a message's first ``count`` bytes, and breaks the connection."""
        if part is not None:
            part(count)
        self._break_now()


class NetworkConnection:
    """A connection from process ``client`` to process ``server``; ``listener`` is the server's object that accepted
    it.

    ``up`` is the direction to the server, ``down`` that to the client. ``broken`` is what the client sees.
    """

    def __init__(self, network: Network, client: str, server: str, listener: object) -> None:
        self.client, self.server, self.listener = client, server, listener
        self.up = Direction(network, client, server, self.break_now)
        self.down = Direction(network, server, client, self.break_now)
        self.broken, self._memory = False, network.memory
        self._on_broken: dict[Callable[[], None], str] = {}  # in order, each with the process that is told

    def when_broken(self, callback: Callable[[], None], at: str) -> None:
        """Registers ``callback`` to be called once, when process ``at``, one of the two ends, sees the connection
        broken.
        """
        self._on_broken[callback] = at

    def forget(self, callback: Callable[[], None]) -> None:
        """Unregisters a callback given to ``when_broken``."""
        self._on_broken.pop(callback, None)

    def allocate(self) -> None:
        """Stands for the memory of a message at the server's end. Raises MemoryError if that process is short."""
        self._memory.allocate(self.server)

    def break_now(self) -> None:
        """Breaks the connection: messages under way are lost, and the registered callbacks run in the next turn."""
        self._break_at(self.client, self.server)

    def half_open(self, at: str) -> None:
        """Breaks the connection at process ``at`` alone; the other end waits in vain for ``KEEPALIVE_S``."""
        self._break_at(at)
        _after_keepalive(self.break_now)

    def _break_at(self, *ends: str) -> None:
        """Loses the messages under way, and calls back who registered at ``ends``."""
        self.up.broken = self.down.broken = True
        self.broken = self.broken or self.client in ends
        told = [callback for callback, end in self._on_broken.items() if end in ends]
        for callback in told:
            del self._on_broken[callback]
            asyncio.get_running_loop().call_soon(callback)


def _after_keepalive(callback: Callable[[*Ts], None], *args: *Ts) -> None:
    loop = seeded_loop()
    loop.call_at_true(loop.true_time() + KEEPALIVE_S, callback, *args)


class Network:
    """The simulated network: processes, listeners by address, connections, and the directions that are cut.

    ``memory`` is what the processes read and write messages in.
    """

    def __init__(self, rng: random.Random, conditions: Conditions = Conditions()) -> None:
        self.rng, self.conditions, self.memory = rng, conditions, Memory(rng)
        self._listeners: dict[str, tuple[str, object]] = {}
        self._connections: list[NetworkConnection] = []
        self._cuts: Counter[tuple[str, str]] = Counter()  # cuts of each direction that aren't healed
        self._cut_marks: dict[tuple[str, str], int] = {}  # directions that are cut, and since which cut
        self._marks = itertools.count(1)
        self._dead: set[str] = set()
        self._limits: Counter[str] = Counter()  # limits of each process that leave it no descriptor
        self._tears: dict[
            tuple[str, str], float
        ] = {}  # directions whose next message is torn, and after what share

    def listen(self, address: str, process: str, listener: object) -> None:
        """Has ``listener`` of process ``process`` accept connections to ``address``."""
        self._dead.discard(process)
        self._listeners[address] = (process, listener)

    def unlisten(self, address: str) -> None:
        """Stops accepting connections to ``address``; open ones stay."""
        self._listeners.pop(address, None)

    def hang_up(self, listener: object) -> None:
        """Closes every connection that ``listener`` accepted: the client sees it broken behind what is under way to
        it.
        """
        for connection in self._connections:
            if connection.listener is listener and not connection.broken:
                connection.down.send(connection.break_now, FIN_BYTES)

    def connect(self, client: str, address: str) -> NetworkConnection | None:
        """Returns a new connection of process ``client``; None if nobody listens at ``address``, either direction
        is cut, or either process may open no more.
        """
        found = self._listeners.get(address)
        if found is None or client in self._dead or self.is_cut(client, found[0]) or self.is_cut(found[0], client):
            return None
        process, listener = found
        if self._limits[client] or self._limits[process]:
            return None
        connection = NetworkConnection(self, client, process, listener)
        self._connections = [c for c in self._connections if not c.broken]
        self._connections.append(connection)
        return connection

    def is_cut(self, source: str, target: str) -> bool:
        """Returns whether messages from process ``source`` to process ``target`` are held back at present."""
        return self._cuts[source, target] > 0

    def cut(self, source: str, target: str) -> None:
        """Cuts one direction until each ``cut`` of it has had its ``heal``; connections of which it is cut for
        KEEPALIVE_S break.
        """
        self._cuts[source, target] += 1
        if self._cuts[source, target] == 1:
            self._cut_marks[source, target] = mark = next(self._marks)
            _after_keepalive(self._expire, source, target, mark)

    def heal(self, source: str, target: str) -> None:
        """Ends one ``cut`` of a direction; the last one's end sends the messages that waited for it."""
        self._cuts[source, target] -= 1
        assert self._cuts[source, target] >= 0, f"{source} to {target} isn't cut"
        if self._cuts[source, target]:
            return
        del self._cuts[source, target], self._cut_marks[source, target]
        for connection in self._connections:
            for way in (connection.up, connection.down):
                if (way.source, way.target) == (source, target):
                    way.heal()

    def break_between(self, a: str, b: str) -> int:
        """Breaks every connection between processes ``a`` and ``b``; returns how many there were."""
        found = [c for c in self._connections if not c.broken and {c.client, c.server} == {a, b}]
        for connection in found:
            connection.break_now()
        return len(found)

    def half_open_between(self, at: str, other: str) -> int:
        """Breaks every connection between two processes at ``at`` alone; returns how many there were."""
        found = [c for c in self._connections if not c.up.broken and {c.client, c.server} == {at, other}]
        for connection in found:
            connection.half_open(at)
        return len(found)

    def tear(self, source: str, target: str, share: float | None) -> None:
        """Has the next message from process ``source`` to process ``target`` torn after ``share`` (0 to 1) of its
        bytes; None: no longer.
        """
        if share is None:
            self._tears.pop((source, target), None)
        else:
            self._tears[source, target] = share

    def torn(self, source: str, target: str) -> float | None:
        """Returns the share of the present message's bytes after which it is torn, once for each ``tear``; None for
        a message that arrives whole.
        """
        return self._tears.pop((source, target), None) if self._tears else None

    def limit(self, process: str, full: bool) -> None:
        """Puts ``process`` at its limit of descriptors, where it neither opens nor accepts connections (``full``),
        or ends one such limit; it may connect again once each has ended.
        """
        self._limits[process] += 1 if full else -1
        assert self._limits[process] >= 0, f"{process} isn't at its limit"

    def process_died(self, process: str) -> None:
        """Removes the listeners of ``process``, breaks its connections, and lets it make no more, until it listens
        again.
        """
        self._dead.add(process)
        self._listeners = {at: found for at, found in self._listeners.items() if found[0] != process}
        for connection in self._connections:
            if process in (connection.client, connection.server):
                connection.break_now()

    def _expire(self, source: str, target: str, mark: int) -> None:
        if self._cut_marks.get((source, target)) == mark:
            self.break_between(source, target)
