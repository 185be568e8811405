"""gRPC in memory means what gRPC means: statuses, metadata, deadlines, cancellation, order, broken connections."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import grpc
import grpc.aio
import pytest

from baton.drill.loop import NothingLeft, SeededLoop
from baton.drill.machines import memory
from baton.drill.machines.network import KEEPALIVE_S, Network
from baton.drill.machines.process import Process, owning_factory
from baton.drill.rpc.client import Channel
from baton.drill.rpc.server import Server
from baton.drill.rpc.stream import EOF
from baton.protos.errors import PoolExhausted
from baton.protos.rpc import abort
from baton.router.workers.call_errors import attached_error

T = TypeVar("T")


class Echo:
    """Handlers of a small service."""

    def __init__(self) -> None:
        self.cancelled = 0
        self.heard: list[bytes] = []

    async def one(self, request: bytes, context: Any) -> bytes:
        if request == b"full":
            await abort(context, PoolExhausted("no page"))
        if request == b"slow":
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        if request == b"bad":
            raise ValueError("a bug")
        return request.upper()

    async def many(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            self.heard.append(request)
            yield request * 2

    def service(self, details: Any) -> Any:
        if details.method == "/echo/One":
            return grpc.unary_unary_rpc_method_handler(self.one)
        return grpc.stream_stream_rpc_method_handler(self.many) if details.method == "/echo/Many" else None


def simulated(work: Callable[[Network, Echo, Channel], Awaitable[T]], seed: int = 1) -> T:
    """Runs ``work`` beside a process that serves Echo."""
    loop = SeededLoop(random.Random(seed))
    loop.set_task_factory(owning_factory)
    loop.set_exception_handler(lambda loop, context: None)

    async def main() -> T:
        network, echo = Network(random.Random(seed)), Echo()
        server = Server(Process("server").spawn)
        server.add_generic_rpc_handlers((echo,))
        network.listen("server:1", "server", server)
        done = await work(network, echo, Channel(network, "client", "server:1"))
        await asyncio.sleep(1.0)  # until both ends have heard of what the client ended
        return done

    try:
        return loop.run_until_complete(main())
    finally:
        loop.close()


def test_a_unary_call_answers_and_a_typed_error_arrives_whole() -> None:
    async def work(network: Network, echo: Echo, channel: Channel) -> None:
        one = channel.unary_unary("/echo/One")
        assert await one(b"a") == b"A"
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await one(b"full")
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert isinstance(attached_error(refused.value), PoolExhausted)
        with pytest.raises(grpc.aio.AioRpcError) as broken:
            await one(b"bad")
        assert broken.value.code() is grpc.StatusCode.UNKNOWN

    simulated(work)


def test_a_deadline_ends_the_call_at_both_ends() -> None:
    async def work(network: Network, echo: Echo, channel: Channel) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as late:
            await channel.unary_unary("/echo/One")(b"slow", timeout=1.0)
        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await asyncio.sleep(0.1)
        assert echo.cancelled == 1

    simulated(work)


def test_cancelling_who_awaits_cancels_the_call_and_its_handler() -> None:
    async def work(network: Network, echo: Echo, channel: Channel) -> None:
        async def ask() -> bytes:
            return await channel.unary_unary("/echo/One")(b"slow")

        task = asyncio.ensure_future(ask())
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.1)
        assert echo.cancelled == 1

    simulated(work)


@pytest.mark.parametrize("seed", range(5))
def test_a_streams_messages_keep_their_order_and_end(seed: int) -> None:
    async def work(network: Network, echo: Echo, channel: Channel) -> None:
        call = channel.stream_stream("/echo/Many")()
        for number in range(40):
            await call.write(b"%d" % number)
        await call.done_writing()
        answers = []
        while (answer := await call.read()) is not EOF:
            answers.append(answer)
        assert answers == [b"%d%d" % (n, n) for n in range(40)]
        assert await call.code() is grpc.StatusCode.OK

    simulated(work, seed)


def test_a_slow_reader_holds_its_writer_back() -> None:
    async def work(network: Network, echo: Echo, channel: Channel) -> None:
        call = channel.stream_stream("/echo/Many")()

        async def flood() -> None:
            while True:
                await call.write(b"x" * 10_000)

        with pytest.raises(TimeoutError):
            await asyncio.wait_for(flood(), 5.0)
        assert len(echo.heard) < 30
        assert call.cancelled()  # by the writer that was cancelled, as in grpc.aio
        with pytest.raises(asyncio.InvalidStateError):
            await call.write(b"x")

    simulated(work)


def test_a_reader_that_is_cancelled_ends_its_call_and_what_was_unread_is_lost() -> None:
    async def work(network: Network, echo: Echo, channel: Channel) -> None:
        call = channel.stream_stream("/echo/Many")()
        await call.write(b"a")
        await call.write(b"b")
        assert await call.read() == b"aa"
        await asyncio.sleep(0.1)  # the second answer is here, unread
        network.break_between("client", "server")
        await asyncio.sleep(0.1)
        with pytest.raises(grpc.aio.AioRpcError):
            await call.read()
        call = channel.stream_stream("/echo/Many")()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(call.read(), 1.0)
        assert call.cancelled()

    simulated(work)


def test_a_write_where_nobody_answers_fails_as_a_call_does() -> None:
    async def work(network: Network, echo: Echo, channel: Channel) -> None:
        network.process_died("server")
        with pytest.raises(grpc.aio.AioRpcError) as lost:
            await channel.stream_stream("/echo/Many")().write(b"a")
        assert lost.value.code() is grpc.StatusCode.UNAVAILABLE

    simulated(work)


def test_a_cut_breaks_no_connection_early_because_of_one_that_was_healed_before() -> None:
    async def work(network: Network, echo: Echo, channel: Channel) -> None:
        loop, one = asyncio.get_running_loop(), channel.unary_unary("/echo/One")
        assert await one(b"a") == b"A"
        network.cut("client", "server")
        await asyncio.sleep(0.1)
        network.heal("client", "server")
        await asyncio.sleep(KEEPALIVE_S - 1.0)
        network.cut("client", "server")
        asking = asyncio.ensure_future(one(b"b"))
        await asyncio.sleep(2.0)
        network.heal("client", "server")
        assert await asking == b"B"
        assert loop.time() < KEEPALIVE_S + 2.0

    simulated(work)


def test_a_call_that_is_over_leaves_nothing_at_its_connection() -> None:
    async def work(network: Network, echo: Echo, channel: Channel) -> None:
        one = channel.unary_unary("/echo/One")
        for _ in range(5):
            await one(b"a")
        await asyncio.sleep(1.0)
        connection = channel.connection()
        assert connection is not None
        assert len(connection._on_broken) == 1  # the channel's own

    simulated(work)


def test_a_killed_process_breaks_its_calls_at_once_and_a_cut_after_the_keepalive() -> None:
    async def work(network: Network, echo: Echo, channel: Channel) -> None:
        loop = asyncio.get_running_loop()
        call = channel.unary_unary("/echo/One")(b"slow")
        loop.call_later(1.0, network.process_died, "server")
        with pytest.raises(grpc.aio.AioRpcError) as lost:
            await call
        assert lost.value.code() is grpc.StatusCode.UNAVAILABLE
        assert loop.time() < 1.1
        with pytest.raises(grpc.aio.AioRpcError):
            await channel.unary_unary("/echo/One")(b"a")

    async def cut(network: Network, echo: Echo, channel: Channel) -> None:
        loop = asyncio.get_running_loop()
        assert await channel.unary_unary("/echo/One")(b"a") == b"A"
        network.cut("client", "server")
        began = loop.time()
        with pytest.raises(grpc.aio.AioRpcError):
            await channel.unary_unary("/echo/One")(b"b")
        assert loop.time() - began < KEEPALIVE_S + 1
        network.heal("client", "server")
        assert await channel.unary_unary("/echo/One")(b"c") == b"C"

    simulated(work)
    simulated(cut)


def test_a_server_that_stops_takes_no_calls_and_its_successor_gets_those_of_idle_channels() -> None:
    async def work(network: Network, echo: Echo, channel: Channel) -> None:
        one = channel.unary_unary("/echo/One")
        assert await one(b"a") == b"A"
        stopped = network.connect("client", "server:1")
        assert stopped is not None
        server = stopped.listener
        assert isinstance(server, Server)
        await server.stop(1.0)
        with pytest.raises(grpc.aio.AioRpcError):
            await one(b"b")
        successor = Server(Process("server").spawn)
        successor.add_generic_rpc_handlers((Echo(),))
        network.listen("server:1", "server", successor)
        network.hang_up(server)
        await asyncio.sleep(0.1)
        assert await one(b"c") == b"C"

    simulated(work)


def test_without_memory_a_client_sends_empty_messages_and_reads_none_and_a_server_fails_its_handler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Checks that, as in grpc.aio, what ``_common`` can't serialize or deserialize is logged and passed on."""
    monkeypatch.setattr(memory, "SHARE", 1.0)

    async def work(network: Network, echo: Echo, channel: Channel) -> None:
        network.memory.short("client", True)
        stream = channel.stream_stream("/echo/Many", bytes, bytes)()
        await stream.write(b"lost")
        assert await stream.read() is None
        assert echo.heard == [b""]
        stream.cancel()
        plain = channel.stream_stream("/echo/Many")()
        await plain.write(b"as it is")
        assert await plain.read() == 2 * b"as it is"
        plain.cancel()
        network.memory.short("client", False)
        network.memory.short("server", True)
        with pytest.raises(grpc.aio.AioRpcError, match="MemoryError") as failed:
            await channel.unary_unary("/echo/One")(b"abc")
        assert failed.value.code() is grpc.StatusCode.UNKNOWN
        network.memory.short("server", False)
        assert await channel.unary_unary("/echo/One")(b"abc") == b"ABC"

    simulated(work)


def test_what_never_comes_is_said_instead_of_awaited() -> None:
    async def work(network: Network, echo: Echo, channel: Channel) -> None:
        await asyncio.Event().wait()

    with pytest.raises(NothingLeft):
        simulated(work)
