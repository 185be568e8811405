"""Strangers at a port that ranks' leads connect to: they delay nobody, and are let go of by time and by number."""

import socket

import pytest

from baton.engine.backends.ranks.hosts import greeting
from baton.engine.backends.ranks.hosts.control import NONCE, SAID, dial
from baton.engine.backends.ranks.hosts.greeting import GREET_S, Greeter
from tests.e2e.fleet import wait_for
from tests.engine.backends.ranks.other_host import serving_agent

FIELD = "worker.rank_hosts"


def connected(address: tuple[str, int]) -> socket.socket:
    return socket.create_connection(address, 30)


def bytes_until_the_end(sock: socket.socket) -> int:
    found = 0
    while got := len(sock.recv(4096)):
        found += got
    return found


def test_a_silent_and_a_trickling_stranger_delay_no_lead() -> None:
    with serving_agent() as agent:
        host, port = agent.address.split(":")
        with connected((host, int(port))) as silent, connected((host, int(port))) as trickling:
            trickling.sendall(bytes(10))
            dial(agent.address, b"", FIELD).close()  # within its own 10 s
            trickling.sendall(bytes(SAID - 10))
            assert bytes_until_the_end(trickling) == NONCE, "it was heard to its end, and has no proof"
            assert len(silent.recv(NONCE)) == NONCE


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_who_says_too_little_is_let_go_of_when_its_time_is_over() -> None:
    clock, listener = Clock(), socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    with Greeter(listener, 4, lambda: b"who?", clock) as greeter, connected(address) as slow:
        slow.sendall(b"it'")
        assert greeter.poll(30) == []  # it is taken, then read
        assert slow.recv(4) == b"who?"
        assert greeter.poll(30) == []
        clock.now = GREET_S - 1
        with connected(address) as late:
            assert greeter.poll(30) == []
            clock.now = GREET_S
            assert greeter.poll(0) == []
            assert bytes_until_the_end(slow) == 0
            late.sendall(b"mine, and more")
            (found,) = wait_for(lambda: greeter.poll(1))
            with found.sock:
                assert (found.asked, found.said) == (b"who?", b"mine")
                assert found.sock.recv(20) == b", and more", "not a byte more was taken"


def test_of_too_many_strangers_the_oldest_goes_and_a_lead_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(greeting, "MOST_WAITING", 3)
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    with Greeter(listener, 4) as greeter:
        strangers = []
        for _ in range(4):
            strangers.append(connected(address))
            assert greeter.poll(30) == []
        assert bytes_until_the_end(strangers[0]) == 0
        strangers[3].sendall(b"mine")
        (found,) = greeter.poll(30)
        assert found.said == b"mine"
        found.sock.close()
    for stranger in strangers[1:]:
        assert bytes_until_the_end(stranger) == 0, "all are closed with the greeter"
    for stranger in strangers:
        stranger.close()


def test_a_connection_that_goes_before_it_is_heard_leaves_nothing() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    with Greeter(listener, 4) as greeter:
        connected(listener.getsockname()).close()  # as a kubelet's TCP probe does
        wait_for(lambda: not greeter.poll(0.1) and not greeter._waiting)
        with connected(listener.getsockname()) as good:
            good.sendall(b"mine")
            (found,) = wait_for(lambda: greeter.poll(1))
            found.sock.close()
