"""Channel messages by which LoRA adapters are loaded, unloaded and listed while a worker runs; ``ticket`` pairs
question and answer.
"""

from __future__ import annotations

import msgspec

from baton.protos.channel.message import Message
from baton.protos.errors import ErrorInfo
from baton.protos.nouns import AdapterInfo


class AdapterPlace(msgspec.Struct, frozen=True, array_like=True):
    """Says which adapter is meant: its name, its directory, and the digest of its content, "" for any.

    ``root``, if not "", is a directory that ``path`` must lie strictly beneath.
    """

    name: str
    path: str
    root: str = ""
    digest: str = ""


class LoadAdapter(Message):
    """Asks the engine to load an adapter; answered by AdapterIs once requests may use it, or by AdapterFailed.

    ``pinned``: never evict it.
    """

    ticket: int
    source: AdapterPlace
    pinned: bool


class UnloadAdapter(Message):
    """Asks the engine to accept no new request on ``adapter``, an id; answered at once by AdapterIs or
    AdapterFailed.
    """

    ticket: int
    adapter: str


class ListAdapters(Message):
    """Asks for the adapters in memory; answered by AdaptersAre."""

    ticket: int


class AdapterIs(Message):
    """Answers LoadAdapter and UnloadAdapter with the adapter's state afterwards."""

    ticket: int
    adapter: AdapterInfo


class AdapterFailed(Message):
    """Answers a LoadAdapter or UnloadAdapter that failed."""

    ticket: int
    error: ErrorInfo


class AdaptersAre(Message):
    """Answers ListAdapters with every adapter in memory, the least recently used first."""

    ticket: int
    adapters: tuple[AdapterInfo, ...]


class AdaptersChanged(Message):
    """Reports the ids of all adapters that requests may use from now on, sorted."""

    adapters: tuple[str, ...]
