"""Shows who gets in at a port and who doesn't: with good, foreign, expired and no certificates, and in plaintext.

Each visit goes as far as an answer of the port's own protocol, because in TLS 1.3 a client believes itself
connected before the server has looked at its certificate. Knows nothing of how a cluster is started.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import ssl
from collections.abc import Callable, Iterable
from typing import NamedTuple

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.kv.memory import block_sums
from baton.kv.wire import frames
from baton.kv.wire.frames import Block, Frame, Kind
from baton.kv.wire.sending import hello
from baton.protos.v1 import inference_pb2, inference_pb2_grpc, worker_pb2, worker_pb2_grpc
from baton.tls.authority import Authority

PATIENCE_S = 60.0
DOMAIN = "baton.internal"
SERVED = "served"


class Papers(NamedTuple):
    """Holds the certificate and key that a visitor shows (empty: none) and the CA that it trusts (empty: it speaks
    plaintext).
    """

    cert: str = ""
    key: str = ""
    ca: str = ""


class Port(NamedTuple):
    """Describes a port: how it is spoken to, which role may, and the name that its certificate should carry."""

    name: str
    kind: str  # http, inference, worker, kv or redis
    address: str
    role: str
    server: str


class Visit(NamedTuple):
    """Holds the outcome of one visit: SERVED, or the refusal as the visitor sees it."""

    port: Port
    visitor: str
    outcome: str

    @property
    def served(self) -> bool:
        """Returns whether the port answered."""
        return self.outcome == SERVED


def papers_of(authority: Authority, role: str, trusts: Authority | None = None) -> Papers:
    """A leaf of ``authority``, by role."""
    folder = authority.folder
    return Papers(
        str(folder / f"{role}.crt"), str(folder / f"{role}.key"), str((trusts or authority).folder / "ca.crt")
    )


def visitors(ours: Authority, stranger: Authority, port: Port) -> dict[str, Papers]:
    """Everybody who tries a port; the first alone should be served. ``ours`` has the leaves expired and nobody."""
    found = {
        "the right role": papers_of(ours, port.role),
        "plaintext": Papers(),
        "no certificate": Papers(ca=str(ours.folder / "ca.crt")),
        "a stranger's CA": papers_of(stranger, port.role, ours),
        "expired": papers_of(ours, "expired"),
        "another role": papers_of(ours, "nobody"),
    }
    if port.role == "monitor" or port.kind == "redis":
        del found["another role"]  # whoever the CA vouches for may read metrics; Redis has its own users
    return found


def tour(ours: Authority, stranger: Authority, ports: Iterable[Port]) -> list[Visit]:
    """Every visitor at every port."""
    return [
        Visit(port, who, visit(port, papers))
        for port in ports
        for who, papers in visitors(ours, stranger, port).items()
    ]


def visit(port: Port, papers: Papers) -> str:
    """SERVED, or why not."""
    try:
        VISITS[port.kind](port, papers)
    except grpc.RpcError as error:
        return f"{error.code().name}: {error.details()}"  # type: ignore[attr-defined]
    except (OSError, http.client.HTTPException, EOFError) as error:
        return f"{type(error).__name__}: {error}"
    return SERVED


def describe(address: str, papers: Papers) -> worker_pb2.WorkerInfo:
    """A worker's own description. Raises grpc.RpcError."""
    with _channel(Port("", "worker", address, "", "worker"), papers) as channel:
        return worker_pb2_grpc.WorkerStub(channel).Describe(worker_pb2.DescribeRequest(), timeout=PATIENCE_S)


def shown_certificate(port: Port, papers: Papers) -> bytes:
    """Returns the certificate that a port (TLS 1.3 or HTTP) shows now, in DER."""
    host, _, number = port.address.rpartition(":")
    context = ssl.create_default_context(cafile=papers.ca)
    context.load_cert_chain(papers.cert, papers.key)
    context.set_alpn_protocols(["h2"] if port.kind in ("worker", "inference") else ["http/1.1"])
    with socket.create_connection((host, int(number)), PATIENCE_S) as sock:
        with context.wrap_socket(sock, server_hostname=f"{port.server}.{DOMAIN}") as secured:
            return secured.getpeercert(binary_form=True) or b""


