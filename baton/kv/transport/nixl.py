"""Carries KV by NIXL (https://github.com/ai-dynamo/nixl): the receiver reads blocks out of the sender's memory.

Knows nothing of frames' contents. Frames travel over a TCP connection per stream, whose hello has the metadata of
the sender's agent and the address of its pages; UCX reads blocks' bytes over the networks that the two hosts have,
RDMA or TCP. Blocks that lie in no page (converted to another layout) follow their frame, as over tcp.

It is optional: workers need the extra ``nixl``. It can't be encrypted, and anyone who has the metadata of a
sender's agent can read all of its pages: with TLS on, the network must be declared trusted. It has run over TCP
alone so far.
"""

from __future__ import annotations

import os
import socket

from baton.kv.memory.host_pages import PageMemory
from baton.kv.transport import tcp
from baton.kv.wire.base import Accept, HandoffStream, Transport
from baton.kv.wire.nixl_receiving import SHOWN, NixlServer
from baton.kv.wire.one_sided import NixlAgent
from baton.kv.wire.receiving import SocketServer
from baton.kv.wire.sending import Lane, SocketStream, SocketTransport, hello
from baton.protos.errors import ConfigError

# Bytes of a connection's buffers; they are small because few frames announce many blocks.
QUEUED_BYTES, RECEIVED_BYTES = 16 << 10, 32 << 10


class NixlTransport(SocketTransport):
    """Implements ``Transport`` to addresses ``host:port``, whose receivers read out of the pages of ``memory``."""

    def __init__(self, memory: PageMemory) -> None:
        super().__init__()
        view = memory.view()
        self._agent: NixlAgent | None = NixlAgent()
        at = self._agent.register(view)
        metadata = self._agent.metadata()
        self._shown = SHOWN.pack(at, len(view), len(metadata), metadata)

    async def connect(self, address: str) -> HandoffStream:
        """Returns a new stream. Raises WorkerLost."""
        greeting = hello(0, os.urandom(16)) + self._shown
        sock = await tcp.dialled(address, greeting, None, self.poller, QUEUED_BYTES)
        return SocketStream([Lane(sock, address, self.poller)], self._streams, elsewhere=True)

    async def close(self) -> None:
        """Closes every stream and ends the agent, after which nobody can read our pages."""
        await super().close()
        if self._agent is not None:
            self._agent.close()
            self._agent = None


def sender(memory: PageMemory) -> Transport:
    """Returns the transport for a worker with pages in ``memory``. Raises ConfigError if NIXL can't be loaded."""
    return NixlTransport(memory)


def listen(host: str, accept: Accept) -> tuple[SocketServer, str]:
    """Starts a receiving server on the running loop; returns it and its address. Raises ConfigError if NIXL can't
    be loaded or no port be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        sock = socket.create_server((host, 0), family=family, backlog=512)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVED_BYTES)  # its connections have it, too
    except OSError as error:
        raise ConfigError(f"the KV data port can't be bound on {host}: {error.strerror}", "worker.host") from None
    try:
        return NixlServer(sock, accept), f"{host}:{sock.getsockname()[1]}"
    except ConfigError:
        sock.close()
        raise
