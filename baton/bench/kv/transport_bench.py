"""The sender of the KV benchmark: handoffs over each transport, and the same bytes without one, to one process.

Knows nothing of rounds or of what is reported.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import grpc.aio

from baton.bench.kv import setting
from baton.kv.transport import sender as transport_named
from baton.kv.transport.auto import AUTO, AutoTransport
from baton.kv.transport.grpc import CHANNEL_OPTIONS, keep_freed_buffers
from baton.kv.wire.base import Transport
from baton.prefill_worker.io.handoff import FRAME_BYTES, Handoff
from baton.prefill_worker.io.handoff_frames import Destination, Sender
from baton.protos.channel import ShipBlock
from baton.protos.measurements import KvLink
from baton.protos.nouns import TokenRun, WorkerInfo

TRANSPORTS = ("shm", "tcp", "grpc")


class TransportBench:
    """A receiver process, and the pages that are sent to it over each transport."""

    def __init__(self, page_bytes: int, total_bytes: int) -> None:
        self.page_bytes, self.pages = page_bytes, total_bytes // page_bytes
        self.memory = setting.source(page_bytes, self.pages)
        self._copy = memoryview(bytearray(len(self.memory.view())))
        self._layout, self._hashes = setting.layout(page_bytes), setting.hashes(self.pages)
        self._transports: dict[str, Transport] = {}
        self._messages: list[bytes] = []
        self._certs = tempfile.TemporaryDirectory(prefix="bkt-")
        self._identity = setting.identity(Path(self._certs.name))
        arguments = [str(page_bytes), str(self.pages), self._certs.name]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "baton.bench.kv.receiver", *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert self._process.stdout is not None
        self.picked = ""  # by auto
        self.addresses: dict[str, str] = json.loads(self._process.stdout.readline())
        keep_freed_buffers()

    async def close(self) -> None:
        """Closes the transports and ends the receiver process."""
        for transport in self._transports.values():
            await transport.close()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)
        self._certs.cleanup()

    def receiver_cpu(self) -> float:
        """Returns the CPU seconds of the receiver process so far."""
        return self.ask("cpu")

    def ask(self, line: str) -> float:
        """Sends ``line`` to the receiver process (see receiver.py); returns its CPU seconds so far."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{line}\n".encode())
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    # ---- ours ------------------------------------------------------------------------------------------

    async def handoff(self, name: str, count: int) -> float:
        """Returns the seconds of a complete handoff of ``count`` blocks over transport ``name``, all ready at its
        start.
        """
        handoff = self.new_handoff(name, count)
        handoff.ship(self.blocks(range(count)))
        handoff.commit(TokenRun(0, (1,)), 0)
        begun = time.perf_counter()
        await handoff.run()
        return time.perf_counter() - begun

    def new_handoff(self, name: str, count: int) -> Handoff:
        """Returns a handoff of ``count`` blocks over transport ``name``, to which blocks are yet to be
        announced.
        """
        if name not in self._transports:
            self._transports[name] = self._transport(name)
        sender = Sender("bench", "m", setting.FINGERPRINT, self._layout)
        address = self.addresses["grpc" if name == AUTO else name]
        to = Destination(address, setting.lease(count), 1, "r", count, 16)
        return Handoff(self._transports[name], self.memory, sender, to, time.perf_counter)

    def _transport(self, name: str) -> Transport:
        if name == AUTO:
            return AutoTransport(
                self.memory, time.perf_counter, report=self._on_pick, describe=self._describe, host_id="here"
            )
        known, identity = ("tcp", self._identity) if name == setting.TLS else (name, None)
        return transport_named(known, self.memory, identity)

    async def _describe(self, address: str) -> WorkerInfo:
        """Returns the description of a decode worker in the receiver's place."""
        offered = {name: self.addresses[name] for name in ("shm", "tcp")}
        return WorkerInfo(
            "bench", "i", "decode", address, "m", setting.FINGERPRINT, self._layout, 1, 256, (), self.pages,
            host_id="here", data_addresses=offered,
        )  # fmt: skip

    def _on_pick(self, link: KvLink, reason: str) -> None:
        self.picked = link.transport

    def blocks(self, numbers: range) -> Iterator[ShipBlock]:
        """Yields messages that announce the blocks ``numbers`` as ready, as an engine sends them."""
        return (ShipBlock(number, number, self._hashes[number], 16) for number in numbers)

    # ---- peers -----------------------------------------------------------------------------------------

    def memcpy(self) -> float:
        """Returns the seconds to copy all pages once, uncached, by one thread."""
        begun = time.perf_counter()
        self._copy[:] = self.memory.view()
        return time.perf_counter() - begun

    def bare_tcp(self) -> float:
        """Returns the seconds of a blocking ``sendall`` of all pages until the receiver has confirmed all of
        them.
        """
        host, port = self.addresses["bare tcp"].split(":")
        with socket.create_connection((host, int(port))) as sock:
            begun = time.perf_counter()
            sock.sendall(self.memory.view())
            sock.recv(1)
            return time.perf_counter() - begun

    def messages(self) -> list[bytes]:
        """Returns the bytes of all pages as messages of the size of a transport's frames."""
        if not self._messages:
            view, size = self.memory.view(), max(FRAME_BYTES, self.page_bytes)
            self._messages = [bytes(view[at : at + size]) for at in range(0, len(view), size)]
        return self._messages

    async def bare_aio(self) -> float:
        """Returns the seconds of a raw gRPC stream of ready-made messages, with asyncio on both sides."""
        messages = self.messages()
        async with grpc.aio.insecure_channel(self.addresses["grpc"], options=CHANNEL_OPTIONS) as channel:
            await channel.channel_ready()
            call = channel.stream_unary(f"/{setting.BARE}/Drop")()
            begun = time.perf_counter()
            for message in messages:
                await call.write(message)
            await call.done_writing()
            await call
            return time.perf_counter() - begun

    def bare_sync(self) -> float:
        """Returns the seconds of a raw gRPC stream of ready-made messages, with threads on both sides."""
        messages = self.messages()
        with grpc.insecure_channel(self.addresses["bare grpc"], options=CHANNEL_OPTIONS) as channel:
            grpc.channel_ready_future(channel).result(5)
            begun = time.perf_counter()
            channel.stream_unary(f"/{setting.BARE}/Drop")(iter(messages))
            return time.perf_counter() - begun

    async def round_trips(self, count: int) -> list[float]:
        """Returns the seconds of each of ``count`` unary gRPC calls on a warm channel."""
        took = []
        async with grpc.aio.insecure_channel(self.addresses["grpc"], options=CHANNEL_OPTIONS) as channel:
            echo = channel.unary_unary(f"/{setting.BARE}/Echo")
            for _ in range(count + 5):
                begun = time.perf_counter()
                await echo(b"x" * 64)
                took.append(time.perf_counter() - begun)
        return took[5:]
