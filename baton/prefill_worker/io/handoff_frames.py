"""The frames of one handoff: what opens it, its blocks, what closes it.

Knows nothing of when they are sent, or of who waits for them.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from baton.kv.layout.repaging import ReceiverBlock
from baton.kv.memory.host_pages import PageMemory
from baton.kv.wire import control, frames
from baton.kv.wire.frames import Block, Frame, Kind
from baton.prefill_worker.io.wire_plan import WirePlan
from baton.protos.channel import ShipBlock
from baton.protos.nouns import KvLayout


class Sender(msgspec.Struct, frozen=True):
    """The worker that sends: the same for every handoff of it."""

    worker_id: str
    model_id: str
    fingerprint: str
    layout: KvLayout


class Destination(msgspec.Struct, frozen=True):
    """Where one request's blocks go: ``total_blocks`` of the prompt, the last with ``tail_tokens`` tokens.

    Pages of recurrent state follow the prompt's blocks and are counted among them.
    """

    address: str
    lease: bytes
    epoch: int
    request_id: str
    total_blocks: int
    tail_tokens: int
    adapter_id: str = ""


class HandoffFrames:
    """Makes the frames of one handoff, whose blocks go as ``wire`` plans.

    With ``from_card`` a stream reads the device's pages, which a frame allows where all of its blocks are resident.
    """

    def __init__(
        self, memory: PageMemory, sender: Sender, to: Destination, wire: WirePlan, from_card: bool
    ) -> None:
        self._memory, self._sender, self._to, self._wire = memory, sender, to, wire
        self._from_card = from_card

    def opening(self) -> Frame:
        """Returns the frame that says what will come."""
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
        )
        return self._frame(Kind.OPEN, control.encode_opening(opening))

    def blocks(self, batch: Sequence[ShipBlock | ReceiverBlock], wants_ack: bool) -> tuple[Frame, list[memoryview]]:
        """Returns the frame of ``batch``, and the bytes that follow it."""
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
        """Returns the frame that ends the handoff, with the first token."""
        return self._frame(Kind.COMMIT, control.encode_closing(closing))

    def _frame(self, kind: Kind, body: bytes = b"", flags: int = 0) -> Frame:
        layout, to = self._wire.layout, self._to
        return Frame(kind, to.lease, to.epoch, body, layout.shard_rank, layout.shard_count, flags)


def _is_resident(block: ShipBlock | ReceiverBlock) -> bool:
    return isinstance(block, ShipBlock) and block.resident
