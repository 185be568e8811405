"""Messages between a worker's two processes, over one local channel (see ``baton/worker/channel.py`` for framing).

The engine process owns the page pool, the leases and the step loop; the I/O process owns gRPC, the
handoff streams and the metrics. ``key`` is the I/O process's own number for one request. Nothing here
knows of sockets, asyncio or torch. The messages lie in a module for each matter; this one says who receives what.

A message that asks is named by an imperative (Admit, Cancel), one that reports by the event's past tense or by what
it carries (Admitted, BlocksReceived, Tokens); classes elsewhere are named by nouns. The unions at the end say which
process receives which messages: whoever dispatches one covers its whole union.

A page's life between the two: the engine never reuses a page of a closed lease while the I/O process
may still read or write it. ``ReceiveOpened`` and ``BlocksReady`` take a hold, ``ReceiveClosed`` and ``SendClosed``
give it back; pages of a lease that closed meanwhile wait in quarantine. A lease's intake is open from ``Admitted``
until the I/O process sends ``Commit``, ``Cancel`` or ``IntakeClosed``: after these it opens no receive any more.
"""

from __future__ import annotations

from collections.abc import Callable

from baton.protos.channel.adapters import (
    AdapterFailed,
    AdapterIs,
    AdapterPlace,
    AdaptersAre,
    AdaptersChanged,
    ListAdapters,
    LoadAdapter,
    UnloadAdapter,
)
from baton.protos.channel.cache import (
    CacheChanged,
    CacheIdle,
    Fill,
    Filled,
    Filling,
    Keep,
    KeepAnswer,
    Pin,
    Pinned,
    Unkeep,
    Unpin,
)
from baton.protos.channel.decode import (
    Admit,
    Admitted,
    BlocksReceived,
    CloseReceive,
    Commit,
    Committed,
    Ended,
    IntakeClosed,
    Output,
    Rearm,
    Rearmed,
    ReceiveClosed,
    ReceiveOpened,
    Refused,
    Tokens,
)
from baton.protos.channel.lifecycle import (
    AskSnapshot,
    Cancel,
    Drain,
    EngineFailed,
    EngineReady,
    HostSender,
    RoleIs,
    SetRole,
    Shutdown,
    SnapshotIs,
    Stats,
)
from baton.protos.channel.prefill import BlocksReady, Prefill, PrefillDone, PrefillFailed, SendClosed, ShipBlock

ToEitherEngine = (
    AskSnapshot | Drain | Shutdown | SetRole | Pin | Unpin | Keep | Unkeep | Fill | Filled
    | LoadAdapter | UnloadAdapter | ListAdapters
)  # fmt: skip
ToDecodeEngine = (
    ToEitherEngine | Cancel | Admit | Rearm | ReceiveOpened | ReceiveClosed | IntakeClosed | BlocksReceived | Commit
)  # fmt: skip
ToPrefillEngine = ToEitherEngine | Cancel | Prefill | SendClosed
ToEngine = ToDecodeEngine | ToPrefillEngine

FromDecodeEngine = Admitted | Refused | Rearmed | Committed | Tokens | Ended | CloseReceive
FromPrefillEngine = BlocksReady | PrefillDone | PrefillFailed
FromEitherRole = FromDecodeEngine | FromPrefillEngine
FromCache = Pinned | KeepAnswer | Filling | CacheChanged | CacheIdle
FromAdapters = AdapterIs | AdapterFailed | AdaptersAre | AdaptersChanged
ToIo = FromEitherRole | FromCache | FromAdapters | EngineReady | EngineFailed | SnapshotIs | RoleIs | Stats

SendToEngine = Callable[[ToEngine], None]
"""Hands the engine a message; it never blocks."""

__all__ = [
    "AdapterFailed",
    "AdapterIs",
    "AdapterPlace",
    "AdaptersAre",
    "AdaptersChanged",
    "Admit",
    "Admitted",
    "AskSnapshot",
    "BlocksReady",
    "BlocksReceived",
    "CacheChanged",
    "CacheIdle",
    "Cancel",
    "CloseReceive",
    "Commit",
    "Committed",
    "Drain",
    "Ended",
    "EngineFailed",
    "EngineReady",
    "Fill",
    "Filled",
    "Filling",
    "FromAdapters",
    "FromCache",
    "FromDecodeEngine",
    "FromEitherRole",
    "FromPrefillEngine",
    "HostSender",
    "IntakeClosed",
    "Keep",
    "KeepAnswer",
    "ListAdapters",
    "LoadAdapter",
    "Output",
    "Pin",
    "Pinned",
    "Prefill",
    "PrefillDone",
    "PrefillFailed",
    "Rearm",
    "Rearmed",
    "ReceiveClosed",
    "ReceiveOpened",
    "Refused",
    "RoleIs",
    "SendClosed",
    "SendToEngine",
    "SetRole",
    "ShipBlock",
    "Shutdown",
    "SnapshotIs",
    "Stats",
    "ToDecodeEngine",
    "ToEitherEngine",
    "ToEngine",
    "ToIo",
    "ToPrefillEngine",
    "Tokens",
    "Unkeep",
    "UnloadAdapter",
    "Unpin",
]
