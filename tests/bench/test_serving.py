"""The load client that servers are compared by: what it counts, and that it stops at a failure."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator

import pytest

from bench.peers import vllm_servers
from bench.serving import client
from bench.serving.client import ClientTimes, Event, ServingLoad, answered, body_of, completions, run
from bench.serving.comparison import FIRST, GAP, RATE, rows

LOAD = ServingLoad(3, 20, 4)


async def steady(prompt: list[int], tokens: int) -> AsyncIterator[Event]:
    for _ in range(tokens // 2):
        await asyncio.sleep(0.001)
        yield time.monotonic(), 2


async def test_a_window_counts_tokens_first_tokens_gaps_and_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "LATE", 1000)  # a busy machine may take long for an answer each
    seen = await run(steady, LOAD, 0.05, "seed")
    assert seen.answers >= LOAD.clients
    assert seen.tokens >= 4 * (seen.answers - LOAD.clients)
    assert seen.seconds >= 0.05
    assert 0.001 <= seen.gap <= seen.seconds
    assert 0.001 <= seen.first <= seen.seconds
    assert seen.rate == seen.tokens / seen.seconds


async def test_a_request_that_fails_ends_the_run_with_its_reason() -> None:
    async def fails(prompt: list[int], tokens: int) -> AsyncIterator[Event]:
        yield time.monotonic(), 1
        raise ValueError("planted")

    with pytest.raises(RuntimeError, match="a request failed") as raised:
        await run(fails, LOAD, 30.0, "seed")
    assert str(raised.value.__cause__) == "planted"


async def test_answers_are_read_over_http_and_a_refusal_says_why() -> None:
    events = b'data: {"choices":[{"token_ids":[5,6]}]}\n\ndata: {"choices":[],"usage":{}}\n\ndata: [DONE]\n\n'
    replies = [
        b"HTTP/1.1 200 OK\r\n\r\n" + events,
        b'HTTP/1.1 200 OK\r\ncontent-length: 7\r\n\r\n{"a":1}',
        b'HTTP/1.1 200 OK\r\n\r\ndata: {"choices":[{"token_ids":[5]}]}\n\n',
        b"HTTP/1.1 400 Bad\r\n\r\nno such model",
    ]

    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(replies.pop(0))
        writer.close()

    async with await asyncio.start_server(reply, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        assert [tokens async for _, tokens in completions(port, "m")([1, 2], 2)] == [2]
        assert await answered(port, body_of("m", [1], 1)) == {"a": 1}
        with pytest.raises(RuntimeError, match="broke off"):
            assert [tokens async for _, tokens in completions(port, "m")([1, 2], 2)]
        with pytest.raises(RuntimeError, match="no such model"):
            await answered(port, body_of("m", [1], 1))


async def test_a_request_to_a_split_pair_takes_what_the_reader_kept_to_the_writer() -> None:
    heard: list[dict[str, object]] = []
    replies = [
        json.dumps({"kv_transfer_params": {"block": 7}}).encode(),
        b'data: {"choices":[{"token_ids":[5]}]}\n\ndata: [DONE]\n\n',
    ]

    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        heard.append(json.loads(await reader.readexactly(size)))
        body = replies.pop(0)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        writer.close()

    async with await asyncio.start_server(reply, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        assert [tokens async for _, tokens in vllm_servers.through_both(port, port)([1, 2], 9)] == [1]
    first, then = heard
    assert (first["max_tokens"], first["stream"], then["max_tokens"], then["stream"]) == (1, False, 9, True)
    assert first["kv_transfer_params"] == vllm_servers.FETCH
    assert then["kv_transfer_params"] == {"block": 7}


async def test_a_server_that_is_busy_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "AGAIN_S", 0.0)
    replies = [b"HTTP/1.1 503 Busy\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"]

    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(replies.pop(0))
        writer.close()

    async with await asyncio.start_server(reply, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        assert await answered(port, body_of("m", [1], 1)) == {}


def test_a_ratio_says_how_many_times_better_it_is() -> None:
    fast, slow = ClientTimes(1.0, 20, 1, [0.1], [0.01]), ClientTimes(1.0, 10, 1, [0.3], [0.04])
    found = list(rows(LOAD, {"a": [fast], "b": [slow]}, "a", "b", ((RATE, 1.5), (GAP, 2.0), (FIRST, 0.0))))
    assert [round(row.ratio, 3) for row in found] == [2.0, 4.0, 3.0]
    assert [row.reached for row in found] == [True, True, None]
