"""Card to card is chosen where both engines share their pages on one card, and what was chosen says why."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from baton.kv.memory.cuda_driver import Driver
from baton.kv.transport import cuda_ipc
from tests.kv.transport.auto_house import LAYOUT, House, house, used
from tests.kv.transport.cards import Shared, take_card

__all__ = ["house"]


@pytest.fixture
async def card(
    monkeypatch: pytest.MonkeyPatch, house: House, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> AsyncIterator[Driver]:
    """Both workers of the house have their pages on the stand-in card, and the decode worker takes cuda_ipc."""
    caplog.set_level(logging.INFO)
    found = take_card(monkeypatch)
    ours, theirs = Shared(found, house.memory), Shared(found, house.intake.memory)
    server, house.addresses["cuda_ipc"] = cuda_ipc.listen(
        str(tmp_path / "gpu"), house.intake.accept, house.intake.memory.device
    )
    yield found
    server.close()
    ours.close()
    theirs.close()


async def test_two_engines_on_one_card_hand_over_there(
    card: Driver, house: House, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    copier, launched = house.memory.device.copier, list[int]()
    start = copier.start
    monkeypatch.setattr(copier, "start", lambda to, *rest: (launched.append(len(to)), start(to, *rest))[1])
    auto = house.auto()
    assert await used(house, auto) == "cuda_ipc"
    link, reason = house.links[-1]
    assert (link.fallback, reason) == ("", "")
    assert len(launched) > 8, "the preflight goes the way that blocks will: packed and scattered by the card"
    assert f"goes by cuda_ipc: both engines share their pages on card {card.card[:8]}" in caplog.text
    await auto.close()


async def test_a_receiver_that_shares_nothing_is_reached_from_the_hosts_pages_and_that_is_said(
    card: Driver, house: House
) -> None:
    del house.addresses["cuda_ipc"]
    auto = house.auto()
    assert await used(house, auto) == "shm"
    link, reason = house.links[-1]
    assert reason == ""
    assert link.fallback == (
        "from the host's pages, because its engine shares none on a card (no cuda_ipc in data_addresses)"
    )
    await auto.close()


async def test_a_sender_that_shares_nothing_does_not_take_the_card(card: Driver, house: House) -> None:
    house.memory.device = None
    auto = house.auto()
    assert await used(house, auto) == "shm"
    assert house.links[-1][0].fallback == ""
    await auto.close()


async def test_two_cards_are_no_one_card(card: Driver, house: House) -> None:
    house.addresses["cuda_ipc"] = "/nowhere#" + "08" * 16
    auto = house.auto()
    assert await used(house, auto) == "shm"
    assert house.links[-1][0].fallback == (
        "from the host's pages, because ours are on card 07070707 and theirs on 08080808"
    )
    await auto.close()


async def test_a_receiver_whose_blocks_are_too_large_for_it_is_not_reached_by_the_card(
    card: Driver, house: House
) -> None:
    layout = msgspec.structs.replace(LAYOUT, page_bytes=(8 << 20) + 1)
    house.info = msgspec.structs.replace(house.info, layout=layout)
    auto = house.auto()
    assert await used(house, auto) == "shm"
    size = layout.page_bytes
    assert (
        house.links[-1][0].fallback
        == f"from the host's pages, because a block of its {size} bytes doesn't go at once"
    )
    await auto.close()


async def test_on_another_host_a_card_of_the_same_name_is_not_asked(card: Driver, house: House) -> None:
    auto = house.auto(host="there")
    assert await used(house, auto) == "tcp"
    await auto.close()


async def test_a_card_that_fails_its_preflight_is_left_aloud(
    card: Driver, house: House, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    house.addresses["cuda_ipc"] = f"{tmp_path}/gone#{card.card}"
    auto = house.auto()
    assert await used(house, auto) == "shm"
    link, reason = house.links[-1]
    assert reason == "failed"
    assert link.fallback.startswith("cuda_ipc failed: nobody answers at")
    await auto.close()
