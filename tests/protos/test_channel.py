"""The local channel's messages: each is received by somebody, and what their docstrings name exists."""

from __future__ import annotations

import inspect
import re
from typing import get_args

import msgspec

from baton.protos import channel as ch
from baton.protos import errors, nouns
from baton.protos.channel.message import Message

MESSAGES = {kind for _, kind in inspect.getmembers(ch, inspect.isclass) if issubclass(kind, Message)}
NAMES = {*vars(ch), *vars(nouns), *vars(errors)}


def test_each_message_is_received_by_one_of_the_two_processes() -> None:
    received = {*get_args(ch.ToEngine), *get_args(ch.ToIo)}
    assert received == MESSAGES - {ch.Output}  # an Output is a part of Tokens
    assert not {*get_args(ch.ToEngine)} & {*get_args(ch.ToIo)}


def test_each_message_comes_back_from_its_bytes() -> None:
    decoder = msgspec.msgpack.Decoder(ch.ToEngine)
    for message in (ch.IntakeClosed(3), ch.Cancel(3, "deadline"), ch.Drain(), ch.BlocksReceived(1, 2, (3,), (3,))):
        assert decoder.decode(msgspec.msgpack.encode(message)) == message


def test_what_a_message_is_said_to_be_answered_by_exists() -> None:
    for text in [ch.__doc__ or "", *(kind.__doc__ or "" for kind in MESSAGES)]:
        named = re.findall(r"\b(?:[A-Z][a-z]+){2,}\b", text)
        assert set(named) <= NAMES, text
