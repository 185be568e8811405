"""Reports which sockets are ready, by an epoll of its own that the event loop watches.

Knows nothing of what is read or written. The loop's own add_reader doesn't suffice: libuv, and so uvloop, stops
watching a descriptor once an error is pending on it (a reset by a killed sender) without calling its reader, and
the receiver would keep the pages forever. An epoll's descriptor never has an error: the loop watches that one, and
this module checks each socket's state.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable

Callback = Callable[[], None]

_READ = select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR | select.EPOLLRDHUP
_WRITE = select.EPOLLOUT | select.EPOLLHUP | select.EPOLLERR
TURN_EVENTS = 64  # sockets served in one turn of the event loop, so that others get their turn


class Poller:
    """Calls back on the running loop for sockets that are ready."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._watched: dict[int, dict[int, Callback]] = {}
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._epoll.fileno(), self._ready)

    def reads(self, fd: int, callback: Callback | None) -> None:
        """Calls ``callback`` whenever ``fd`` has something to read, has ended or has an error; None stops that."""
        self._watch(fd, select.EPOLLIN, callback)

    def writes(self, fd: int, callback: Callback | None) -> None:
        """Calls ``callback`` whenever ``fd`` can be written, or has an error; None stops that."""
        self._watch(fd, select.EPOLLOUT, callback)

    def forget(self, fd: int) -> None:
        """Stops watching ``fd``; call it before ``fd`` is closed."""
        if self._watched.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def close(self) -> None:
        """Stops watching all descriptors. A second call does nothing."""
        if not self._epoll.closed:
            self._loop.remove_reader(self._epoll.fileno())
            self._epoll.close()
            self._watched.clear()

    def _watch(self, fd: int, event: int, callback: Callback | None) -> None:
        if self._epoll.closed:
            return None
        wanted = self._watched.get(fd)
        if callback is None:
            if wanted is None or wanted.pop(event, None) is None:
                return None
            if not wanted:  # not merely no interest: errors are told even to those who want nothing
                return self.forget(fd)
        elif wanted is None:
            self._watched[fd] = {event: callback}
            return self._epoll.register(fd, event)
        else:
            wanted[event] = callback
        self._epoll.modify(fd, sum(wanted))
        return None

    def _ready(self) -> None:
        for fd, events in self._epoll.poll(0, TURN_EVENTS):
            self._call(fd, select.EPOLLIN, events & _READ)
            self._call(fd, select.EPOLLOUT, events & _WRITE)
            if self._epoll.closed:
                return

    def _call(self, fd: int, event: int, happened: int) -> None:
        callback = self._watched.get(fd, {}).get(event)
        if happened and callback is not None:
            callback()
