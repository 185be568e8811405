"""A named lease in Redis: one of many processes holds it for a while, and renews it.

Knows nothing of what the holder does. Without Redis nobody holds it. A holder that pauses for longer than the lease
may find another in its place. It learns that at its next ``hold``, or asks its ``LeaseTurn`` before whatever isn't
safe beside another holder.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from redis.asyncio import Redis
from redis.exceptions import RedisError

from baton.protos.rpc import heed_cancel
from baton.tasks.beside import beside

ASK_AGAIN_S = 0.05  # seconds between two tries of who waits for another's lease
RENEWALS = 3  # in the time that a lease lasts

ANOTHERS, TAKEN, RENEWED = 0, 1, 2  # what becomes of a try: others may have had a lease that is taken, not renewed
# KEYS: the lease; ARGV: who, ms. TAKEN, RENEWED: it is ours for that long.
_HOLD = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return holder and 2 or 1
"""
# KEYS: the lease; ARGV: who
_LEAVE = "if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end return 1"


def lease_key(namespace: str, name: str) -> str:
    """Returns the key under which Redis has the name of the turn, or of who holds lease ``name``."""
    return f"{{{namespace}}}:lease:{name}"


class LeaseTurn:
    """Tells whether a lease that was taken has been nobody else's since.

    ``name`` is what Redis has for it until its end, and for no other turn.
    """

    def __init__(self, lease: NamedLease, name: str) -> None:
        self.name = name
        self._lease, self._renewed = lease, True

    @property
    def is_sure(self) -> bool:
        """Returns whether nobody else can have had the lease, without asking: this process may have stood still."""
        return self._renewed and self._lease.is_sure

    def renewed(self, became: int) -> None:
        """Takes what became of a try to renew the lease."""
        self._renewed = self._renewed and became == RENEWED


class NamedLease:
    """Holds the lease ``name`` within the namespace for ``who``, ``seconds`` at a time."""

    def __init__(self, redis: Redis, namespace: str, name: str, who: str, seconds: float) -> None:
        self._key, self._who, self._ms = lease_key(namespace, name), who, int(seconds * 1000)
        self._holder, self._turns = who, itertools.count(1)
        self._until = float("-inf")
        self._hold, self._leave = redis.register_script(_HOLD), redis.register_script(_LEAVE)

    async def hold(self) -> bool:
        """Takes or renews the lease; returns False if another has it, or Redis is away."""
        try:
            return await self._ask() != ANOTHERS
        except (RedisError, OSError):
            return False

    @property
    def is_sure(self) -> bool:
        """Returns whether nobody else can have the lease by now, without asking: this process may have stood still
        since ``hold``, or waited for Redis.
        """
        return asyncio.get_running_loop().time() < self._until

    async def leave(self) -> None:
        """Gives the lease up, so that another can have it at once."""
        try:
            await self._leave(keys=[self._key], args=[self._who])
        except (RedisError, OSError):
            return

    @asynccontextmanager
    async def turn(self, patience_s: float) -> AsyncIterator[LeaseTurn]:
        """Holds the lease while entered, and renews it; yields what tells whether nobody else has had it since.

        Raises TimeoutError if others have it for ``patience_s`` seconds; RedisError or OSError if Redis is away.
        """
        self._who = f"{self._holder} {next(self._turns)}"
        await self._take_within(patience_s)
        turn = LeaseTurn(self, self._who)
        try:
            async with beside(partial(self._renew, turn), "lease"):
                yield turn
        finally:
            await self.leave()

    async def _take_within(self, patience_s: float) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + patience_s
        try:
            while await self._ask() == ANOTHERS:
                if loop.time() >= until:
                    raise TimeoutError
                await asyncio.sleep(ASK_AGAIN_S)
        except asyncio.CancelledError:  # Redis may have given it meanwhile, and others would wait until it ends
            await self.leave()
            raise

    async def _renew(self, turn: LeaseTurn) -> None:
        while True:
            await asyncio.sleep(self._ms / 1000 / RENEWALS)
            with contextlib.suppress(RedisError, OSError):
                turn.renewed(await self._ask())
            heed_cancel()

    async def _ask(self) -> int:
        """Tries to hold the lease; returns ANOTHERS, TAKEN or RENEWED. Raises RedisError and OSError."""
        asked = asyncio.get_running_loop().time()  # Redis counts from later on
        became = int(await self._hold(keys=[self._key], args=[self._who, self._ms]))
        self._until = asked + self._ms / 1000 if became != ANOTHERS else float("-inf")
        return became
