"""Pinned prefixes: asks workers to pin a prompt's KV blocks, and keeps track of which workers do.

Knows nothing of HTTP or text. A prefix is pinned after some worker has just computed it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager

import msgspec

from baton.cluster.prefix_pins import PinnedPrefix, PrefixPinStore
from baton.protos.errors import BatonError, InvalidRequest, PinsFull, RequestUnknown, Unavailable, WorkerLost
from baton.protos.nouns import process_of
from baton.protos.v1 import worker_pb2 as w
from baton.router.request.context import RequestContext
from baton.router.request.request import ChoiceSummary
from baton.router.workers.link import WorkerLink
from baton.router.workers.link_table import LinkTable

log = logging.getLogger("baton.router")

PIN_S = 30.0  # seconds that a worker has to fetch a prefix and pin it


class PrefixWish(msgspec.Struct, frozen=True):
    """Describes a prefix to pin: the prompt's token ids, on how many workers, and for how many seconds."""

    model_id: str
    token_ids: tuple[int, ...]
    context: RequestContext
    workers: int
    ttl_s: float


class PrefixControl:
    """Pins, lists and unpins prefixes.

    ``most_tokens`` limits a tenant's pinned tokens, summed over prefixes and workers. ``wall_clock`` gives Unix
    seconds.
    """

    def __init__(
        self,
        links: LinkTable,
        store: PrefixPinStore,
        most_tokens: int,
        wall_clock: Callable[[], float],
        new_id: Callable[[], str],
    ) -> None:
        self._links, self._store, self._most_tokens = links, store, most_tokens
        self._wall_clock, self._new_id = wall_clock, new_id
        self._promised: Counter[str] = Counter()  # tokens that tenants are about to pin
        self._unpinning: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def room(self, tenant: str, admin: bool, tokens: int) -> AsyncIterator[None]:
        """Counts ``tokens`` as promised to the tenant while the block computes and pins them; an admin has no
        limit.

        Raises PinsFull if they exceed the tenant's limit together with what it has pinned and is promised.
        """
        if not admin:
            await self._require_room(tenant, tokens)
        self._promised[tenant] += tokens
        try:
            yield
        finally:
            self._promised[tenant] -= tokens
            self._promised += Counter()  # drops tenants that pin nothing now

    async def _require_room(self, tenant: str, tokens: int) -> None:
        taken = sum(sum(pin.workers.values()) for pin in await self.listed(tenant, False))
        taken += self._promised[tenant]
        if taken + tokens > self._most_tokens:
            raise PinsFull(
                f"{tokens} tokens are to be pinned; of {self._most_tokens} that a tenant may have "
                f"(router.max_pinned_tokens) {taken} are. Delete pinned prefixes, or pin a shorter one.",
                "router.max_pinned_tokens",
            )

    async def add(self, wish: PrefixWish, read_by: ChoiceSummary) -> PinnedPrefix:
        """Pins a prefix on the worker that computed it (per ``read_by``) and on others, which fetch its blocks from
        there.

        Raises what the first worker raised; other workers that fail are left out. On an error or a cancel the pins
        are undone.
        """
        targets = self._targets(wish, read_by)
        pin, now = self._new_id(), self._wall_clock()
        clock = asyncio.get_running_loop().time
        ends_at = clock() + wish.ttl_s
        try:
            held = await self._pinned(pin, wish, targets)
            took = {link.info.worker_id: link.info.incarnation for link in targets}
            entry = PinnedPrefix(
                pin, wish.context.tenant, wish.model_id, len(wish.token_ids), now, now + wish.ttl_s, held,
                {worker: took[worker] for worker in held},
            )  # fmt: skip
            await self._store.put(entry, ends_at - clock())
        except BaseException:
            await self._undo(pin, targets)
            raise
        return entry

    async def _pinned(self, pin: str, wish: PrefixWish, targets: Sequence[WorkerLink]) -> dict[str, int]:
        """Pins a prefix on ``targets``; returns how many tokens each of those keeps that does."""
        first, *others = targets
        held = {first.info.worker_id: await first.pin_prefix(_message(pin, wish, ""), PIN_S)}
        asked = [other.pin_prefix(_message(pin, wish, first.info.address), PIN_S) for other in others]
        for other, said in zip(others, await asyncio.gather(*asked, return_exceptions=True), strict=True):
            if isinstance(said, int):
                held[other.info.worker_id] = said
            elif not isinstance(said, BatonError):
                raise said
            else:
                log.warning("%s pins no prefix: %s", other.info.worker_id, said)
        return held

    async def listed(self, tenant: str, admin: bool) -> list[PinnedPrefix]:
        """Returns the tenant's pinned prefixes, everybody's for an admin, with what restarts have lost of them.

        Raises Unavailable.
        """
        present = {link.info.worker_id: link.info.incarnation for link in self._links if link.up}
        return [_as_kept(pin, present) for pin in await self._store.all() if admin or pin.tenant == tenant]

    async def remove(self, pin: str, tenant: str, admin: bool) -> PinnedPrefix:
        """Unpins prefix ``pin`` on every reachable worker, then deletes its entry, and returns it.

        Raises RequestUnknown if the caller has none of that id, Unavailable. If interrupted in between, the entry
        remains and can be removed again.
        """
        found = next((one for one in await self.listed(tenant, admin) if one.id == pin), None)
        if found is None:
            raise RequestUnknown(f"no pinned prefix {pin!r}: it was deleted, or its time is over", "id")
        await self._unpin(pin, (k for k in self._links if k.up and k.info.worker_id in found.workers))
        await self._store.remove(pin)
        return found

    def _targets(self, wish: PrefixWish, read_by: ChoiceSummary) -> Sequence[WorkerLink]:
        """The worker that read the prompt, then others of its role and weights: first those that can fetch from
        it.
        """
        reader = read_by.prefill_worker or read_by.decode_worker
        links = {link.info.worker_id: link for link in self._links if link.up}
        if reader not in links:
            raise WorkerLost(f"{reader or 'the worker'} that read the prefix can't be reached any more")
        first = links.pop(reader)
        kin = [
            k
            for k in links.values()
            if (k.info.role, k.info.fingerprint) == (first.info.role, first.info.fingerprint)
        ]
        if wish.workers > 1 + len(kin):
            there = f"{1 + len(kin)} {first.info.role} workers of the model are there"
            raise InvalidRequest(f"workers is {wish.workers}: {there}", "workers")
        kin.sort(key=lambda link: (link.info.layout != first.info.layout, link.info.worker_id))
        return [first, *kin[: wish.workers - 1]]

    async def _undo(self, pin: str, links: Iterable[WorkerLink]) -> None:
        """Unpins in a task of its own, because whoever is cancelled may be cancelled again."""
        task = asyncio.create_task(self._forget(pin, links), name=f"unpin {pin}")
        self._unpinning.add(task)
        task.add_done_callback(self._unpinning.discard)
        await asyncio.shield(task)

    async def _forget(self, pin: str, links: Iterable[WorkerLink]) -> None:
        """Unpins, and deletes the entry: Redis may have written it although its answer was lost."""
        await self._unpin(pin, links)
        try:
            await self._store.remove(pin)
        except Unavailable as error:
            log.warning("prefix %s, which isn't pinned, may be listed until its time is over: %s", pin, error)

    async def _unpin(self, pin: str, links: Iterable[WorkerLink]) -> None:
        """Asks workers that are there; on others the pin ends by itself, at its time or with the worker."""
        asked = [link.unpin_prefix(pin) for link in links]
        for said in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(said, BatonError):
                log.warning("a worker keeps prefix %s until its time is over: %s", pin, said)


def _as_kept(pin: PinnedPrefix, present: Mapping[str, str]) -> PinnedPrefix:
    """``pin`` without the workers that are there as another process than the one that took it."""
    lost = tuple(
        worker
        for worker, took in pin.incarnations.items()
        if process_of(present.get(worker, took)) != process_of(took)
    )
    kept = {worker: tokens for worker, tokens in pin.workers.items() if worker not in lost}
    return msgspec.structs.replace(pin, workers=kept, lost=lost)


def _message(pin: str, wish: PrefixWish, source: str) -> w.PinPrefixRequest:
    return w.PinPrefixRequest(
        pin=pin,
        token_ids=wish.token_ids,
        adapter_id=wish.context.adapter_id,
        tenant_salt=wish.context.tenant_salt,
        ttl_seconds=wish.ttl_s,
        source=source,
    )
