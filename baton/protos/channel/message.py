"""The base class of every message of the local channel."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of channel messages, encoded as tagged arrays, so that one decoder tells the members of a union apart.

    ``key`` is the I/O process's number for a request or transfer, ``ticket`` that for a question. ``epoch`` numbers
    the prefills for one lease.
    """
