"""One of each transport, with its receiving side: what the contract tests run over."""

from __future__ import annotations

import asyncio
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import termios
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

import grpc.aio
import pytest

from baton.kv.memory import cuda_driver
from baton.kv.memory.host_pages import PageMemory
from baton.kv.transport import cuda_ipc, nccl, nixl, shm, tcp
from baton.kv.transport.grpc import SERVER_OPTIONS, GrpcTransport, handoff_handler
from baton.kv.transport.loopback import LoopbackTransport
from baton.kv.wire import one_sided
from baton.kv.wire.base import Accept, Transport
from baton.kv.wire.moving import MoverClient
from baton.tls.rpc import WORKER_CALLS, Dialer, NameGuard, add_port, names_for
from tests.tls.papers import identity

if not one_sided.installed():
    one_sided.API = "tests.kv.transport.stand_in_nixl"


class Rig(NamedTuple):
    """A transport that sends out of some memory, the receiver's address, and how to make the receiver go away."""

    transport: Transport
    address: str
    stop: Callable[[], Awaitable[None]]


async def grpc_rig(accept: Accept, memory: PageMemory, folder: Path) -> Rig:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    server.add_generic_rpc_handlers((handoff_handler(accept),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return Rig(GrpcTransport(), f"127.0.0.1:{port}", lambda: server.stop(0))


async def loopback_rig(accept: Accept, memory: PageMemory, folder: Path) -> Rig:
    transport = LoopbackTransport({"here": accept})
    return Rig(transport, "here", transport.close)


async def tcp_rig(accept: Accept, memory: PageMemory, folder: Path, lanes: int = 1) -> Rig:
    server, address = tcp.listen("127.0.0.1", accept)

    async def stop() -> None:
        server.close()

    return Rig(tcp.TcpTransport(lanes), address, stop)


async def lanes_rig(accept: Accept, memory: PageMemory, folder: Path) -> Rig:
    return await tcp_rig(accept, memory, folder, lanes=3)


async def shm_rig(accept: Accept, memory: PageMemory, folder: Path) -> Rig:
    server, address = shm.listen(str(folder / "kv"), accept)

    async def stop() -> None:
        server.close()

    return Rig(shm.ShmTransport(memory), address, stop)


async def secured_tcp_rig(accept: Accept, memory: PageMemory, folder: Path, lanes: int = 1) -> Rig:
    server, address = tcp.listen("127.0.0.1", accept, identity=identity("worker", "the KV port", ("worker",)))

    async def stop() -> None:
        server.close()

    return Rig(tcp.TcpTransport(lanes, identity()), address, stop)


async def secured_lanes_rig(accept: Accept, memory: PageMemory, folder: Path) -> Rig:
    return await secured_tcp_rig(accept, memory, folder, lanes=3)


async def secured_grpc_rig(accept: Accept, memory: PageMemory, folder: Path) -> Rig:
    guard = NameGuard(names_for(WORKER_CALLS, "baton.internal"))
    server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=(guard,))
    server.add_generic_rpc_handlers((handoff_handler(accept),))
    port = add_port(server, "127.0.0.1:0", identity())
    await server.start()
    return Rig(GrpcTransport(Dialer(identity())), f"127.0.0.1:{port}", lambda: server.stop(0))


class KeptMover(MoverClient):
    """One process for all tests: torch takes seconds to load. ``close`` only leaves what is open."""

    def close(self) -> None:
        for channel in tuple(self._listeners):
            self.leave(channel)
        if self._sock is not None and self._watching is not None:
            self._watching.remove_reader(self._sock.fileno())
            self._watching = None

    def here(self) -> MoverClient:
        """Returns a client on the running loop; the one before may have ended without a ``close``."""
        if self._sock is not None and self._watching is not asyncio.get_running_loop():
            self._watch()
        return self

    async def up(self) -> None:
        """Waits until the process reads: torch's import takes 2 s of CPU, which were 12 s of waiting at load 11."""
        while self._sock is not None and fcntl.ioctl(self._sock, termios.TIOCOUTQ, bytes(4)) != bytes(4):
            await asyncio.sleep(0.01)


MOVER = KeptMover()


async def nccl_rig(accept: Accept, memory: PageMemory, folder: Path) -> Rig:
    server, address = nccl.listen("127.0.0.1", accept, MOVER.here())
    await MOVER.up()  # before the clock of any handoff runs

    async def stop() -> None:
        server.close()

    return Rig(nccl.NcclTransport(memory, MOVER.here()), address, stop)


@functools.cache
def stand_in_driver() -> str:
    """A library that answers for the CUDA driver, of stand_in_cuda.c; empty without a compiler.

    It is compiled once for a checkout: the test processes end without running what they registered for their end.
    """
    source = Path(__file__).with_name("stand_in_cuda.c")
    folder = Path(__file__).parents[3] / "build" / "stand-ins"
    library = folder / f"libcuda-{hashlib.sha256(source.read_bytes()).hexdigest()[:16]}.so"
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return ""
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        mine = library.with_suffix(f".{os.getpid()}")
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", mine, source, "-lrt", "-lpthread"], check=True)
        mine.replace(library)  # whole or not at all, for the other test processes
    return str(library)


def required_driver() -> str:
    """Returns the path of the stand-in for the driver; skips the test without a C compiler."""
    return stand_in_driver() or pytest.skip("no C compiler for the driver's stand-in")


async def cuda_ipc_rig(accept: Accept, memory: PageMemory, folder: Path) -> Rig:
    cuda_driver.LIBRARY = stand_in_driver()  # on a real card a process can't open its own handle
    server, address = cuda_ipc.listen(str(folder / "gpu"), accept)

    async def stop() -> None:
        server.close()

    return Rig(cuda_ipc.CudaIpcTransport(ring_bytes=64 << 20), address, stop)


async def nixl_rig(accept: Accept, memory: PageMemory, folder: Path) -> Rig:
    """Over UCX where NIXL is installed, else over a stand-in that copies within this process."""
    server, address = nixl.listen("127.0.0.1", accept)

    async def stop() -> None:
        server.close()

    return Rig(nixl.NixlTransport(memory), address, stop)


RIGS = {
    "nixl": nixl_rig,
    "nccl": nccl_rig,
    "grpc": grpc_rig,
    "loopback": loopback_rig,
    "tcp": tcp_rig,
    "tcp, 3 lanes": lanes_rig,
    "shm": shm_rig,
    **({"cuda_ipc": cuda_ipc_rig} if stand_in_driver() else {}),
    "grpc, TLS": secured_grpc_rig,
    "tcp, TLS": secured_tcp_rig,
    "tcp, 3 lanes, TLS": secured_lanes_rig,
}
