"""The local channel between a worker's two processes, over a real socket pair."""

from __future__ import annotations

import asyncio
import fcntl
import os
import resource
import socket
import sys
import threading
import time

import pytest

from baton.kv.memory.host_pages import PageMemory
from baton.protos.channel import (
    Admit,
    BlocksReady,
    Cancel,
    Committed,
    EngineFailed,
    Output,
    Prefill,
    ShipBlock,
    Tokens,
)
from baton.protos.errors import ErrorInfo
from baton.protos.nouns import EngineRequest, Sampling, TokenLogprob, TokenLogprobs, TokenRun
from baton.worker.channel import EngineChannel, IoChannel, recv_fd, send_fd


async def pair() -> tuple[EngineChannel, IoChannel]:
    engine, io = socket.socketpair()
    return EngineChannel(engine), await IoChannel.open(io)


async def test_messages_arrive_as_they_were_sent_both_ways() -> None:
    engine, io = await pair()
    request = EngineRequest(
        "r", (1, 2, 3), 2, Sampling(logit_bias={5: -1.5}, stop_token_ids=(9,)), tenant_salt=b"\x00"
    )
    asked = [Admit(1, request, True, 2.5), Prefill(2, request, 3, (4, 5)), Cancel(3, "client_gone")]
    run = TokenRun(0, (7,), (TokenLogprobs(TokenLogprob(7, -0.5, 1)),), "stop", 7)
    told = [Tokens(1, (Output(1, run, 16),)), BlocksReady(2, (ShipBlock(0, 9, b"h" * 32, 16),)), Committed(1, 1)]
    for message in asked:
        io.send(message)
    for message in told:
        engine.send(message)
    assert engine.poll(1.0) == asked
    assert [await io.receive() for _ in told] == told
    io.close()
    engine.close()


async def test_a_sender_never_waits_for_a_slow_reader() -> None:
    engine, io = await pair()
    big = Prefill(0, EngineRequest("r", tuple(range(100_000)), 100_000, Sampling()), 0, ())
    for _ in range(20):  # whoever waited would wait for ever: nobody reads yet
        io.send(big)
        engine.send(EngineFailed(ErrorInfo("BatonError", "x" * 300_000)))
    got: list[object] = []
    while len(got) < 20:
        got += engine.poll(0.0)
        await asyncio.sleep(0)
    assert got == [big] * 20
    for _ in range(20):
        receiving = asyncio.ensure_future(io.receive())
        while not receiving.done():
            engine.flush()
            await asyncio.sleep(0)
        assert isinstance(receiving.result(), EngineFailed)
    io.close()
    engine.close()


async def test_what_was_said_before_the_end_is_still_heard() -> None:
    engine, io = await pair()
    for key in range(3):
        engine.send(Committed(key, 1))
    engine.close()
    assert [message.key async for message in io] == [0, 1, 2]
    with pytest.raises(EOFError):
        await io.receive()
    assert io.closed
    io.send(Cancel(1, "too late"))
    io.close()


async def test_the_engine_hears_the_io_process_go() -> None:
    engine, io = await pair()
    io.send(Cancel(1, "x"))
    io.close()
    assert engine.poll(None) == [Cancel(1, "x")]
    with pytest.raises(EOFError):
        engine.poll(None)
    engine.send(Committed(1, 1))
    assert engine.closed
    engine.close()


async def test_an_idle_poll_waits_as_long_as_asked_and_no_longer() -> None:
    engine, io = await pair()
    began = time.monotonic()
    assert engine.poll(0.05) == []
    assert time.monotonic() - began > 0.04
    timer = threading.Timer(0.05, os.write, (io._sock.fileno(), b"\x03\x00\x00\x00"))
    timer.start()
    assert engine.poll(0.2) == [], "half a message is no message"
    timer.join()
    io.close()
    engine.close()


async def test_a_waiting_poll_keeps_writing_what_is_left_over() -> None:
    engine, io = await pair()
    for _ in range(20):
        engine.send(EngineFailed(ErrorInfo("BatonError", "x" * 300_000)))
    polling = threading.Thread(target=engine.poll, args=(None,))
    polling.start()
    for _ in range(20):
        assert isinstance(await asyncio.wait_for(io.receive(), 30), EngineFailed)
    io.send(Cancel(1, "x"))
    await asyncio.to_thread(polling.join, 30)
    assert not polling.is_alive()
    io.close()
    engine.close()


async def test_the_pages_travel_as_the_first_thing() -> None:
    engine, io = await pair()
    memory = PageMemory.create(2, 64)
    memory.page(1)[:] = b"k" * 64
    engine.send_fd(memory.fd)
    engine.send(Committed(1, 1))
    fd = await io.receive_fd()
    assert fd is not None
    assert bytes(PageMemory.attach(fd, 2, 64).page(1)) == b"k" * 64
    assert await io.receive() == Committed(1, 1)
    io.close()
    engine.close()


async def test_an_engine_that_fails_first_sends_no_pages() -> None:
    engine, io = await pair()
    failure = EngineFailed(ErrorInfo("CheckpointError", "model.safetensors is truncated"))
    engine.send(failure)
    assert await io.receive_fd() is None
    assert await io.receive() == failure
    io.close()
    engine.close()


def test_a_blocking_reader_gets_the_fd_or_hears_why_not() -> None:
    ours, theirs = socket.socketpair()
    with pytest.raises(TimeoutError):
        recv_fd(ours, 0.01)
    memory = PageMemory.create(1, 64)
    send_fd(theirs, memory.fd)
    fd = recv_fd(ours)
    assert fd is not None
    assert os.fstat(fd).st_size == 64
    EngineChannel(theirs).send(Committed(1, 1))
    assert recv_fd(ours) is None
    ours.recv(1000)
    theirs.close()
    with pytest.raises(EOFError):
        recv_fd(ours)


def test_a_reader_waits_on_descriptors_of_any_number() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2_000), hard))
    ours, theirs = socket.socketpair()
    high = socket.socket(fileno=fcntl.fcntl(ours.detach(), fcntl.F_DUPFD_CLOEXEC, 1_500))
    with theirs, high, pytest.raises(TimeoutError):
        recv_fd(high, 0.01)


ENGINE = """
import socket, sys
from baton.worker.channel import EngineChannel
from baton.kv.memory.host_pages import PageMemory
from baton.protos.channel import Committed
channel = EngineChannel(socket.socket(fileno=int(sys.argv[1])))
memory = PageMemory.create(2, 4096)
channel.send_fd(memory.fd)
try:
    while True:
        for message in channel.poll(None):
            memory.page(1)[:8] = message.key.to_bytes(8, "little")
            channel.send(Committed(message.key, 1))
except EOFError:
    sys.exit(7)
"""


async def test_a_real_engine_process_shares_pages_and_ends_with_its_parent() -> None:
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-c", ENGINE, str(theirs.fileno())]
    process = await asyncio.create_subprocess_exec(*command, pass_fds=[theirs.fileno()])
    theirs.close()
    io = await IoChannel.open(ours)
    fd = await asyncio.wait_for(io.receive_fd(), 20)
    assert fd is not None
    memory = PageMemory.attach(fd, 2, 4096)
    for key in range(100):
        io.send(Cancel(key, "x"))
        assert await io.receive() == Committed(key, 1)
        assert int.from_bytes(memory.page(1)[:8], "little") == key
    io.close()
    assert await asyncio.wait_for(process.wait(), 30) == 7
