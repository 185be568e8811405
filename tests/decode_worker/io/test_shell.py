"""Tests the protobuf messages that a decode worker makes of a session's queued items, and what ends a session."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast

import grpc.aio
import pytest

from baton.decode_worker.io.router_session import RouterSession, TokenFrame
from baton.decode_worker.io.service import DecodeService
from baton.decode_worker.io.shell import DecodeShell, down_to_pb
from baton.protos import channel as ch
from baton.protos import convert
from baton.protos.nouns import Station, TokenLogprob, TokenLogprobs, TokenRun
from baton.protos.v1 import worker_pb2 as w
from baton.protos.v1 import worker_pb2_grpc as stubs
from baton.protos.version import PROTOCOL
from tests.router.fake_services import info

SCORES = (TokenLogprobs(TokenLogprob(5, -0.5, 1), (TokenLogprob(6, -1.5, 2),)),)
FULL = ch.Output(1, TokenRun(0, (7,), SCORES, "stop", 7, 1, 2), 16, (Station("prefill", 0.5),), SCORES, b"\x01\x02")
PLAIN = ch.Output(2, TokenRun(3, (8, 9)))


def test_a_frame_carries_all_that_its_outputs_have() -> None:
    sent = down_to_pb(TokenFrame(11, {"full": FULL, "plain": PLAIN})).SerializeToString()
    frame = w.SessionDown.FromString(sent).tokens
    assert frame.step == 11
    assert [read(one) for one in frame.outputs] == [("full", FULL), ("plain", PLAIN)]


def test_a_frame_without_outputs_is_still_a_frame() -> None:
    down = w.SessionDown.FromString(down_to_pb(TokenFrame(0, {})).SerializeToString())
    assert down.WhichOneof("message") == "tokens"


async def test_a_session_ends_with_a_message_that_its_router_could_not_serialize(
    caplog: pytest.LogCaptureFixture,
) -> None:
    service = cast(DecodeService, SimpleNamespace(open_session=RouterSession, close_session=lambda session: None))
    server = grpc.aio.server()
    stubs.add_DecodeWorkerServicer_to_server(DecodeShell(service, lambda: info("d0", "decode")), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = stubs.DecodeWorkerStub(channel).Session()
        await call.write(w.SessionUp(hello=w.Hello(router_id="r", protocol=PROTOCOL)))
        assert (await call.read()).HasField("welcome")
        await call.write(object())  # as where there is no memory for it: grpc.aio sends an empty message
        async with asyncio.timeout(20):
            assert await call.read() is grpc.aio.EOF
    await server.stop(0)
    assert "router r sent a message without content" in caplog.text


def read(pb: w.RequestTokens) -> tuple[str, ch.Output]:
    scores = tuple(map(convert.logprobs_from_pb, pb.prompt_logprobs))
    stations = convert.stations_from_pb(pb.stations)
    run, key = convert.run_from_pb(pb.run), 1 if pb.request_id == "full" else 2
    return pb.request_id, ch.Output(key, run, pb.cached_tokens, stations, scores, pb.pooled)
