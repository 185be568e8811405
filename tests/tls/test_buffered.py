"""The receiver's end of TLS against a blocking client of Python's own: whatever the sizes, every byte comes."""

import contextlib
import random
import select
import socket
import ssl
import threading
from collections.abc import Callable

import pytest

from baton.tls.buffered import BufferedTls
from baton.tls.sockets import accepting, step_handshake
from tests.tls.papers import identity

PATIENCE_S = 30.0


def pair(client: Callable[[ssl.SSLSocket], object]) -> tuple[BufferedTls, threading.Thread]:
    """Our end after its handshake, and the thread of a peer that goes on with ``client``."""
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    who = identity("worker", "a test", ("worker",))

    def run() -> None:
        context = identity().current().client
        with context.wrap_socket(theirs, server_hostname="worker.baton.internal") as secured:
            client(secured)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    ours.setblocking(False)
    end = accepting(ours, who)
    while wait := step_handshake(end, who):
        until(end, wait == "write")
    return end, thread


def until(sock: socket.socket, write: bool = False) -> None:
    """It is ready."""
    poll = select.poll()
    poll.register(sock, select.POLLOUT if write else select.POLLIN)
    assert poll.poll(PATIENCE_S * 1e3)


def received(end: BufferedTls, sizes: list[int]) -> bytes:
    """Until the end, asked for in pieces of ``sizes`` in turn; by one buffer or several."""
    rng, got, turn = random.Random(1), bytearray(), 0
    while True:
        buffer = bytearray(sizes[turn % len(sizes)])
        try:
            if rng.random() < 0.5:
                count = end.recv_into(buffer)
            else:
                half = len(buffer) // 2
                view = memoryview(buffer)
                count = end.recvmsg_into([view[:half], view[half:]] if half else [view])[0]
        except BlockingIOError:
            assert not end.pending() or end._in.pending, "nothing that could be read is left behind"
            until(end)
            continue
        if not count:
            return bytes(got)
        got += buffer[:count]
        turn += 1


@pytest.mark.parametrize("seed", range(4))
def test_bytes_come_whole_whatever_the_sizes_of_writes_and_reads(seed: int) -> None:
    rng = random.Random(seed)
    data = rng.randbytes(rng.randrange(1, 3 << 20))

    def send(client: ssl.SSLSocket) -> None:
        at = 0
        while at < len(data):
            size = rng.choice([1, 100, 16_384, 16_385, 400_000])
            client.sendall(data[at : at + size])
            at += size
        with contextlib.suppress(ssl.SSLError):
            client.unwrap()  # a goodbye; none comes back

    end, thread = pair(send)
    assert received(end, [rng.choice([1, 7, 4096, 65_536, 300_000]) for _ in range(50)]) == data
    end.close()
    thread.join(PATIENCE_S)


def test_an_end_without_a_goodbye_is_an_end() -> None:
    end, thread = pair(lambda client: client.sendall(b"x" * 40_000))
    thread.join(PATIENCE_S)
    assert received(end, [30_000]) == b"x" * 40_000
    assert end.recv(10) == b""
    assert end.recv_into(bytearray(10)) == 0, "and stays one"
    end.close()


def test_a_peer_that_reads_slowly_gets_every_byte_once() -> None:
    data, got, go = random.Random(5).randbytes(1 << 20), bytearray(), threading.Event()

    def read(client: ssl.SSLSocket) -> None:
        assert go.wait(PATIENCE_S)
        while piece := client.recv(5000):
            got.extend(piece)

    end, thread = pair(read)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    left, waits = memoryview(data), 0
    while left:
        try:
            left = left[end.send(left[:50_000]) :]
        except BlockingIOError:
            waits += 1
            go.set()
            until(end, write=True)
    assert waits, "it had to wait"
    end.shutdown(socket.SHUT_WR)
    thread.join(PATIENCE_S)
    assert bytes(got) == data
    end.close()


def test_nothing_can_go_past_tls() -> None:
    end, thread = pair(lambda client: client.recv(1))
    for name, arguments in (
        ("sendall", (b"x",)),
        ("sendmsg", ([b"x"],)),
        ("sendto", (b"x", "a")),
        ("recvmsg", (1,)),
    ):
        with pytest.raises(NotImplementedError):
            getattr(end, name)(*arguments)
    end.close()
    thread.join(PATIENCE_S)


def test_what_is_not_tls_breaks_the_stream_after_its_handshake_too() -> None:
    def noise(client: ssl.SSLSocket) -> None:
        client.sendall(b"good")
        raw = socket.socket(fileno=client.detach())
        raw.sendall(b"plaintext " * 100)
        raw.close()

    end, thread = pair(noise)
    thread.join(PATIENCE_S)
    with pytest.raises(ssl.SSLError):
        received(end, [4])
    end.close()
