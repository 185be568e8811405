"""nccl where an engine shares its pages on a card: staging lies there, and kernels fill and empty it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from baton.engine import mover
from baton.kernels.cuda.library import SIMT_ENV
from baton.kv.cuda_driver import Driver
from baton.kv.transport import channels, nccl
from baton.kv.transport.moving import MoverClient
from baton.protos.errors import ConfigError
from baton.protos.nouns import SharedPages
from tests.kv.transport.cards import Cards, known, take_card
from tests.kv.transport.rigs import Rig, stand_in_driver
from tests.kv.transport.test_handoffs import BLOCKS


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return take_card(monkeypatch)


async def test_by_nccl_a_channels_staging_lies_on_the_card(
    card: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mover is a process of its own; what it moves here is the stand-in's memory, over gloo."""
    (tmp_path / "libcuda.so.1").symlink_to(stand_in_driver())
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setenv(SIMT_ENV, "1")
    monkeypatch.setattr(channels, "LINGER_S", 0.0)
    pair, client = Cards(card), MoverClient()
    server, address = nccl.listen("127.0.0.1", pair.intake.accept, client, pair.memory.device)
    pair.rig = Rig(nccl.NcclTransport(pair.source, client), address, asyncio.Event().wait)
    for resident in (set(range(BLOCKS)), set(), {1, 5, 6}):
        pair.admit()
        pair.resident = resident
        await asyncio.wait_for(pair.handed(), 60)
        want = [
            pair.ours.page(page) if len(resident) == BLOCKS else bytes(pair.source.page(page))
            for page in pair.order
        ]
        assert pair.landed() == pair.arrived() == want
        assert pair.said_resident() == set(range(BLOCKS))
        await pair.end()
    await pair.rig.transport.close()
    server.close()
    await asyncio.sleep(0.05)
    pair.ours.close()
    pair.theirs.close()
    assert known() == 0


def test_a_mover_without_nccl_refuses_staging_on_a_card_by_name(
    card: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SIMT_ENV, raising=False)
    with pytest.raises(ConfigError, match=r"blocks on a card go by NCCL, and this torch has no") as refusal:
        mover.card(SharedPages(card.card, bytes(64), 1))
    assert refusal.value.param == "worker.kv_transport"
    monkeypatch.setenv(SIMT_ENV, "1")
    with pytest.raises(ConfigError, match=r"staging is on card 0909.*this process sees 0707"):
        mover.card(SharedPages("09" * 16, bytes(64), 1))
    assert mover.card(SharedPages(card.card, bytes(64), 1)) is card