def table(visits: Iterable[Visit]) -> str:
    """Ports down, visitors across."""
    rows: dict[str, dict[str, str]] = {}
    for one in visits:
        rows.setdefault(one.port.name, {})[one.visitor] = "served" if one.served else "refused"
    names = list(dict.fromkeys(who for row in rows.values() for who in row))
    lines = [" | ".join(["port", *names]), "|".join(["---"] * (len(names) + 1))]
    lines += [" | ".join([name, *(row.get(who, "-") for who in names)]) for name, row in rows.items()]
    return "\n".join(f"| {line} |" if "---" not in line else f"|{line}|" for line in lines)


def _http(port: Port, papers: Papers) -> None:
    host, _, number = port.address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(number), timeout=PATIENCE_S)
    with contextlib.closing(connection):
        connection.sock = _connected(port, papers)
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        if answer.status != 200:
            raise OSError(f"HTTP {answer.status}")
        answer.read()


def _inference(port: Port, papers: Papers) -> None:
    with _channel(port, papers) as channel:
        inference_pb2_grpc.InferenceStub(channel).ListModels(inference_pb2.ListModelsRequest(), timeout=PATIENCE_S)


def _worker(port: Port, papers: Papers) -> None:
    with _channel(port, papers) as channel:
        if papers.ca:  # health is open to whoever the CA vouches for; what a worker does is not
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
        worker_pb2_grpc.WorkerStub(channel).Describe(worker_pb2.DescribeRequest(), timeout=PATIENCE_S)


def _kv(port: Port, papers: Papers) -> None:
    data = os.urandom(4096)
    probe = Frame(Kind.PROBE, unit=len(data), blocks=(Block(0, frames.NO_HASH, block_sums.checksum(data)),))
    with _connected(port, papers) as sock:
        sock.sendall(hello(0, os.urandom(16)))
        sock.sendall(frames.encode(probe) + data)
        header = b""
        while len(header) < frames.HEADER_BYTES:
            piece = sock.recv(frames.HEADER_BYTES - len(header))
            if not piece:
                raise EOFError("closed without an answer")
            header += piece
        if header[:4] != frames.MAGIC or header[4] != Kind.ACK:
            raise OSError(f"an answer of kind {header[4]}")


def _redis(port: Port, papers: Papers) -> None:
    with _connected(port, papers) as sock:
        sock.sendall(b"PING\r\n")
        if not sock.recv(1):  # also "-NOAUTH": whoever reads that was let in by TLS
            raise EOFError("closed without an answer")


def _connected(port: Port, papers: Papers) -> socket.socket:
    host, _, number = port.address.rpartition(":")
    sock = socket.create_connection((host, int(number)), PATIENCE_S)
    if not papers.ca:
        return sock
    context = ssl.create_default_context(cafile=papers.ca)
    if papers.cert:
        context.load_cert_chain(papers.cert, papers.key)
    return context.wrap_socket(sock, server_hostname=f"{port.server}.{DOMAIN}")


def _channel(port: Port, papers: Papers) -> grpc.Channel:
    if not papers.ca:
        return grpc.insecure_channel(port.address)
    cert = _read(papers.cert)
    credentials = grpc.ssl_channel_credentials(_read(papers.ca), _read(papers.key), cert)
    return grpc.secure_channel(
        port.address,
        credentials,
        (("grpc.ssl_target_name_override", f"{port.server}.{DOMAIN}"), ("grpc.use_local_subchannel_pool", 1)),
    )


def _read(path: str) -> bytes | None:
    if not path:
        return None
    with open(path, "rb") as file:
        return file.read()


VISITS: dict[str, Callable[[Port, Papers], None]] = {
    "http": _http, "inference": _inference, "worker": _worker, "kv": _kv, "redis": _redis,
}  # fmt: skip
