"""An engine's pages on a card, opened by its I/O process: or a refusal by name, and what the card copies."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from baton.kv.memory import copying
from baton.kv.memory.cuda_driver import Driver
from baton.kv.memory.device_pages import open_pages, opened_or_none
from baton.kv.memory.host_pages import PageMemory
from baton.protos.errors import ConfigError
from baton.protos.measurements import SharedPages
from tests.kv.transport.cards import Shared, take_card
from tests.kv.transport.rigs import stand_in_driver


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return take_card(monkeypatch)


@pytest.mark.parametrize(
    ("change", "says", "field"),
    [
        ({"card": "09" * 16}, "the engine is on card 0909.*this process sees 0707", "worker.device"),
        ({"size": 4096}, "the engine shares 4096 bytes of its card for pages of", "device_pages"),
        ({"handle": b"/gone" + bytes(59)}, "cuIpcOpenMemHandle", "worker.kv_transport"),
    ],
)
def test_pages_that_cannot_be_opened_are_refused_by_field_and_the_log_says_it(
    card: Driver, change: dict[str, Any], says: str, field: str, caplog: pytest.LogCaptureFixture
) -> None:
    memory = PageMemory.create(2, 4096)
    shared = SharedPages(**{"card": card.card, "handle": bytes(64), "size": 8192} | change)
    with pytest.raises(ConfigError, match=says) as refusal:
        open_pages(shared, memory.view())
    assert refusal.value.param == field
    assert opened_or_none(shared, memory.view()) is None
    assert "KV leaves by the host's pages, not from the card" in caplog.text


def test_pages_that_cannot_be_pinned_are_used_and_the_log_says_it(
    card: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    stand_in = ctypes.CDLL(stand_in_driver())
    stand_in.stand_in_cannot_pin(1)
    try:
        Shared(card, PageMemory.create(2, 4096)).close()
    finally:
        stand_in.stand_in_cannot_pin(0)
    assert "the pages are not pinned" in caplog.text


async def test_short_blocks_and_places_elsewhere_are_no_work_for_the_card(card: Driver) -> None:
    memory = PageMemory.create(4, 4096)
    engine = Shared(card, memory)
    pages = engine.pages
    assert pages.twin(memory.page(3)) == pages.at + 3 * 4096
    assert pages.twin(memoryview(bytearray(4096))) is None
    assert not pages.takes(240)
    with pytest.raises(ValueError, match="no work for the card"):
        pages.copier.start([1], [2], 240)
    data = copying.address(memoryview(bytearray(b"x" * 300)))
    assert await pages.copier.start([pages.at], [data], 300)
    engine.close()
