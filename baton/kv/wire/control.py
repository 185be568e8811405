"""Encodes and decodes the protobuf bodies of OPEN, COMMIT and ERROR frames.

Knows nothing of streams or checks. A body that doesn't parse raises CorruptFrame.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec
from google.protobuf.message import DecodeError, Message

from baton.protos import convert
from baton.protos.errors import BatonError, CorruptFrame, from_info, to_info
from baton.protos.nouns import Extent, KvLayout, TokenRun
from baton.protos.v1 import worker_pb2

P = TypeVar("P", bound=Message)


class Opening(msgspec.Struct, frozen=True):
    """The contents of a sender's first frame: who it is and what it will send."""

    request_id: str
    layout: KvLayout
    sender: str  # the sender's worker id
    total_blocks: int
    tail_tokens: int  # tokens in the last block, at least 1
    model_id: str
    fingerprint: str
    adapter_id: str = ""
    extents: tuple[Extent, ...] = ()  # of a page that the stream brings; () for all of it
    receivers: int = 0  # hosts of the receiver's ranks that get a part of every page each; 0: this one gets all


class Closing(msgspec.Struct, frozen=True):
    """The contents of a sender's last frame."""

    first: TokenRun  # the first generated token or tokens
    cached_tokens: int  # prompt tokens that were found in a cache instead of computed


_PLAIN = tuple(name for name in Opening.__struct_fields__ if name not in ("layout", "extents"))


def _parse(message: P, body: bytes | bytearray | memoryview) -> P:
    try:
        message.ParseFromString(bytes(body))
    except DecodeError as error:
        raise CorruptFrame(f"the frame's body is not a {type(message).__name__}: {error}", "body") from error
    return message


def encode_opening(opening: Opening) -> bytes:
    """Returns ``opening`` as a serialized HandoffOpen."""
    fields = {name: getattr(opening, name) for name in _PLAIN}
    extents = convert.extents_to_pb(opening.extents)
    layout = convert.layout_to_pb(opening.layout)
    return worker_pb2.HandoffOpen(layout=layout, extents=extents, **fields).SerializeToString()


def decode_opening(body: bytes | bytearray | memoryview) -> Opening:
    """Returns the ``Opening`` of a serialized HandoffOpen. Raises CorruptFrame."""
    message = _parse(worker_pb2.HandoffOpen(), body)
    fields = {name: getattr(message, name) for name in _PLAIN}
    extents = convert.extents_from_pb(message.extents)
    return Opening(layout=convert.layout_from_pb(message.layout), extents=extents, **fields)


def encode_closing(closing: Closing) -> bytes:
    """Returns ``closing`` as a serialized HandoffCommit."""
    first = convert.run_to_pb(closing.first)
    return worker_pb2.HandoffCommit(first=first, cached_tokens=closing.cached_tokens).SerializeToString()


def decode_closing(body: bytes | bytearray | memoryview) -> Closing:
    """Returns the ``Closing`` of a serialized HandoffCommit. Raises CorruptFrame."""
    message = _parse(worker_pb2.HandoffCommit(), body)
    return Closing(convert.run_from_pb(message.first), message.cached_tokens)


def encode_error(error: BatonError) -> bytes:
    """Returns ``error`` as a serialized WireError."""
    return convert.error_to_pb(to_info(error)).SerializeToString()


def decode_error(body: bytes | bytearray | memoryview) -> BatonError:
    """Returns the error of a serialized WireError. Raises CorruptFrame."""
    return from_info(convert.error_from_pb(_parse(worker_pb2.WireError(), body)))
