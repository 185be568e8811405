"""Tests that a handshake's failure is told in words, whatever bytes a peer sent."""

from __future__ import annotations

import random
import ssl

import pytest

from baton.tls.reporting import PLAINTEXT, cause


def refused(context: ssl.SSLContext, is_server: bool, came: bytes) -> str:
    """Returns the cause of the failure of a handshake in which the peer sent ``came``; "" if it waits for more."""
    coming, going = ssl.MemoryBIO(), ssl.MemoryBIO()
    connection = context.wrap_bio(coming, going, server_side=is_server)
    for data in (b"", came):
        coming.write(data)
        try:
            connection.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLError as error:
            return cause(error)
    return ""


@pytest.mark.parametrize("is_server", [False, True])
def test_random_bytes_are_plaintext_in_words(is_server: bool) -> None:
    rng = random.Random(1)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    for number in range(6000):
        came = bytearray(rng.randbytes(64))
        if number % 2:  # they begin like a record, which seldom happens by itself
            came[:3] = rng.choice((20, 21, 22, 23, 128, came[0])), 3, rng.randrange(5)
        assert refused(context, is_server, bytes(came)) in ("", PLAINTEXT)
