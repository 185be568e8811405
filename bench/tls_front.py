"""TLS in front of a server on a unix socket, as a sidecar has it: for a Redis that was built without TLS.

    python -m bench.tls_front --listen HOST:PORT --socket PATH --certs DIR     (role redis, clients must show one)

Knows nothing of what is carried.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
from pathlib import Path

from baton.tls.identity import Identity, TlsFiles


class Front:
    """TLS on one side, ``socket`` on the other."""

    def __init__(self, socket: Path, identity: Identity) -> None:
        self._socket, self._identity = socket, identity
        self._server: asyncio.Server | None = None

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Starts listening; returns the port."""
        self._server = await asyncio.start_server(self._carry, host, port, ssl=self._identity.listener())
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Stops accepting connections."""
        if self._server is not None:
            self._server.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind, ahead = await asyncio.open_unix_connection(self._socket)
        await asyncio.gather(_copy(reader, ahead), _copy(behind, writer), return_exceptions=True)


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    try:
        while data := await source.read(1 << 16):
            target.write(data)
            await target.drain()
    finally:
        target.close()


def main() -> None:
    """Until it is ended."""
    parser = argparse.ArgumentParser(prog="bench.tls_front")
    for name in ("--listen", "--socket", "--certs"):
        parser.add_argument(name, required=True)
    told = parser.parse_args()
    logging.basicConfig(level="INFO", format="%(asctime)s %(name)s %(message)s")
    host, _, port = told.listen.rpartition(":")
    certs = Path(told.certs)
    files = TlsFiles(str(certs / "redis.crt"), str(certs / "redis.key"), str(certs / "ca.crt"))

    async def serve() -> None:
        await Front(Path(told.socket), Identity(files, "the Redis port")).start(host, int(port))
        await asyncio.Event().wait()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
