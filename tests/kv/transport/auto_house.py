"""Two workers that choose their transport, with every route open between them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import pytest

from baton.decode_worker.io.intake import Intake
from baton.kv.layout.page import layout_for
from baton.kv.memory import block_sums
from baton.kv.memory.host_pages import PageMemory
from baton.kv.transport import shm, tcp
from baton.kv.transport.auto import AutoTransport
from baton.kv.transport.grpc import SERVER_OPTIONS, handoff_handler
from baton.kv.wire import frames
from baton.kv.wire.base import HandoffStream
from baton.kv.wire.frames import Block, Frame, Kind
from baton.kv.wire.receiving import SocketServer
from baton.protos.measurements import KvLink
from baton.protos.nouns import WorkerInfo

LAYOUT = layout_for("float32", 1, 1, 64)


class House:
    """A decode worker with every receiver, and a prefill worker's pages."""

    def __init__(self) -> None:
        self.memory = PageMemory.create(4, LAYOUT.page_bytes)
        self.told: list[object] = []
        self.intake = Intake(PageMemory.create(4, LAYOUT.page_bytes), LAYOUT, "f" * 64, self.told.append)
        self.links: list[tuple[KvLink, str]] = []
        self.info = WorkerInfo("decode-0", "i", "decode", "", "m", "f" * 64, LAYOUT, 64, 256, (), 4, host_id="here")
        self.addresses: dict[str, str] = {}
        self.described = 0
        self.grpc = ""
        self.servers: dict[str, SocketServer] = {}
        self.now = 0.0

    async def describe(self, address: str) -> WorkerInfo:
        self.described += 1
        fields = {name: getattr(self.info, name) for name in WorkerInfo.__struct_fields__}
        return WorkerInfo(**fields | {"address": address, "data_addresses": dict(self.addresses)})

    def auto(self, wanted: str = "auto", host: str = "here") -> AutoTransport:
        report = lambda link, reason: self.links.append((link, reason))  # noqa: E731
        return AutoTransport(self.memory, time.perf_counter, wanted, report, self.describe, host)


@pytest.fixture
async def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[House]:
    monkeypatch.setattr("baton.kv.wire.verdict.MUCH_FASTER", 1e6)  # what a busy machine measures decides nothing
    made = House()
    server = grpc.aio.server(options=SERVER_OPTIONS)
    server.add_generic_rpc_handlers((handoff_handler(made.intake.accept),))
    made.grpc = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    data, made.addresses["tcp"] = tcp.listen("127.0.0.1", made.intake.accept)
    local, made.addresses["shm"] = shm.listen(str(tmp_path / "kv"), made.intake.accept)
    made.servers = {"tcp": data, "shm": local}
    yield made
    data.close()
    local.close()
    await server.stop(0)


async def used(house: House, auto: AutoTransport) -> str:
    """The transport of a new stream, after it carried something."""
    stream = await auto.connect(house.grpc)
    await probe(stream, house)
    await stream.close()
    return house.links[-1][0].transport


async def probe(stream: HandoffStream, house: House) -> None:
    page = house.memory.page(1)
    block = Block(1, frames.NO_HASH, block_sums.checksum(page))
    await stream.send(Frame(Kind.PROBE, unit=len(page), blocks=(block,), offsets=(len(page),)), [page])
    reply = await asyncio.wait_for(stream.receive(), 30)
    assert reply is not None
    assert frames.decode(reply).kind is Kind.ACK
