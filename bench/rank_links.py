"""Measures what ranks of several hosts pay for TCP: meetings, all-reduces, KV pages; two processes by loopback.

Knows nothing of models. The other host is a fork of this process with memory of its own. Beside pages: the same
bytes by a plain TCP connection. Loopback says what the software costs, not what a network does.

    python -m bench.rank_links [--rounds 7] [--json FILE]
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from rich.console import Console

from baton.bench.rows import Row, median, paired, spread, table, to_json
from baton.engine.backends.ranks.hosts.control import exactly
from baton.engine.backends.ranks.hosts.links import TOKEN, LinkPlan, Links, LinkServer, Mapped
from baton.engine.backends.ranks.memory import RanksStruct, show_pages
from baton.kernels.collective.native import Collective, group_at, group_bytes
from bench.parallel import BYTES, SLOT_BYTES, forked

HERE, RANKS = "127.0.0.1", 2
PAGE_BYTES, PAGES = 1 << 20, 64  # some 200 tokens of a model of 80 layers and 8 KV heads in bfloat16
MEETINGS = 500  # in a measurement
BOUND_S = 60.0


class Host:
    """One of two hosts: memory and pages of its own, and the links of its only rank."""

    def __init__(self, rank: int, servers: list[LinkServer], token: bytes) -> None:
        sizes = group_bytes(RANKS, SLOT_BYTES), PAGE_BYTES * PAGES
        maps = [mmap.mmap(-1, size) for size in sizes]
        memory, pages = (ctypes.addressof(ctypes.c_char.from_buffer(each)) for each in maps)
        plan = LinkPlan(token, tuple(server.address for server in servers), (0, 1))
        servers[rank].start(plan, rank, Mapped(memory, sizes[0], pages, sizes[1], (maps,)))
        self._links = Links(plan, rank, memory, pages, BOUND_S)
        group = group_at(memory, rank, RANKS, SLOT_BYTES, BOUND_S)
        group.links = self._links.address
        self._struct = RanksStruct(group=group, pages=pages)
        self.collective = Collective(self._struct.group)

    def send_pages(self) -> None:
        """Writes all pages to the other host; returns once it has them."""
        show_pages(self._struct, range(PAGES), PAGE_BYTES)
        self.collective.meet()


def host_of(rank: int, servers: list[LinkServer], token: bytes, rounds: int) -> Iterator[float]:
    """Yields the seconds of each measurement in turn, as both hosts make them: a meeting, all-reduces, pages."""
    host, x = Host(rank, servers, token), torch.zeros(max(BYTES) // 4)
    meet, reduce = host.collective.meet, host.collective.all_reduce
    for _ in range(rounds + 1):
        yield _seconds(meet, MEETINGS)
        for size in BYTES:
            yield _seconds(lambda size=size: reduce(x.data_ptr(), size // 4), max(3, (8 << 20) // size))  # type: ignore[misc]
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


def links(rounds: int) -> list[Row]:
    """Measures two hosts that are two processes."""
    servers, token = [LinkServer(HERE) for _ in range(RANKS)], os.urandom(TOKEN)
    with forked(lambda: list(host_of(1, servers, token, rounds))):
        found = list(host_of(0, servers, token, rounds))
    count = len(BYTES) + 2
    each = [found[at::count][1:] for at in range(count)]  # the first round warms up
    rows = [Row("a meeting of two hosts", median(each[0]) * 1e6, "µs", spread=spread(each[0]))]
    for size, seconds in zip(BYTES, each[1:-1], strict=True):
        rows.append(
            Row(f"all-reduce of {size >> 10} KB", size / median(seconds) / 1e9, "GB/s", spread=spread(seconds))
        )
    rate, beside = PAGE_BYTES * PAGES / median(each[-1]) / 1e9, plain(rounds)
    name = f"{PAGES} pages of {PAGE_BYTES >> 20} MB to the other host"
    return [*rows, Row(name, rate, "GB/s", "plain TCP", paired(beside, each[-1]), spread(each[-1]))]


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
    rows = links(args.rounds)
    Console().print(table(rows))
    if args.json:
        Path(args.json).write_text(to_json(rows))


if __name__ == "__main__":
    main()
