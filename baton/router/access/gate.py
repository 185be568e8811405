"""Access control of the API: which callers may come in (API keys), and how much each may use (rates per key).

Knows nothing of REST or gRPC: it is handed an Authorization value. Without keys every call is let in, without a
key. Rates are counted in a shared store; without one each router counts for itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Protocol

from baton.protos.errors import Forbidden, QuotaExceeded, Unauthenticated
from baton.protos.rpc import heed_cancel
from baton.router.access.caller import Caller
from baton.router.access.keys import ApiKey, KeyRing
from baton.tasks.beside import beside

SPEND_EVERY_S = 0.25  # seconds between two writes of what answers have used


class SharedBuckets(Protocol):
    """Counts rates in token buckets that routers share; ``cluster.store.buckets.RateBuckets`` implements it."""

    async def take(self, costs: Mapping[str, tuple[float, float]]) -> float | None:
        """Takes ``costs``, bucket name -> (refill per minute, cost), from all buckets or from none.

        Returns 0.0 if they were taken, else the seconds to wait; None if the shared store can't answer.
        """

    async def spend(self, costs: Mapping[str, tuple[float, float]]) -> None:
        """Takes ``costs``, bucket name -> (refill per minute, cost), of what was already used; a bucket may be
        overdrawn. A cost below 0 is given back, up to a full bucket.
        """


class LocalBuckets:
    """Counts rates in token buckets of this process: for routers without Redis, and while Redis is away."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._levels: dict[str, tuple[float, float]] = {}

    async def take(self, costs: Mapping[str, tuple[float, float]]) -> float | None:
        """Takes ``costs``, bucket name -> (refill per minute, cost), from all buckets or from none.

        Returns 0.0 if they were taken, else the seconds to wait until they can be.
        """
        now, levels, wait = self._clock(), {}, 0.0
        for name, (per_min, cost) in costs.items():
            levels[name] = level = self._level(name, per_min, now)
            need = min(cost, per_min)
            if level < need:
                wait = max(wait, (need - level) / (per_min / 60))
        if not wait:
            self._levels |= {name: (levels[name] - costs[name][1], now) for name in costs}
        return wait

    async def spend(self, costs: Mapping[str, tuple[float, float]]) -> None:
        """Takes ``costs``, bucket name -> (refill per minute, cost), of what was already used; a bucket may be
        overdrawn. A cost below 0 is given back, up to a full bucket.
        """
        now = self._clock()
        self._levels |= {
            name: (min(per_min, self._level(name, per_min, now) - cost), now)
            for name, (per_min, cost) in costs.items()
        }

    def _level(self, name: str, per_min: float, now: float) -> float:
        level, at = self._levels.get(name, (per_min, now))
        return min(per_min, level + (now - at) * per_min / 60)


class AccessGate:
    """Lets callers in and counts what they use: ``identify`` when a call arrives, ``charge`` once the prompt's
    length is known, ``refund`` if nobody answers it.
    """

    def __init__(
        self,
        keys: KeyRing | None = None,
        clock: Callable[[], float] = lambda: 0.0,
        shared: SharedBuckets | None = None,
    ) -> None:
        self._keys, self._shared, self._local = keys, shared, LocalBuckets(clock)
        self._unspent: dict[str, tuple[float, float]] = {}  # refill per minute and amount, by bucket

    @property
    def closed(self) -> bool:
        """Returns whether callers need an API key."""
        return self._keys is not None

    def identify(self, authorization: str | None) -> Caller:
        """Returns the caller whose key ``authorization`` ("Bearer KEY") holds; a caller without key if none is
        needed.

        Raises Unauthenticated for a missing or invalid key.
        """
        if self._keys is None:
            return Caller()
        scheme, _, text = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not text:
            text = "give an API key: Authorization: Bearer bt-…, or over HTTP x-api-key: bt-…"
            raise Unauthenticated(text, "authorization")
        return Caller(key=self._keys.find(text.strip()))

    def renewed(self, key: ApiKey | None) -> ApiKey | None:
        """Returns the current entry (rates, rights) of a key that was found earlier and ``noted``; None for None.

        Raises Unauthenticated if the key was removed or revoked meanwhile.
        """
        return self._keys.renewed(key) if self._keys is not None and key is not None else key

    def current(self, key: ApiKey | None) -> ApiKey | None:
        """Returns the current entry of a key that ``identify`` found, for a call that goes on and on; None for
        None.

        Raises Unauthenticated if the key was removed or revoked meanwhile.
        """
        return self._keys.current(key) if self._keys is not None and key is not None else key

    async def charge(
        self, key: ApiKey | None, model_id: str, requests: int, tokens: int, adapter: str = ""
    ) -> None:
        """Counts ``requests`` and prompt ``tokens`` against the key's rates per minute; without a key does nothing.

        Raises Forbidden for a model or adapter that the key may not use, QuotaExceeded with the seconds to wait.
        """
        if key is None:
            return
        if not key.allows(model_id, adapter):
            may = ", ".join((*key.models, *key.adapters))
            raise Forbidden(f"this key may use {may}, not {adapter or model_id!r}", "model")
        costs = _costs(key, requests, tokens)
        if not costs:
            return
        wait = None if self._shared is None else await self._shared.take(costs)
        if wait is None:
            wait = await self._local.take(costs)
        if wait:
            raise QuotaExceeded(
                f"the key's rate ({key.requests_per_min or 'any'} requests, {key.tokens_per_min or 'any'} tokens "
                f"per minute) is used up; try again in {wait:.1f} s",
                retry_after_s=wait,
            )

    def spent(self, key: ApiKey | None, tokens: int) -> None:
        """Notes ``tokens`` that an answer generated; ``settle`` takes them from the key's token rate soon after."""
        if key is not None and key.tokens_per_min and tokens:
            self._note(_tokens_name(key), key.tokens_per_min, tokens)

    def refund(self, key: ApiKey | None, requests: int, tokens: int) -> None:
        """Notes what ``charge`` counted for nothing; ``settle`` gives it back soon after, up to full buckets."""
        for name, (per_min, cost) in (_costs(key, requests, tokens) if key is not None else {}).items():
            self._note(name, per_min, -cost)

    def _note(self, name: str, per_min: float, amount: float) -> None:
        _, before = self._unspent.get(name, (0.0, 0.0))
        self._unspent[name] = per_min, before + amount

    @asynccontextmanager
    async def settling(self) -> AsyncIterator[None]:
        """Takes what answers have used from the buckets every SPEND_EVERY_S while the block runs, and once at its
        end.
        """
        try:
            async with beside(self._run, "gate"):
                yield
        finally:
            await self.settle()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(SPEND_EVERY_S)
            await self.settle()
            heed_cancel()

    async def settle(self) -> None:
        """Takes from the buckets, local and shared, what ``spent`` has noted since the last call, and gives back
        what ``refund`` has.
        """
        unspent, self._unspent = self._unspent, {}
        if unspent:
            await self._local.spend(unspent)
            if self._shared is not None:
                await self._shared.spend(unspent)


def _costs(key: ApiKey, requests: int, tokens: int) -> dict[str, tuple[float, float]]:
    costs: dict[str, tuple[float, float]] = {}
    if key.requests_per_min:
        costs[f"requests:{key.id}"] = (key.requests_per_min, requests)
    if key.tokens_per_min:
        costs[_tokens_name(key)] = (key.tokens_per_min, tokens)
    return costs


def _tokens_name(key: ApiKey) -> str:
    return f"tokens:{key.id}"
