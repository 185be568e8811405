"""Handoffs on a card that end early, by the receiver or by the card: nothing is written from then on."""

from __future__ import annotations

import asyncio

import pytest

from baton.kv.transport.cuda_ipc import CudaIpcTransport
from baton.kv.transport.fetching import IpcSession
from baton.protos.channel import BlocksReceived, ReceiveClosed
from baton.protos.errors import ConfigError, WorkerLost
from tests.kv.transport.cards import Cards, LateCopies
from tests.kv.transport.test_card_to_card import card, pair
from tests.kv.transport.test_handoffs import BLOCKS, LAYOUT, error_of, until

__all__ = ["card", "pair"]


async def aborted(pair: Cards, monkeypatch: pytest.MonkeyPatch) -> tuple[bytes, bytes]:
    """The lease ends while the card still copies; its page is another's at once. What lies there, card and host."""
    late = LateCopies(pair.theirs._cuda, monkeypatch)
    transport = CudaIpcTransport()  # whose blocks come from the host: the receiver alone launches
    stream = await transport.connect(pair.rig.address)
    await stream.send(pair.opening())
    await stream.send(*pair.frame(0))
    await until(lambda: bool(late.launched))
    page = pair.lease.pages[0]
    pair.intake.close(1)
    assert any(isinstance(said, ReceiveClosed) for said in pair.told)
    pair.theirs.write(page, b"N" * LAYOUT.page_bytes)  # of the page's next owner
    pair.memory.page(page)[:] = b"N" * LAYOUT.page_bytes
    late.let()
    await until(lambda: late.ran == 1)
    await error_of(stream)
    await transport.close()
    await asyncio.sleep(0.02)
    assert not any(isinstance(said, BlocksReceived) for said in pair.told)
    return pair.theirs.page(page), bytes(pair.memory.page(page))


async def test_a_stream_that_was_ended_writes_nothing_after(pair: Cards, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await aborted(pair, monkeypatch) == (b"N" * LAYOUT.page_bytes,) * 2
    await pair.end()


async def test_the_planted_bug_that_does_not_wait_for_the_card_is_caught(
    pair: Cards, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle = IpcSession._settle
    monkeypatch.setattr(IpcSession, "_settle", lambda session: None)
    on_card, on_host = await aborted(pair, monkeypatch)
    assert b"N" * LAYOUT.page_bytes not in (on_card, on_host)
    monkeypatch.setattr(IpcSession, "_settle", settle)
    await pair.end()


@pytest.mark.parametrize("when", ["at the launch", "later"])
async def test_a_card_that_fails_breaks_the_stream_and_the_log_says_why(
    pair: Cards, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, when: str
) -> None:
    """So that the sender measures its ways anew, and finds another."""

    def broken(event: int) -> None:
        raise ConfigError("worker.kv_transport cuda_ipc: cuEventSynchronize: an illegal address (700)")

    if when == "later":
        monkeypatch.setattr(pair.theirs._cuda, "wait_for", broken)
    else:
        monkeypatch.setattr(pair.theirs.pages.copier, "_copy", lambda *arguments: 700)
    transport = CudaIpcTransport()
    stream = await transport.connect(pair.rig.address)
    await stream.send(pair.opening())
    await stream.send(*pair.frame(0))
    await stream.receive()  # to OPEN
    with pytest.raises(WorkerLost):
        await asyncio.wait_for(stream.receive(), 5)
    assert "a handoff from the card's ring broke:" in caplog.text
    assert "an illegal address" in caplog.text
    assert not any(isinstance(said, BlocksReceived) for said in pair.told)
    await transport.close()
    await pair.end()


@pytest.mark.parametrize("when", ["at the launch", "later"])
async def test_a_sender_whose_card_fails_has_lost_its_stream(
    pair: Cards, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    def broken(event: int) -> None:
        raise ConfigError("worker.kv_transport cuda_ipc: cuEventSynchronize: an illegal address (700)")

    if when == "later":
        monkeypatch.setattr(pair.ours._cuda, "wait_for", broken)
    else:
        monkeypatch.setattr(pair.ours.pages.copier, "_copy", lambda *arguments: 700)
    monkeypatch.setattr("baton.prefill_worker.handoff.LAST_WORDS_S", 0.0)
    handoff = pair.handoff()
    handoff.ship(pair.ship(*range(BLOCKS)))
    with pytest.raises(WorkerLost, match="an illegal address"):
        await asyncio.wait_for(handoff.run(), 10)
    await pair.end()
