"""The receiving process of the KV benchmark: a decode worker's intake behind each transport, and the bare peers.

Knows nothing of figures. It prints its addresses as one line of JSON, then answers each line on stdin with its CPU
seconds so far. After the line "skip" it hashes no blocks, until the line "hash". It ends when stdin ends.

    python -m baton.bench.kv.receiver PAGE_BYTES PAGES [CERTS]
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import grpc
import grpc.aio
import uvloop

from baton.bench.kv import setting
from baton.decode_worker.io.intake import Intake
from baton.decode_worker.io.intake_lease import IntakeLease
from baton.kv.memory.host_pages import PageMemory
from baton.kv.transport import shm, tcp
from baton.kv.transport.grpc import SERVER_OPTIONS, handoff_handler
from baton.kv.wire.base import ReplyStream, Sink
from baton.kv.wire.frames import Frame
from baton.protos.channel import Commit, ReceiveClosed


class TrustingSink:
    """Passes everything on to ``sink``; while ``trusts()``, with the sender's checksums in place of its own."""

    def __init__(self, sink: Sink, trusts: Callable[[], bool]) -> None:
        self._sink, self._trusts = sink, trusts
        self.take, self.place, self.over = sink.take, sink.place, sink.over

    def landed(self, frame: Frame, checksums: Sequence[int], resident: bool = False) -> None:
        """Reports that the blocks of ``frame`` were written."""
        said = [block.checksum or 0 for block in frame.blocks] if self._trusts() else checksums
        self._sink.landed(frame, said, resident)


class Receiver:
    """Pages and an intake with a lease for each number of blocks; every commit is confirmed at once.

    While ``trusts`` is set, no checksum of a block is computed or compared.
    """

    def __init__(self, page_bytes: int, pages: int) -> None:
        self.memory = PageMemory.create(pages, page_bytes)
        setting.touch(self.memory.view())
        layout = setting.layout(page_bytes)
        self.intake = Intake(self.memory, layout, setting.FINGERPRINT, self._tell)
        self.trusts = False
        self._hashes = setting.hashes(pages)
        for count in {1, *setting.chunk_counts(pages), pages}:
            self._admit(count)

    def accept(self, line: ReplyStream) -> Sink:
        """Returns the intake's sink for a new stream; while ``trusts`` is set, no checksum is compared."""
        return TrustingSink(self.intake.accept(line), lambda: self.trusts)

    def _admit(self, count: int) -> None:
        self.intake.register(IntakeLease(count, setting.lease(count), 1, range(count), self._hashes[:count], 0))

    def _tell(self, message: object) -> None:
        if isinstance(message, Commit):
            self.intake.on_committed(message.key, message.epoch)
        elif isinstance(message, ReceiveClosed):
            self.intake.close(message.key)
            self._admit(message.key)


async def serve(page_bytes: int, pages: int, certs: Path | None) -> None:
    """Listens on all transports until stdin ends; with ``certs``, a folder, also on a TCP port with TLS."""
    receiver = Receiver(page_bytes, pages)
    with tempfile.TemporaryDirectory(prefix="bkv-") as folder:
        server = grpc.aio.server(options=SERVER_OPTIONS)
        server.add_generic_rpc_handlers((handoff_handler(receiver.accept), bare_aio()))
        addresses = {"grpc": f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"}
        await server.start()
        data, addresses["tcp"] = tcp.listen("127.0.0.1", receiver.accept)
        listening = [data]
        if certs is not None:
            identity = setting.identity(certs)
            secured, addresses[setting.TLS] = tcp.listen("127.0.0.1", receiver.accept, identity=identity)
            listening.append(secured)
        local, addresses["shm"] = shm.listen(f"{folder}/kv", receiver.accept)
        addresses["bare tcp"] = bare_tcp(receiver.memory.view())
        threads, addresses["bare grpc"] = bare_sync()
        print(json.dumps(addresses), flush=True)
        await _answer_until_the_end(receiver)
        for server_socket in listening:
            server_socket.close()
        local.close()
        threads.stop(0)
        await server.stop(0)


def bare_tcp(view: memoryview) -> str:
    """Starts a thread that receives into ``view`` by blocking ``recv_into``; returns its address.

    It sends one byte back each time ``view`` is full.
    """
    listening = socket.create_server(("127.0.0.1", 0))

    def fill() -> None:
        while True:
            peer, _ = listening.accept()
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            got = 0
            while count := peer.recv_into(view[got:]):
                got += count
                if got == len(view):
                    got = 0
                    peer.send(b"!")

    threading.Thread(target=fill, daemon=True).start()
    return f"127.0.0.1:{listening.getsockname()[1]}"


def bare_aio() -> grpc.GenericRpcHandler:
    """Returns an asyncio handler with a client-streaming method that discards its input, and a unary echo."""

    async def drop(messages: AsyncIterator[bytes], context: object) -> bytes:
        async for _ in messages:
            pass
        return b"!"

    async def echo(message: bytes, context: object) -> bytes:
        return message

    return grpc.method_handlers_generic_handler(
        setting.BARE,
        {"Drop": grpc.stream_unary_rpc_method_handler(drop), "Echo": grpc.unary_unary_rpc_method_handler(echo)},
    )


def bare_sync() -> tuple[grpc.Server, str]:
    """Starts a threaded gRPC server whose streaming method discards its input; returns the server and its
    address.
    """

    def drop(messages: Iterator[bytes], context: object) -> bytes:
        for _ in messages:
            pass
        return b"!"

    server = grpc.server(ThreadPoolExecutor(2), options=SERVER_OPTIONS)
    methods = {"Drop": grpc.stream_unary_rpc_method_handler(drop)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(setting.BARE, methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    return server, f"127.0.0.1:{port}"


async def _answer_until_the_end(receiver: Receiver) -> None:
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), os.fdopen(os.dup(0), "rb"))
    with ExitStack() as skipping:
        while line := await lines.readline():
            if (said := line.strip()) == b"skip":
                skipping.enter_context(setting.skipped())
                receiver.trusts = True
            elif said == b"hash":
                skipping.close()
                receiver.trusts = False
            print(json.dumps(time.process_time()), flush=True)


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]) if len(sys.argv) > 3 else None))
