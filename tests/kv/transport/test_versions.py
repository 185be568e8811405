"""Neighbouring versions of the handoff protocol: what a newer worker adds is skipped, what an older one lacks is
done without, and another meaning is refused by name before a byte of KV moves.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc.aio
import msgspec
import pytest

from baton.kv.layout.bridge import bridge
from baton.kv.layout.page import layout_for
from baton.kv.memory.host_pages import PageMemory
from baton.kv.transport import tcp
from baton.kv.transport.auto import AutoTransport
from baton.kv.transport.grpc import SERVER_OPTIONS, handoff_handler
from baton.kv.wire import control, frames
from baton.kv.wire.frames import Frame, Kind
from baton.kv.wire.preflight import LinkSpeed
from baton.kv.wire.sending import HELLO, MAGIC, VERSION
from baton.protos import convert
from baton.protos.errors import LayoutMismatch
from baton.protos.measurements import KvLink
from baton.protos.nouns import TokenRun, WorkerInfo
from baton.protos.v1 import worker_pb2
from tests.kv.transport.test_contract import Peer, answer

LAYOUT = layout_for("float32", 1, 1, 64)
OPENING = control.Opening("r", LAYOUT, "p0", 3, 5, "m", "f" * 64, "adapter")
CLOSING = control.Closing(TokenRun(0, (7,)), 16)
ADDED = bytes([0xC0, 0x3E, 0x2A])  # field 1000 = 42, which no message of ours has
FIRST_RELEASE = 15  # fields of WorkerInfo up to "protocol"


def test_what_a_newer_sender_adds_to_open_and_commit_is_skipped() -> None:
    assert control.decode_opening(control.encode_opening(OPENING) + ADDED) == OPENING
    assert control.decode_closing(control.encode_closing(CLOSING) + ADDED) == CLOSING


def test_what_an_older_sender_does_not_say_has_its_default() -> None:
    said = worker_pb2.HandoffOpen.FromString(control.encode_opening(OPENING))
    said.ClearField("adapter_id")
    assert control.decode_opening(said.SerializeToString()) == msgspec.structs.replace(OPENING, adapter_id="")


def older(info: WorkerInfo) -> WorkerInfo:
    """Returns ``info`` as a worker reports it that knows no field after the first release's."""
    said = convert.info_to_pb(info)
    for field in worker_pb2.WorkerInfo.DESCRIPTOR.fields:
        if field.number > FIRST_RELEASE:
            said.ClearField(field.name)
    return convert.info_from_pb(worker_pb2.WorkerInfo.FromString(said.SerializeToString() + ADDED))


@pytest.fixture
async def portable() -> AsyncIterator[tuple[Peer, str]]:
    peer = Peer()
    server = grpc.aio.server(options=SERVER_OPTIONS)
    server.add_generic_rpc_handlers((handoff_handler(peer.accept),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield peer, f"127.0.0.1:{port}"
    await server.stop(0)


async def test_to_a_worker_that_offers_nothing_else_kv_goes_the_portable_way(
    portable: tuple[Peer, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, address = portable
    info = WorkerInfo(
        "d", "i", "decode", address, "m", "f" * 64, LAYOUT, 64, 256, (), 4, data_addresses={"tcp": "x:1"}
    )
    told: list[tuple[KvLink, str]] = []

    async def measured(*arguments: object) -> LinkSpeed:
        return LinkSpeed(0.001, 1e9)

    async def describe(at: str) -> WorkerInfo:
        return older(info)

    monkeypatch.setattr("baton.kv.wire.preflight.measure", measured)
    auto = AutoTransport(
        PageMemory.create(1, 64), asyncio.get_running_loop().time, report=lambda *what: told.append(what),
        describe=describe,
    )  # fmt: skip
    stream = await auto.connect(address)
    await stream.send(Frame(Kind.OPEN, body=b"hello"))
    assert await answer(stream) == b"hello"
    [(link, reason)] = told
    assert (link.transport, reason) == ("grpc", "not_offered")
    await stream.close()
    await auto.close()


@pytest.mark.parametrize("version", [VERSION - 1, VERSION + 1])
async def test_a_connection_of_another_framing_gets_nothing(version: int) -> None:
    peer = Peer()
    server, address = tcp.listen("127.0.0.1", peer.accept)
    reader, writer = await asyncio.open_connection(*tcp.split(address))
    writer.write(HELLO.pack(MAGIC, version, 0, 0, bytes(16)) + frames.encode(Frame(Kind.OPEN)))
    with contextlib.suppress(ConnectionError):
        assert await reader.read(1) == b"", "it was answered"
    assert not peer.got
    writer.close()
    server.close()


def test_a_layout_of_another_meaning_or_of_no_whole_runs_is_refused_by_name() -> None:
    for field, value in (("version", 2), ("block_tokens", 24)):
        theirs = msgspec.structs.replace(LAYOUT, **{field: value})
        with pytest.raises(LayoutMismatch, match=field):
            bridge(LAYOUT, theirs)
        with pytest.raises(LayoutMismatch, match=field):
            bridge(theirs, LAYOUT)
