"""Values in Redis that stay when it restarts empty: whoever read them last tells it again.

Knows nothing of what they are. A sign beside them, which is there from the first one that was written, tells values
that were lost from values that were taken back.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence

from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from redis.exceptions import WatchError

log = logging.getLogger("baton.cluster")
Answers = Sequence[object]  # of the reads, one each


class KeptValues:
    """Reads the values that ``read`` asks a pipeline for, and has ``write`` write those that were read last again
    where Redis has lost them. ``what`` says in words what they are.

    Whoever writes one calls ``sign`` in the same transaction.
    """

    def __init__(
        self,
        redis: Redis,
        sign: str,
        what: str,
        read: Callable[[Pipeline], object],
        write: Callable[[Pipeline, Answers], object],
    ) -> None:
        self._redis, self._sign, self._what, self._read, self._write = redis, sign, what, read, write
        self._known: Answers | None = None  # as read last; None without the sign, as earlier versions write them

    def sign(self, pipe: Pipeline) -> None:
        """Has the transaction ``pipe`` write the sign."""
        pipe.set(self._sign, "1")

    async def all(self) -> Answers:
        """Returns the answers to what ``read`` asks for. Raises RedisError and OSError."""
        is_signed, *found = await self._look()
        if not is_signed and self._known is not None:
            await self._tell_again(self._known)
            is_signed, *found = await self._look()
        self._known = found if is_signed else None
        return found

    async def _look(self) -> list[object]:
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.exists(self._sign)
            self._read(pipe)
            return await pipe.execute()

    async def _tell_again(self, known: Answers) -> None:
        """Writes what is ``known``, unless somebody else has done so, or has written something new, meanwhile."""
        async with self._redis.pipeline(transaction=True) as pipe:
            await pipe.watch(self._sign)
            if await pipe.exists(self._sign):
                return
            pipe.multi()
            self.sign(pipe)
            self._write(pipe, known)
            with contextlib.suppress(WatchError):
                await pipe.execute()
                log.warning("Redis lost %s: they stay as they were", self._what)
