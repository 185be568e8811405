"""The end of an engine process, as its I/O process arranges it."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from baton.kv.memory.host_pages import PageMemory
from baton.protos.channel import Shutdown
from baton.protos.errors import ConfigError
from baton.worker.engine_process import EngineProcess
from tests.kv.transport.cards import Shared, known, take_card


class Channel:
    """Hears what the engine is told, and how much of the card's memory this process has by then."""

    def __init__(self) -> None:
        self.told: list[tuple[type, int]] = []

    def send(self, message: object) -> None:
        self.told.append((type(message), known()))

    def close(self) -> None:
        pass


def engine(memory: PageMemory) -> tuple[EngineProcess, Channel]:
    channel: Any = Channel()
    found = EngineProcess(subprocess.Popen([sys.executable, "-S", "-c", ""]), channel)
    found.memory = memory
    return found, channel


def test_the_engines_memory_on_a_card_is_closed_before_it_is_told_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    card, memory = take_card(monkeypatch), PageMemory.create(2, 4096)
    shared = Shared(card, memory)
    before = known()
    leaving, channel = engine(memory)
    leaving.leave(60)
    card.free(shared.at)
    assert channel.told == [(Shutdown, before - 1)]
    assert memory.device is None


def test_a_card_that_fails_meanwhile_keeps_no_engine_from_ending(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def close(self) -> None:
            raise ConfigError("cuStreamSynchronize: an illegal address", "worker.kv_transport")

    memory: Any = PageMemory.create(2, 4096)
    memory.device = Broken()
    leaving, channel = engine(memory)
    leaving.leave(60)
    assert [message for message, _ in channel.told] == [Shutdown]
    assert "could not be closed: cuStreamSynchronize" in caplog.text
