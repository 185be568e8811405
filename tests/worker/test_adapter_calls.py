"""Tests what an I/O process asks of its engine's adapters: answers by ticket, also across roles, and after its
end.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from baton.protos import channel as ch
from baton.protos.errors import WorkerLost
from baton.protos.nouns import AdapterInfo, AdapterLimits
from baton.worker.adapter_calls import AdapterCalls

LIMITS = AdapterLimits(4, 1 << 20, 8, "/adapters")


def info(name: str) -> AdapterInfo:
    return AdapterInfo(f"{name}@{'0' * 16}", f"/adapters/{name}", 8, 64)


async def test_an_answer_to_the_role_before_is_not_taken_for_this_ones() -> None:
    sent: list[Any] = []
    tickets = itertools.count(1)
    before, now = (AdapterCalls(sent.append, LIMITS, lambda _: None, tickets) for _ in range(2))
    old = asyncio.ensure_future(before.load("sql", "sql", "", False))
    await asyncio.sleep(0)
    old.cancel()  # with the role's server
    new = asyncio.ensure_future(now.load("style", "style", "", False))
    await asyncio.sleep(0)
    now.take(ch.AdapterIs(sent[0].ticket, info("sql")))
    now.take(ch.AdapterIs(sent[1].ticket, info("style")))
    assert (await new).id == info("style").id


async def test_what_is_asked_after_the_engines_end_fails_at_once() -> None:
    calls = AdapterCalls(lambda _: None, LIMITS, lambda _: None, itertools.count(1))
    calls.lost(WorkerLost("the engine died"))
    with pytest.raises(WorkerLost, match="the engine died"):
        await asyncio.wait_for(calls.held(), 30)
