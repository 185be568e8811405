"""Questions of a worker's I/O process to its engine about LoRA adapters: load, unload, list.

Knows nothing of files: names are checked here, files by the engine's reader.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import assert_never

from baton.protos import channel as ch
from baton.protos.adapter_id import is_digest, require_name
from baton.protos.errors import AdapterRefused, BatonError, Forbidden, from_info
from baton.protos.nouns import AdapterInfo, AdapterLimits

NO_ADAPTERS = AdapterLimits(0, 0, 0)
Answer = tuple[AdapterInfo, ...]


class AdapterCalls:
    """Asks the engine and waits for its answers; ``changed`` is called with the ids of the adapters that requests
    may use.

    ``tickets`` outlive a change of role, because the engine may answer after it.
    """

    def __init__(
        self,
        send: ch.SendToEngine,
        limits: AdapterLimits,
        changed: Callable[[tuple[str, ...]], None],
        tickets: Iterator[int],
    ) -> None:
        self.limits = limits
        self._send, self._changed = send, changed
        self._tickets = tickets
        self._asked: dict[int, asyncio.Future[Answer]] = {}
        self._lost: BatonError | None = None

    async def load(self, name: str, path: str, digest: str, pinned: bool) -> AdapterInfo:
        """Has the engine load an adapter, and returns its description once requests may use it.

        Raises Forbidden if loading is off, AdapterRefused, AdapterChanged, AdaptersFull, WorkerLost.
        """
        if not self.limits.root or not self.limits.max_loaded:
            raise Forbidden("adapters.root is not set: no adapter may be loaded while this worker serves", "root")
        if digest and not is_digest(digest):
            raise AdapterRefused(f"digest {digest!r}: give 16 hex digits, or none", "digest")
        source = ch.AdapterPlace(require_name(name, "name"), path, self.limits.root, digest)
        (found,) = await self._answer(lambda ticket: ch.LoadAdapter(ticket, source, pinned))
        return found

    async def unload(self, adapter: str) -> AdapterInfo:
        """Has the engine accept no new request on ``adapter``, an id, and returns its description; running requests
        end on it.

        Raises AdapterUnknown, WorkerLost.
        """
        (found,) = await self._answer(lambda ticket: ch.UnloadAdapter(ticket, adapter))
        return found

    async def held(self) -> tuple[AdapterInfo, ...]:
        """Returns every adapter in memory, the least recently used first. Raises WorkerLost."""
        return await self._answer(ch.ListAdapters)

    def take(self, message: ch.FromAdapters) -> None:
        """Passes the engine's answer to the call that waits for it, and a changed list of adapters to
        ``changed``.
        """
        match message:
            case ch.AdaptersChanged(adapters):
                self._changed(adapters)
            case ch.AdapterIs(ticket, adapter):
                self._settle(ticket, (adapter,))
            case ch.AdaptersAre(ticket, adapters):
                self._settle(ticket, adapters)
            case ch.AdapterFailed(ticket, error):
                self._settle(ticket, from_info(error))
            case _:
                assert_never(message)

    def lost(self, error: BatonError) -> None:
        """Ends every wait, now and later, with ``error``, because the engine has died."""
        self._lost = error
        for ticket in tuple(self._asked):
            self._settle(ticket, error)

    async def _answer(self, ask: Callable[[int], ch.LoadAdapter | ch.UnloadAdapter | ch.ListAdapters]) -> Answer:
        if self._lost is not None:
            raise self._lost
        ticket = next(self._tickets)
        self._asked[ticket] = answer = asyncio.get_running_loop().create_future()
        self._send(ask(ticket))
        try:
            return await answer
        finally:
            del self._asked[ticket]

    def _settle(self, ticket: int, found: Answer | BatonError) -> None:
        answer = self._asked.get(ticket)
        if answer is None or answer.done():
            return
        if isinstance(found, BatonError):
            answer.set_exception(found)
        else:
            answer.set_result(found)
