"""Makes the frames of one KV handoff: those that open it, carry its blocks and close it.

Knows nothing of when they are sent, or of who waits for them.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from baton.kv.memory.host_pages import PageMemory
from baton.kv.wire import control, frames
from baton.kv.wire.frames import Block, Frame, Kind
from baton.prefill_worker.io.wire_plan import SentBlock, WirePlan
from baton.protos.channel import ShipBlock
from baton.protos.nouns import KvLayout


class Sender(msgspec.Struct, frozen=True):
    """The identity and KV layout of the sending worker, the same for all its handoffs."""

    worker_id: str
    model_id: str
    fingerprint: str
    layout: KvLayout


class Destination(msgspec.Struct, frozen=True):
    """Holds where one request's blocks are sent, and their number."""

    address: str
    lease: bytes
    epoch: int  # number of this prefill for the lease
    request_id: str
    total_blocks: int  # of the prompt, including pages of recurrent state
    tail_tokens: int  # tokens in the prompt's last block
    adapter_id: str = ""


class HandoffFrames:
    """Makes the frames of one handoff, with blocks converted by ``wire``.

    With ``from_card`` the stream reads the device's pages, for frames whose blocks are all resident there.
    """

    def __init__(
        self, memory: PageMemory, sender: Sender, to: Destination, wire: WirePlan, from_card: bool
    ) -> None:
        self._memory, self._sender, self._to, self._wire = memory, sender, to, wire
        self._from_card = from_card

    def opening(self) -> Frame:
        """Returns the OPEN frame, which describes the request and the layout of its blocks."""
        sender, to, paging = self._sender, self._to, self._wire.paging
        opening = control.Opening(
            request_id=to.request_id,
            layout=self._wire.layout,
            sender=sender.worker_id,
            total_blocks=to.total_blocks if paging is None else paging.blocks,
            tail_tokens=to.tail_tokens if paging is None else paging.tail_tokens,
            model_id=sender.model_id,
            fingerprint=sender.fingerprint,
            adapter_id=to.adapter_id,
            extents=self._wire.part,
            receivers=self._wire.receivers,
        )
        return self._frame(Kind.OPEN, control.encode_opening(opening))

    def blocks(self, batch: Sequence[SentBlock], wants_ack: bool) -> tuple[Frame, list[memoryview]]:
        """Returns the BLOCK frame of ``batch``, and the bytes that follow it."""
        found = [self._wire.payload(block, self._memory) for block in batch]
        payload, offsets = [view for view, _ in found], tuple([at for _, at in found if at is not None])
        flags = frames.ACK_NOW * wants_ack
        if self._from_card and len(offsets) == len(batch) and all(map(_is_resident, batch)):
            flags |= frames.RESIDENT
        return msgspec.structs.replace(
            self._frame(Kind.BLOCK, flags=flags),
            unit=self._wire.unit,
            blocks=tuple([Block(block.index, self._wire.hash(block)) for block in batch]),
            offsets=offsets if len(offsets) == len(batch) else (),
        ), payload

    def commit(self, closing: control.Closing) -> Frame:
        """Returns the COMMIT frame, which ends the handoff and carries the first token."""
        return self._frame(Kind.COMMIT, control.encode_closing(closing))

    def _frame(self, kind: Kind, body: bytes = b"", flags: int = 0) -> Frame:
        layout, to = self._wire.layout, self._to
        shard = self._wire.shard or (layout.shard_rank, layout.shard_count)
        return Frame(kind, to.lease, to.epoch, body, *shard, flags)


def _is_resident(block: SentBlock) -> bool:
    return isinstance(block, ShipBlock) and block.resident
