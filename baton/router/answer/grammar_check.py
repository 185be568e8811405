"""Checks grammars before dispatch: each is compiled once, in a child process, against a byte vocabulary.

Knows nothing of requests or of how clients ask for a form. Verdicts are cached per tenant, so that nobody learns
from the time of an answer which grammars others use; tenants take turns, so that nobody waits for another's.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from baton.grammars.limits import COMPILING, RESTARTS, ProcessBounds
from baton.grammars.messages import Compile, CompileResult, TokenizerSpec, compile_of
from baton.grammars.server import ForkedGrammar, server_for
from baton.grammars.turns import Turns
from baton.protos.errors import InvalidRequest, Overloaded, Unavailable
from baton.protos.nouns import Grammar

TENANTS_KNOWN, TENANT_KNOWN = 256, 64  # tenants whose verdicts are kept, and how many of each: 500 bytes a piece
MOST_WAITING = 64  # of one tenant
BYTES = 256  # byte values; the next id is the special token's
_SPECIAL = re.compile(r"<\[([0-9]{1,9})\]>")
GrammarVerdict = InvalidRequest | None
GrammarKey = tuple[bytes, bytes]


class GrammarCheck:
    """Compiles grammars in a child process and caches the verdicts; ``warm`` it before the first request, so that
    none waits for a process to start.
    """

    def __init__(self, bounds: ProcessBounds = ProcessBounds()) -> None:
        self._server = server_for(TokenizerSpec("", BYTES + 1, (), bounds))  # and a special token
        self._known: OrderedDict[str, OrderedDict[GrammarKey, GrammarVerdict]] = OrderedDict()
        self._turns: Turns[asyncio.Future[None]] = Turns(COMPILING)

    def warm(self) -> None:
        """Starts a process for the first grammar."""
        self._server.warm()

    async def check(self, grammar: Grammar, param: str, tenant: str = "", salt: bytes = b"") -> None:
        """Returns if ``grammar`` compiles; raises InvalidRequest, naming ``param`` and the reason, if it doesn't.

        ``tenant`` is queued fairly beside others; the verdict is cached for ``tenant`` and ``salt``. Raises
        Overloaded if MOST_WAITING of the tenant wait, Unavailable if no process starts. A cancel ends its process.
        """
        try:
            error = await self._verdict(compile_of(_over_bytes(grammar)), tenant, salt)
        except InvalidRequest as refusal:
            error = refusal
        if error is not None:
            raise InvalidRequest(f"{param}: {error.message}", param)

    async def _verdict(self, message: Compile, tenant: str, salt: bytes) -> GrammarVerdict:
        digest = hashlib.sha256(f"{message.kind}\0{message.spec}".encode()).digest()
        known = self._known.setdefault(tenant, OrderedDict())
        if (salt, digest) not in known:
            async with self._turn(tenant):
                if (salt, digest) not in known:  # nor was it found while this one waited
                    known[salt, digest] = await self._judge(message)
        verdict = known[salt, digest]
        known.move_to_end((salt, digest))
        self._known[tenant] = known
        self._known.move_to_end(tenant)
        self._forget(known)
        return verdict

    @asynccontextmanager
    async def _turn(self, tenant: str) -> AsyncIterator[None]:
        if self._turns.waiting(tenant) >= MOST_WAITING:
            raise Overloaded("too many new grammars wait for their check", retry_after_s=1.0)
        turn = asyncio.get_running_loop().create_future()
        self._turns.join(tenant, turn)
        try:
            self._begin()
            await turn
            yield
        finally:
            self._turns.leave(tenant, turn)
            self._begin()

    def _begin(self) -> None:
        while (turn := self._turns.next()) is not None:
            if not turn.done():
                turn.set_result(None)

    def _forget(self, known: OrderedDict[GrammarKey, GrammarVerdict]) -> None:
        """Forgets the verdicts that were asked for longest ago: a tenant's beyond its bound, then whole tenants."""
        while len(known) > TENANT_KNOWN:
            known.popitem(last=False)
        while len(self._known) > TENANTS_KNOWN:
            self._known.popitem(last=False)

    async def _judge(self, message: Compile) -> GrammarVerdict:
        for _ in range(RESTARTS):
            try:
                child = self._server.child()
            except OSError:  # no process or descriptor to spare
                break
            try:
                child.send(message)
                self._server.warm()
                if (said := await _heard(child)) is not None:
                    return InvalidRequest(said.error) if said.error else None
                if child.exceeded:
                    return InvalidRequest(self._server.bounds.exceeded)
            finally:
                child.kill()
        raise Unavailable("grammars can't be checked now: their process doesn't start or is killed; ask again")


def _over_bytes(grammar: Grammar) -> Grammar:
    """Returns ``grammar`` with each special token that Lark names by its id, ``<[32000]>``, as the one of the byte
    vocabulary: whether the model has that token shows in the engine.
    """
    if grammar.kind != "grammar":
        return grammar
    spec = _SPECIAL.sub(lambda found: f"<[{min(int(found[1]), BYTES)}]>", grammar.spec)
    return msgspec.structs.replace(grammar, spec=spec)


async def _heard(child: ForkedGrammar) -> CompileResult | None:
    """Returns a process's verdict; None if it ended without one."""
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(child.socket, readable.set)
    try:
        while True:
            readable.clear()
            while (message := child.receive()) is not None:
                if isinstance(message, CompileResult):
                    return message
            await readable.wait()
    except EOFError:
        return None
    finally:
        loop.remove_reader(child.socket)
