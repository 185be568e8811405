"""Tests that a decode worker lost with very many requests on it holds the router's loop for a moment only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from baton.process.turns import A_TURN
from baton.protos.errors import BatonError, Draining, WorkerLost
from baton.protos.v1 import worker_pb2 as w
from baton.router.workers.decode_session import DecodeLease, DecodeSession

COUNT = 2 * A_TURN + 7


@pytest.mark.parametrize(
    ("end", "error", "cancels"),
    [
        (DecodeSession.lose, WorkerLost("gone"), 0),
        (DecodeSession.move_away, Draining("it leaves"), COUNT - 1),
    ],
)
async def test_leases_end_over_several_turns_and_each_once(
    end: Callable[[DecodeSession, BatonError], object], error: BatonError, cancels: int
) -> None:
    session, ended = DecodeSession("w"), 0
    leases = [
        DecodeLease(session, w.Admit(request_id=f"r{i}"), lambda _: None, lambda: "retry") for i in range(COUNT)
    ]

    async def hold(lease: DecodeLease) -> None:
        nonlocal ended
        with pytest.raises(type(error)):
            async with lease:
                await lease.ended
        ended += 1

    holding = [asyncio.create_task(hold(lease)) for lease in leases[:-1]]
    leaving = asyncio.create_task(leases[-1].__aenter__())  # it ends while others do
    await asyncio.sleep(0)
    for lease in leases:
        session.receive(w.SessionDown(admitted=w.Admitted(request_id=lease.request_id, lease=b"l", epoch=1)))
    await leaving
    while not session.outbox.empty():
        session.outbox.get_nowait()
    await asyncio.sleep(0)
    end(session, error)
    most = 0
    leases[-1].close()
    while (before := ended) < COUNT - 1:
        await asyncio.sleep(0)
        most = max(most, ended - before)
    assert most <= A_TURN
    await asyncio.gather(*holding)
    assert leases[-1].ended.exception() is None
    sent = [session.outbox.get_nowait().cancel.request_id for _ in range(session.outbox.qsize())]
    assert len(sent) == len(set(sent)) == (cancels + 1 if cancels else 0)
