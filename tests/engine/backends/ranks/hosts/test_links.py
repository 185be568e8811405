"""Checks what a rank writes to other hosts: large writes leave from where they lie, and arrive whole."""

from __future__ import annotations

import ctypes
import mmap
import random
import socket
import struct
import threading
from pathlib import Path

import pytest

from baton.engine.backends.ranks.hosts.links import RANK, TOKEN, Links
from baton.engine.backends.ranks.link_plan import LinkPlan
from baton.engine.backends.ranks.memory import RanksStruct, show_pages
from baton.kernels.abi import native
from baton.kernels.collective.native import group_at, group_bytes
from baton.protos.nouns import Extent

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native kernels here")

HEAD = "<iiqqqq"  # links.cpp: LinkHead
LARGE, SMALL, MANY = 64 << 20, 48 << 10, 100


def resident() -> int:
    """This process's own memory in bytes, without what it shares."""
    said = Path("/proc/self/status").read_text().split("RssAnon:")[1]
    return int(said.split()[0]) << 10


def whole(size: int) -> tuple[Extent, ...]:
    """The part of a page that is all of it."""
    return (Extent(0, size, 0, 1),)


def exactly(sock: socket.socket, into: memoryview) -> None:
    while into:
        got = sock.recv_into(into)
        assert got, "the connection has ended"
        into = into[got:]


@pytest.mark.parametrize(("size", "count"), [(LARGE, 1), (SMALL, MANY)], ids=["one large page", "many small ones"])
def test_pages_for_another_host_arrive_whole_and_are_not_copied_into_a_queue(size: int, count: int) -> None:
    begin = -(-group_bytes(2, 128) // 4096) * 4096
    memory, heard = mmap.mmap(-1, begin + size * count), mmap.mmap(-1, size)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    part = random.Random(1).randbytes(1 << 16)
    for at in range(begin, len(memory), len(part)):
        memory[at : at + len(part)] = part[: len(memory) - at]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        plan, made = LinkPlan(bytes(32), (("127.0.0.1", 1), listener.getsockname()), (0, 1)), list[Links]()
        dial = threading.Thread(target=lambda: made.append(Links(plan, 0, address, address + begin, 60.0)))
        dial.start()
        far, _ = listener.accept()
        with far:
            far.settimeout(60)
            far.recv(TOKEN + RANK, socket.MSG_WAITALL)
            far.sendall(b"1")
            dial.join(60)
            group = group_at(address, 0, 2, 128, 60.0)
            group.links = made[0].address
            call = RanksStruct(group=group, pages=address + begin), 1, range(count), size, whole(size)
            heard[:] = bytes(size)  # its memory is there before anything is measured
            before = resident()
            sending = threading.Thread(target=show_pages, args=call)
            sending.start()
            for page in range(count if size == LARGE else count // 2):  # later ones may wait in the queue
                head = bytearray(struct.calcsize(HEAD))
                exactly(far, memoryview(head))
                assert struct.unpack(HEAD, head) == (0, 1, page * size, 1, size, size)
                exactly(far, memoryview(heard))
                at = begin + page * size
                assert memoryview(heard) == memoryview(memory)[at : at + size]
            sending.join(60)
            assert not sending.is_alive()
            assert resident() - before < 16 << 20
        made[0].close()
