"""Clients that are slow, silent or half open, on every port of a cluster; and what its processes hold of memory."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from tests.e2e.fleet import Fleet

# Each begins what its port expects, and goes no further.
BEGINNINGS = {
    "silent": b"",
    "half a request line": b"POST /v1/compl",
    "half a head": b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nx-a: ",
    "half a body": b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 1000\r\n\r\n{",
    "half a chunk": b"POST /tokenize HTTP/1.1\r\nhost: 127.0.0.1\r\ntransfer-encoding: chunked\r\n\r\nff\r\n{",
    "half a preface": b"PRI * HTTP/2.0\r\n",
    "a preface alone": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "half a frame": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x10\x04",
    "TLS to a plain port": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
    "half a hello": b"BKVH\x01",
    "zeros": bytes(64),
}
DRIP_S = 0.05


def ports(fleet: Fleet) -> dict[str, tuple[str, int] | str]:
    """Every address that the cluster listens on, by what it is; a unix socket is a path."""
    found: dict[str, tuple[str, int] | str] = {
        "router REST": (fleet.host, fleet.port),
        "router gRPC": _pair(fleet.grpc),
    }
    for slot in fleet.slots:
        record = fleet.record(slot)
        found[f"{slot} gRPC"] = _pair(record.address)
        if record.metrics_address:
            found[f"{slot} metrics"] = _pair(record.metrics_address)
    known = {address for address in found.values() if isinstance(address, tuple)}
    for slot in fleet.slots:
        for port in _listening(fleet.record(slot).pid):
            if ("127.0.0.1", port) not in known:
                found[f"{slot} port {port}"] = ("127.0.0.1", port)
        for path in _unix_sockets(fleet.record(slot).pid):
            found[f"{slot} socket {path}"] = path
    return found


@contextlib.contextmanager
def hanging(fleet: Fleet, each: int, rng: random.Random) -> Iterator[list[socket.socket]]:
    """``each`` hanging connections of each kind on each port, while the block runs."""
    opened: list[socket.socket] = []
    try:
        for address in ports(fleet).values():
            for begun in BEGINNINGS.values():
                opened += [_hanging(address, begun, rng) for _ in range(each)]
        yield opened
    finally:
        for one in opened:
            one.close()


def drip(opened: list[socket.socket], seconds: float) -> None:
    """One more byte on some of them again and again; who was cut off stays so."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for one in opened[::7]:
            with contextlib.suppress(OSError):
                one.send(b"a")
        time.sleep(DRIP_S)


def cut_off(opened: list[socket.socket]) -> int:
    """Returns how many of the connections the server has closed."""
    count = 0
    for one in opened:
        try:
            while one.recv(65536):
                pass
            count += 1
        except BlockingIOError:
            pass
        except OSError:
            count += 1
    return count


def resident(fleet: Fleet) -> dict[str, int]:
    """MiB of each process that clients talk to: the router and the workers' I/O processes."""
    assert fleet.router is not None
    pids = {"router": fleet.router.pid} | {slot: fleet.record(slot).pid for slot in fleet.slots}
    return {name: _resident(pid) for name, pid in pids.items()}


def _resident(pid: int) -> int:
    """Returns a process's resident memory in MiB, without shared pages such as KV."""
    fields = Path(f"/proc/{pid}/status").read_text().split("RssAnon:")[1].split()
    return int(fields[0]) >> 10


def _hanging(address: tuple[str, int] | str, begun: bytes, rng: random.Random) -> socket.socket:
    one = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
    with contextlib.suppress(OSError):  # a full backlog is an answer too
        one.settimeout(5)
        one.connect(address)
        one.send(begun[: rng.randint(len(begun) // 2, len(begun))])
    one.setblocking(False)
    return one


def _pair(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def _listening(pid: int) -> list[int]:
    own = _inodes(pid)
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return [int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and row[9] in own]


def _unix_sockets(pid: int) -> list[str]:
    own = _inodes(pid)
    rows = [line.split() for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]]
    return [row[7].replace("@", "\0", 1) for row in rows if len(row) > 7 and row[3] == "00010000" and row[6] in own]


def _inodes(pid: int) -> set[str]:
    found = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            target = os.readlink(entry)
            if target.startswith("socket:["):
                found.add(target[8:-1])
    return found
