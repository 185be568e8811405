"""Who may come in, and how much of it: keys at the door, rates per key.

Knows nothing of REST or gRPC: it is handed an Authorization value. Without keys the gate stands open, and every
caller is nobody's. Rates are counted in a shared store; without it each router counts for itself.
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

SPEND_EVERY_S = 0.25  # seconds between two writes of what answers have used


class SharedBuckets(Protocol):
    """Counts rates in buckets that routers share; ``cluster.store.buckets.RateBuckets`` is the real one."""

    async def take(self, costs: Mapping[str, tuple[float, float]]) -> float | None:
        """Takes costs, name -> (per minute, cost): 0.0 when taken, else seconds to wait; None when nobody can
        say.
        """

    async def spend(self, costs: Mapping[str, float]) -> None:
        """Takes what was already used."""


class LocalBuckets:
    """Counts rates in this process: the fall-back, and all there is without Redis."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._levels: dict[str, tuple[float, float]] = {}

    async def take(self, costs: Mapping[str, tuple[float, float]]) -> float | None:
        """Takes the costs from the buckets: 0.0 when they were taken, else the seconds to wait."""
        now, levels, wait = self._clock(), {}, 0.0
        for name, (per_min, cost) in costs.items():
            level, at = self._levels.get(name, (per_min, now))
            levels[name] = level = min(per_min, level + (now - at) * per_min / 60)
            need = min(cost, per_min)
            if level < need:
                wait = max(wait, (need - level) / (per_min / 60))
        if not wait:
            self._levels |= {name: (levels[name] - costs[name][1], now) for name in costs}
        return wait

    async def spend(self, costs: Mapping[str, float]) -> None:
        """Takes what was already used, which may overdraw a bucket."""
        for name, cost in costs.items():
            if name in self._levels:
                level, at = self._levels[name]
                self._levels[name] = (level - cost, at)


class AccessGate:
    """Lets callers in and counts what they use: ``identify`` at the border, ``charge`` once the prompt's length is
    known.
    """

    def __init__(
        self,
        keys: KeyRing | None = None,
        clock: Callable[[], float] = lambda: 0.0,
        shared: SharedBuckets | None = None,
    ) -> None:
        self._keys, self._shared, self._local = keys, shared, LocalBuckets(clock)
        self._unspent: dict[str, float] = {}

    @property
    def closed(self) -> bool:
        """Returns whether a caller needs a key."""
        return self._keys is not None

    def identify(self, authorization: str | None) -> Caller:
        """Returns who sends ``Authorization: Bearer KEY``. Raises Unauthenticated."""
        if self._keys is None:
            return Caller()
        scheme, _, text = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not text:
            raise Unauthenticated("give an API key: Authorization: Bearer bt-…", "authorization")
        return Caller(key=self._keys.find(text.strip()))

    def renewed(self, key: ApiKey | None) -> ApiKey | None:
        """Returns a key that was found earlier with the rates and rights that it has now.

        Raises Unauthenticated where they have none left.
        """
        return self._keys.renewed(key) if self._keys is not None and key is not None else key

    async def charge(
        self, key: ApiKey | None, model_id: str, requests: int, tokens: int, adapter: str = ""
    ) -> None:
        """Counts a call against the key's rates. Raises Forbidden for what it may not use, QuotaExceeded."""
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
        """Notes the tokens that an answer took; they are taken from the bucket soon."""
        if key is not None and key.tokens_per_min and tokens:
            name = _tokens_name(key)
            self._unspent[name] = self._unspent.get(name, 0.0) + tokens

    @asynccontextmanager
    async def settling(self) -> AsyncIterator[None]:
        """Brings what was spent to the buckets while the block runs."""
        task = asyncio.create_task(self._run(), name="gate")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self.settle()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(SPEND_EVERY_S)
            await self.settle()
            heed_cancel()

    async def settle(self) -> None:
        """Takes what answers have spent from the buckets now."""
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
