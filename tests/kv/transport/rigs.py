"""One of each transport, with its receiving side: what the contract tests run over."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

import grpc.aio

from baton.kv.memory import PageMemory
from baton.kv.transport import shm, tcp
from baton.kv.transport.base import Accept, Transport
from baton.kv.transport.grpc import SERVER_OPTIONS, GrpcTransport, handoff_handler
from baton.kv.transport.loopback import LoopbackTransport


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


RIGS = {"grpc": grpc_rig, "loopback": loopback_rig, "tcp": tcp_rig, "tcp, 3 lanes": lanes_rig, "shm": shm_rig}
