"""The base of every message of the local channel. Knows nothing of what they say."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Makes a message a tagged array, so that one decoder tells the members of a union apart."""
