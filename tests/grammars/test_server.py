"""The process that forks grammar processes: how many there are, and that one which was ended starts again."""

from __future__ import annotations

import select
import socket

import msgspec
import pytest

from baton.grammars import server
from baton.grammars.messages import Compile, CompileResult, FromChild, TokenizerSpec


def compiled(of: server.ForkServer) -> CompileResult:
    child = of.child()
    child.send(Compile("regex", "a"))
    poller = select.poll()
    poller.register(child.socket, select.POLLIN)
    message: FromChild | None = None
    while not isinstance(message, CompileResult):
        assert poller.poll(60_000)
        message = child.receive()
    child.kill()
    return message


def test_a_process_has_few_servers_and_one_that_ended_for_it_starts_again() -> None:
    specs = [TokenizerSpec("", 300 + i) for i in range(server.MOST_SERVERS + 1)]
    first = server.server_for(specs[0])
    assert compiled(first).error == ""
    for spec in specs[1:]:
        server.server_for(spec)
    assert len(server._SERVERS) == server.MOST_SERVERS
    assert first._process is None
    assert compiled(first).error == ""
    first.close()


def test_what_a_process_said_before_it_died_is_heard_though_it_left_something_unread() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    child = server.ForkedGrammar(server.ForkServer(TokenizerSpec("", 300)), 0, ours)
    child.send(Compile("regex", "a"))
    theirs.send(msgspec.msgpack.encode(said := CompileResult("", 1)))
    theirs.close()
    assert child.receive() == said
    with pytest.raises(EOFError):
        child.receive()
    ours.close()
