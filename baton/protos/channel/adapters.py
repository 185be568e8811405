"""LoRA adapters loaded, unloaded and listed while a worker runs."""

from __future__ import annotations

import msgspec

from baton.protos.channel.message import Message
from baton.protos.errors import ErrorInfo
from baton.protos.nouns import AdapterInfo


class AdapterPlace(msgspec.Struct, frozen=True, array_like=True):
    """Says which adapter is meant: its name, its directory (strictly beneath ``root``, where there is one), and the
    digest of its content, empty for whatever is there.
    """

    name: str
    path: str
    root: str = ""
    digest: str = ""


class LoadAdapter(Message):
    """Asks to hold an adapter; answered by AdapterIs once requests may use it, or by AdapterFailed."""

    ticket: int
    source: AdapterPlace
    pinned: bool


class UnloadAdapter(Message):
    """Asks to take no new request on ``adapter``, an id; answered by AdapterIs or AdapterFailed at once."""

    ticket: int
    adapter: str


class ListAdapters(Message):
    """Asks for the adapters in memory; answered by AdaptersAre."""

    ticket: int


class AdapterIs(Message):
    """Answers LoadAdapter and UnloadAdapter with the adapter as it is then."""

    ticket: int
    adapter: AdapterInfo


class AdapterFailed(Message):
    """Answers a LoadAdapter or UnloadAdapter that can't be done."""

    ticket: int
    error: ErrorInfo


class AdaptersAre(Message):
    """Answers ListAdapters with every adapter in memory, the least recently used first."""

    ticket: int
    adapters: tuple[AdapterInfo, ...]


class AdaptersChanged(Message):
    """Reports the ids of the adapters that take requests from now on, sorted."""

    adapters: tuple[str, ...]
