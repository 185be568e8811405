"""Measures what ranks of several hosts pay for TCP: meetings, all-reduces, KV pages; two processes by loopback.

Knows nothing of models. The other host is a fork of this process with memory of its own. Beside pages: the same
bytes by a plain TCP connection. Beside each figure with TLS: the same without, in turns. Loopback says what the
software costs, not what a network does.

    python -m bench.rank_links [--rounds 7] [--json FILE]
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from rich.console import Console

from baton.bench.rows import Row, median, paired, spread, table, to_json
from baton.engine.backends.ranks.hosts.control import exactly
from baton.engine.backends.ranks.hosts.links import TOKEN, HostMemory, Links, LinkServer
from baton.engine.backends.ranks.link_plan import LinkPlan
from baton.engine.backends.ranks.memory import RanksStruct, show_pages
from baton.kernels.collective.native import Collective, group_at, group_bytes
from baton.protos.nouns import Extent
from baton.tls.authority import Authority
from baton.tls.identity import Identity, TlsFiles
from bench.parallel import BYTES, SLOT_BYTES, forked

HERE, RANKS = "127.0.0.1", 2
PAGE_BYTES, PAGES = 1 << 20, 64  # some 200 tokens of a model of 80 layers and 8 KV heads in bfloat16
MEETINGS = 500  # in a measurement
BOUND_S = 60.0


class Host:
    """One of two hosts: memory and pages of its own, and the links of its only rank."""

    def __init__(self, rank: int, servers: list[LinkServer], token: bytes, identity: Identity | None) -> None:
        sizes = group_bytes(RANKS, SLOT_BYTES), PAGE_BYTES * PAGES
        maps = [mmap.mmap(-1, size) for size in sizes]
        memory, pages = (ctypes.addressof(ctypes.c_char.from_buffer(each)) for each in maps)
        plan = LinkPlan(token, tuple(server.address for server in servers), (0, 1))
        servers[rank].start(plan, rank, HostMemory(memory, sizes[0], pages, sizes[1], (maps,)))
        self._links = Links(plan, rank, memory, pages, BOUND_S, identity)
        group = group_at(memory, rank, RANKS, SLOT_BYTES, BOUND_S)
        group.links = self._links.address
        self._struct = RanksStruct(group=group, pages=pages)
        self.collective = Collective(self._struct.group)

    def send_pages(self) -> None:
        """Writes all pages to the other host; returns once it has them."""
        show_pages(self._struct, 1, range(PAGES), PAGE_BYTES, (Extent(0, PAGE_BYTES, 0, 1),))
        self.collective.meet()


class Ports(NamedTuple):
    """Names the addresses where both hosts take connections, and their certificate; None is plaintext."""

    servers: list[LinkServer]
    identity: Identity | None
    token: bytes


def host_of(rank: int, kinds: list[Ports], rounds: int) -> Iterator[float]:
    """Yields the seconds of each measurement in turn, as both hosts make them: a meeting, all-reduces, pages; each
    by all kinds of links.
    """
    hosts = [Host(rank, kind.servers, kind.token, kind.identity) for kind in kinds]
    x = torch.zeros(max(BYTES) // 4)
    for _ in range(rounds + 1):
        for host in hosts:
            meet, reduce = host.collective.meet, host.collective.all_reduce
            yield _seconds(meet, MEETINGS)
            for size in BYTES:
                yield _seconds(lambda size=size: reduce(x.data_ptr(), size // 4), max(3, (8 << 20) // size))  # type: ignore[misc]  # noqa: B023
            yield _seconds(meet if rank else host.send_pages, 1)


def plain(rounds: int) -> list[float]:
    """Returns the seconds that as many bytes as the pages take by a plain TCP connection, and an answer back."""
    size = PAGE_BYTES * PAGES
    with socket.create_server((HERE, 0)) as listener:

        def take() -> None:
            with socket.create_connection(listener.getsockname()) as sock:
                taken = memoryview(mmap.mmap(-1, size))
                for _ in range(rounds + 1):
                    view = taken
                    while view:
                        view = view[sock.recv_into(view) :]
                    sock.sendall(b"1")

        with forked(take), listener.accept()[0] as sock:
            payload = bytes(size)

            def send() -> None:
                sock.sendall(payload)
                exactly(sock, 1)

            return [_seconds(send, 1) for _ in range(rounds + 1)][1:]


def links(rounds: int, identity: Identity) -> list[Row]:
    """Measures two hosts that are two processes, in plaintext and by TLS."""
    kinds = [
        Ports([LinkServer(HERE, each) for _ in range(RANKS)], each, os.urandom(TOKEN)) for each in (None, identity)
    ]
    with forked(lambda: list(host_of(1, kinds, rounds))):
        found = list(host_of(0, kinds, rounds))
    count = len(BYTES) + 2
    each = [found[at :: 2 * count][1:] for at in range(2 * count)]  # the first round warms up
    plaintext, tls = each[:count], each[count:]
    rows = _rows(plaintext)
    rows[-1] = msgspec.structs.replace(rows[-1], peer="plain TCP", ratio=paired(plain(rounds), plaintext[-1]))
    beside = zip(_rows(tls), plaintext, tls, strict=True)
    return [
        *rows,
        *(
            msgspec.structs.replace(row, name=f"TLS: {row.name}", peer="without", ratio=paired(without, own))
            for row, without, own in beside
        ),
    ]


def _rows(each: list[list[float]]) -> list[Row]:
    """Returns the rows of one kind of links, from the seconds of each measurement by round."""
    rows = [Row("a meeting of two hosts", median(each[0]) * 1e6, "µs", spread=spread(each[0]))]
    for size, seconds in zip(BYTES, each[1:-1], strict=True):
        rows.append(
            Row(f"all-reduce of {size >> 10} KB", size / median(seconds) / 1e9, "GB/s", spread=spread(seconds))
        )
    rate, name = PAGE_BYTES * PAGES / median(each[-1]) / 1e9, f"{PAGES} pages of {PAGE_BYTES >> 20} MB"
    return [*rows, Row(f"{name} to the other host", rate, "GB/s", spread=spread(each[-1]))]


def _seconds(run: Callable[[], object], times: int) -> float:
    began = time.perf_counter()
    for _ in range(times):
        run()
    return (time.perf_counter() - began) / times


def main() -> None:
    """Measures, prints a table and writes JSON where asked to."""
    parser = argparse.ArgumentParser(prog="bench.rank_links")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        made = Authority(Path(folder))
        made.make(["worker"])
        cert, key, ca = (str(made.folder / name) for name in ("worker.crt", "worker.key", "ca.crt"))
        rows = links(args.rounds, Identity(TlsFiles(cert, key, ca)))
    Console().print(table(rows))
    if args.json:
        Path(args.json).write_text(to_json(rows))


if __name__ == "__main__":
    main()
