"""The receiving side of a handoff: what is right is written, everything else is refused with nothing written."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.decode_worker.io.intake import Intake
from baton.decode_worker.io.intake_lease import IntakeLease
from baton.kv.layout import prefix
from baton.kv.layout.page import layout_for
from baton.kv.memory.host_pages import PageMemory
from baton.kv.pages.pool import PageLease, PagePool
from baton.kv.wire import control, frames
from baton.kv.wire.base import QueuedReplyStream, deliver
from baton.kv.wire.frames import HEADER_BYTES, Block, Frame, Kind
from baton.protos.channel import BlocksReceived, Commit, ReceiveClosed, ReceiveOpened
from baton.protos.errors import BatonError, CorruptFrame, LeaseUnknown
from baton.protos.nouns import TokenRun

LAYOUT = layout_for("float32", 1, 1, 4)
FINGERPRINT = "f" * 64
FIRST = TokenRun(0, (42,))


class Lease:
    """Holds one admitted request: its pages from a real pool, and the frames that a correct sender would send."""

    def __init__(self, rig: Rig, key: int, tokens: int, held: int = 0) -> None:
        self.rig, self.key, self.epoch = rig, key, 1
        self.id = random.Random(key).randbytes(16)
        self.hashes = prefix.chain(prefix.root(FINGERPRINT, "float32"), [key] * tokens)
        cached = self.hashes[:held]
        with rig.pool.open(cached, held) as earlier:
            for index, block in enumerate(cached):
                earlier.seal(index, block)
        self.pages: PageLease = rig.pool.open(cached, len(self.hashes))
        assert self.pages.held == held
        rig.intake.register(IntakeLease(key, self.id, 1, self.pages.pages, self.hashes, held))

    def payload(self, index: int) -> bytes:
        return random.Random(f"{self.key}.{index}").randbytes(LAYOUT.page_bytes)

    def frame(self, kind: Kind, **fields: Any) -> bytes:
        return frames.encode(Frame(**{"kind": kind, "lease": self.id, "epoch": self.epoch} | fields))

    def open(self, **changes: Any) -> bytes:
        said = {"total_blocks": len(self.hashes), "layout": LAYOUT, "fingerprint": FINGERPRINT} | changes
        opening = control.Opening(request_id="r", sender="p0", tail_tokens=1, model_id="m", **said)
        return self.frame(Kind.OPEN, body=control.encode_opening(opening))

    def block(self, index: int, **changes: Any) -> bytes:
        said = {"hash": dict(enumerate(self.hashes)).get(index, bytes(32)), "payload": self.payload(index)}
        return self.blocks([(index, said | changes)], **changes)

    def blocks(self, wanted: list[tuple[int, dict[str, Any]]], **changes: Any) -> bytes:
        """One frame with several blocks: their index, and what differs from a right sender's."""
        table, payload = [], []
        for index, said in wanted:
            said = {"hash": self.hashes[index], "payload": self.payload(index)} | said if len(wanted) > 1 else said
            table.append(Block(index, said["hash"], frames.checksum(said["payload"])))
            payload.append(said["payload"])
        fields = {"kind": Kind.BLOCK, "lease": self.id, "epoch": self.epoch, "flags": 1, "unit": len(payload[0])}
        changes = {name: value for name, value in changes.items() if name not in ("hash", "payload")}
        return frames.message(Frame(**fields | {"blocks": tuple(table)} | changes), payload)

    def commit(self, **changes: Any) -> bytes:
        body = control.encode_closing(control.Closing(FIRST, 16))
        return self.frame(Kind.COMMIT, **{"body": body} | changes)

    def everything(self) -> list[bytes]:
        return [self.open(), *(self.block(i) for i in range(self.pages.held, len(self.hashes))), self.commit()]


class Rig:
    """A real pool and real pages; the engine's part of the protocol by the book."""

    def __init__(self, pages: int = 32) -> None:
        self.pool = PagePool(pages)
        self.memory = PageMemory.create(pages, LAYOUT.page_bytes)
        self.told: list[msgspec.Struct] = []
        self.intake = Intake(self.memory, LAYOUT, FINGERPRINT, self.tell)
        self.leases: dict[int, Lease] = {}
        self.commits = True

    def admit(self, key: int, tokens: int, held: int = 0) -> Lease:
        self.leases[key] = lease = Lease(self, key, tokens, held)
        return lease

    def tell(self, message: Any) -> None:
        self.told.append(message)
        lease = self.leases[message.key]
        if isinstance(message, ReceiveOpened):
            lease.pages.hold()
        elif isinstance(message, ReceiveClosed):
            lease.pages.release()
        elif isinstance(message, Commit) and self.commits:
            self.intake.on_committed(message.key, message.epoch)

    def heard(self, kind: type) -> list[Any]:
        return [message for message in self.told if isinstance(message, kind)]

    async def exchange(self, *sent: bytes) -> list[Frame]:
        """Every reply to a stream that sends these frames and ends."""
        return [frames.decode(reply) async for reply in serve(self.intake, _frames(*sent))]

    async def refusal(self, *sent: bytes) -> BatonError:
        """The typed error that these frames end in."""
        return refused(await self.exchange(*sent))

    def written(self) -> dict[int, bytes]:
        """Pages that are not zero."""
        pages = ((page, bytes(self.memory.page(page))) for page in range(self.pool.pages))
        return {page: data for page, data in pages if any(data)}

    def end(self) -> None:
        """Closes everything, and asserts that nothing is left leased or in quarantine."""
        for key, lease in self.leases.items():
            self.intake.close(key)
            lease.pages.close()
        self.pool.check()
        counts = self.pool.snapshot_counts()
        assert (counts.leased, counts.quarantined, counts.leases) == (0, 0, 0), "pages leaked"
        assert self.intake.open_streams == 0


async def serve(intake: Intake, incoming: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """A transport that delivers message by message: what the intake replies, until one side ends the stream."""
    line = QueuedReplyStream()
    sink = intake.accept(line)
    reading = asyncio.ensure_future(_deliver(sink, line, incoming))
    try:
        while (reply := await line.get()) is not None:
            yield reply
    finally:
        reading.cancel()
        sink.over(None)


async def _deliver(sink: Any, line: QueuedReplyStream, incoming: AsyncIterator[bytes]) -> None:
    async for data in incoming:
        if line.ended:
            return
        deliver(sink, data)
    sink.over(None)


async def _frames(*sent: bytes) -> AsyncIterator[bytes]:
    for frame in sent:
        yield frame


def refused(replies: list[Frame]) -> BatonError:
    assert replies[-1].kind is Kind.ERROR, f"not refused: {replies[-1]}"
    assert Kind.ERROR not in [reply.kind for reply in replies[:-1]]
    return control.decode_error(replies[-1].body)


class Live:
    """A stream that stays open between frames."""

    def __init__(self, rig: Rig) -> None:
        self.queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.replies: AsyncGenerator[bytes, None] = serve(rig.intake, self._incoming())

    async def _incoming(self) -> AsyncIterator[bytes]:
        while (frame := await self.queue.get()) is not None:
            yield frame

    def send(self, frame: bytes | None) -> None:
        self.queue.put_nowait(frame)

    async def reply(self) -> Frame:
        return frames.decode(await asyncio.wait_for(anext(self.replies), 30))

    async def ask(self, frame: bytes) -> Frame:
        self.send(frame)
        return await self.reply()


@pytest.fixture
def rig() -> Any:
    made = Rig()
    yield made
    made.end()


# ---- what is right -------------------------------------------------------------------------------------


async def test_a_whole_handoff_is_written_reported_and_committed_in_order(rig: Rig) -> None:
    lease = rig.admit(1, 16 * 3 + 5)
    replies = await rig.exchange(*lease.everything())
    assert [Kind(reply.subject) for reply in replies] == [Kind.OPEN, *[Kind.BLOCK] * 4, Kind.COMMIT]
    assert rig.written() == {lease.pages.pages[i]: lease.payload(i) for i in range(4)}
    blocks = [BlocksReceived(1, 1, (i,)) for i in range(4)]
    assert rig.told == [ReceiveOpened(1, 1), *blocks, Commit(1, 1, FIRST, 16), ReceiveClosed(1, 1)]
    assert rig.intake.received_blocks == 4
    assert rig.intake.received_bytes == 4 * LAYOUT.page_bytes
    assert not rig.intake.refusals


async def test_blocks_already_held_are_not_expected(rig: Rig) -> None:
    lease = rig.admit(1, 40, held=2)
    await rig.exchange(lease.open(), lease.block(2), lease.commit())
    assert rig.heard(Commit)


async def test_blocks_may_come_in_any_order(rig: Rig) -> None:
    lease = rig.admit(1, 64)
    replies = await rig.exchange(lease.open(), *(lease.block(i) for i in (2, 0, 3, 1)), lease.commit())
    assert replies[-1].subject == Kind.COMMIT


async def test_acknowledgements_are_gathered_until_the_sender_wants_them(rig: Rig) -> None:
    lease = rig.admit(1, 64)
    sent = [lease.open(), *(lease.block(i, flags=0) for i in range(3)), lease.block(3), lease.commit()]
    replies = await rig.exchange(*sent)
    assert frames.acked_blocks(replies[1]) == (0, 1, 2, 3)
    assert rig.heard(BlocksReceived) == [BlocksReceived(1, 1, (0, 1, 2, 3))]


async def test_what_arrived_is_reported_even_if_nothing_was_acknowledged(rig: Rig) -> None:
    lease = rig.admit(1, 64)
    await rig.exchange(lease.open(), lease.block(0, flags=0), lease.block(2, flags=0))
    assert rig.told == [ReceiveOpened(1, 1), BlocksReceived(1, 1, (0, 2)), ReceiveClosed(1, 1)]


async def test_one_frame_may_carry_several_blocks(rig: Rig) -> None:
    lease = rig.admit(1, 16 * 5)
    replies = await rig.exchange(
        lease.open(), lease.blocks([(3, {}), (0, {})]), lease.blocks([(1, {}), (2, {}), (4, {})]), lease.commit()
    )
    assert [frames.acked_blocks(reply) for reply in replies[1:3]] == [(3, 0), (1, 2, 4)]
    assert rig.written() == {lease.pages.pages[i]: lease.payload(i) for i in range(5)}


async def test_a_preflights_bytes_are_checked_and_dropped(rig: Rig) -> None:
    page = b"x" * 100
    probe = Frame(Kind.PROBE, unit=100, blocks=(Block(0, bytes(32), frames.checksum(page)),) * 3)
    (reply,) = await rig.exchange(frames.message(probe, [page] * 3))
    assert (reply.kind, reply.subject) == (Kind.ACK, Kind.PROBE)
    assert isinstance(await rig.refusal(frames.message(probe, [page, page, b"y" * 100])), CorruptFrame)
    vast = msgspec.structs.replace(probe, unit=1 << 30)
    line = QueuedReplyStream()
    assert rig.intake.accept(line).place(vast) is None, "nothing is allocated for it"
    assert not rig.told
    assert not rig.written()


# ---- blocks that land before they are verified ---------------------------------------------------------


def land(rig: Rig, lease: Lease, raw: bytes, good: bool = True) -> tuple[Any, QueuedReplyStream, Frame]:
    """A transport that lands a frame's bytes in their places first, and is at the point of saying so."""
    line = QueuedReplyStream()
    sink = rig.intake.accept(line)
    deliver(sink, lease.open())
    frame, payload = frames.split(raw)
    places = sink.place(frame)
    assert places is not None
    for place, data in zip(places, payload, strict=True):
        place[:] = data if good else bytes(len(data))
    return sink, line, frame


def sums(frame: Frame) -> list[int]:
    return [block.checksum for block in frame.blocks]


async def test_a_block_counts_only_once_its_checksum_was_compared(rig: Rig) -> None:
    lease = rig.admit(1, 40)
    sink, _, frame = land(rig, lease, lease.blocks([(0, {}), (1, {}), (2, {})]))
    assert not rig.heard(BlocksReceived)
    deliver(sink, lease.commit())
    assert not rig.heard(Commit), "a commit is refused while a block is only on its way"
    sink.landed(frame, sums(frame))
    assert not rig.heard(BlocksReceived), "the stream was ended by the refusal"


async def test_a_block_that_lands_damaged_never_counts_and_its_page_is_free_to_be_filled_again(rig: Rig) -> None:
    lease = rig.admit(1, 16)
    sink, line, frame = land(rig, lease, lease.block(0), good=False)
    sink.landed(frame, [0])
    assert rig.intake.refusals == {"corrupt_frame": 1}
    assert not rig.heard(BlocksReceived)
    assert line.ended
    assert (await rig.exchange(*lease.everything()))[-1].subject == Kind.COMMIT
    assert rig.written() == {lease.pages.pages[0]: lease.payload(0)}


async def test_what_an_earlier_epoch_brought_is_not_landed_on_again(rig: Rig) -> None:
    lease = rig.admit(1, 40)
    await rig.exchange(lease.open(), lease.block(0))
    rig.intake.rearm(1, 2)
    lease.epoch = 2
    sink, *_ = land(rig, lease, lease.blocks([(0, {}), (1, {})]), good=False)
    sink.over(None)
    assert rig.written() == {lease.pages.pages[0]: lease.payload(0)}, "verified bytes stay"
    rig.intake.rearm(1, 3)
    lease.epoch = 3
    rest = [lease.open(), lease.blocks([(1, {}), (2, {})]), lease.commit()]
    assert (await rig.exchange(*rest))[-1].subject == Kind.COMMIT
    assert rig.written() == {lease.pages.pages[i]: lease.payload(i) for i in range(3)}


@pytest.mark.parametrize("end", ["rearm", "close"])
async def test_a_stream_that_is_ended_while_a_block_lands_counts_nothing_more(rig: Rig, end: str) -> None:
    lease = rig.admit(1, 16)
    sink, line, frame = land(rig, lease, lease.block(0))
    rig.intake.rearm(1, 2) if end == "rearm" else rig.intake.close(1)
    assert line.ended, "the transport writes nothing from this moment"
    assert rig.told[-1] == ReceiveClosed(1, 1)
    sink.landed(frame, sums(frame))
    assert sink.place(frame) is None
    assert not rig.heard(BlocksReceived)


# ---- what is wrong -------------------------------------------------------------------------------------

WRONG: dict[str, tuple[str, Callable[[Lease, Lease], list[bytes]]]] = {
    "another worker's lease": ("LeaseUnknown", lambda a, b: [a.block(0, lease=b"?" * 16)]),
    "an older epoch": ("StaleEpoch", lambda a, b: [a.block(0, epoch=0)]),
    "a coming epoch": ("StaleEpoch", lambda a, b: [a.block(0, epoch=2)]),
    "another request's lease on this stream": ("HandoffRefused", lambda a, b: [b.block(0)]),
    "another request's block under this lease": (
        "ForeignBlock",
        lambda a, b: [a.block(1, hash=b.hashes[1], payload=b.payload(1))],
    ),
    "a block at another's index": ("ForeignBlock", lambda a, b: [a.block(2, hash=a.hashes[1])]),
    "an index beyond the prompt": ("ForeignBlock", lambda a, b: [a.block(4)]),
    "an index beyond the prompt, with a real hash": ("ForeignBlock", lambda a, b: [a.block(4, hash=a.hashes[3])]),
    "the largest index": ("ForeignBlock", lambda a, b: [a.block(2**32 - 1)]),
    "a block that is shared with others": ("ForeignBlock", lambda a, b: [a.block(0)]),
    "the same block twice in one frame": ("ForeignBlock", lambda a, b: [a.blocks([(2, {}), (2, {})])]),
    "a right block beside one of another hash": (
        "ForeignBlock",
        lambda a, b: [a.blocks([(1, {}), (2, {"hash": b.hashes[2]})])],
    ),
    "blocks that lie elsewhere": ("CorruptFrame", lambda a, b: [a.block(1, flags=frames.ELSEWHERE, offsets=(0,))]),
    "the same block twice": ("ForeignBlock", lambda a, b: [a.block(2), a.block(2)]),
    "another shard": ("LayoutMismatch", lambda a, b: [a.block(1, shard_rank=1)]),
    "another number of shards": ("LayoutMismatch", lambda a, b: [a.block(1, shard_count=2)]),
    "a page too short": ("LayoutMismatch", lambda a, b: [a.block(1, payload=a.payload(1)[:-1])]),
    "a page too long": ("LayoutMismatch", lambda a, b: [a.block(1, payload=a.payload(1) + b"x")]),
    "an empty page": ("LayoutMismatch", lambda a, b: [a.block(1, payload=b"")]),
    "a commit before every block is in": ("HandoffRefused", lambda a, b: [a.block(1), a.block(3), a.commit()]),
    "a commit that says nothing": ("HandoffRefused", lambda a, b: [a.commit(body=b"\xff")]),
    "a second open": ("HandoffRefused", lambda a, b: [a.open()]),
    "a frame only receivers send": ("CorruptFrame", lambda a, b: [a.frame(Kind.ACK)]),
    "noise": ("CorruptFrame", lambda a, b: [b"noise"]),
    "nothing": ("CorruptFrame", lambda a, b: [b""]),
}


@pytest.mark.parametrize("name", WRONG)
async def test_a_wrong_frame_is_refused_by_its_own_type_and_writes_nothing(rig: Rig, name: str) -> None:
    expected, wrong = WRONG[name]
    lease, other = rig.admit(1, 60, held=1), rig.admit(2, 60)
    bad = wrong(lease, other)
    error = await rig.refusal(lease.open(), *bad)
    assert type(error).__name__ == expected
    assert error.message
    assert error.param
    assert len(rig.written()) == len(bad) - 1, "only right frames before it were written"
    assert rig.intake.refusals == {error.label: 1}
    assert rig.heard(ReceiveClosed) == [ReceiveClosed(1, 1)]
    assert not rig.heard(Commit)


@pytest.mark.parametrize(
    ("change", "expected", "param"),
    [
        ({"layout": layout_for("bfloat16", 1, 1, 4)}, "LayoutMismatch", "layout"),
        ({"fingerprint": "0" * 64}, "LayoutMismatch", "fingerprint"),
        ({"total_blocks": 3}, "ForeignBlock", "total_blocks"),
    ],
)
async def test_a_sender_that_differs_is_refused_before_any_byte_moves(
    rig: Rig, change: dict[str, Any], expected: str, param: str
) -> None:
    lease = rig.admit(1, 60)
    error = await rig.refusal(lease.open(**change), lease.block(0))
    assert (type(error).__name__, error.param) == (expected, param)
    assert not rig.written()
    assert not rig.told


@pytest.mark.parametrize("early", ["block", "commit"])
async def test_nothing_counts_before_open(rig: Rig, early: str) -> None:
    lease = rig.admit(1, 16)
    error = await rig.refusal(lease.block(0) if early == "block" else lease.commit(), lease.open())
    assert error.label == "handoff_refused"
    assert not rig.written()


async def test_one_flipped_bit_in_any_of_many_frames_is_refused_and_counts_for_nothing(rig: Rig) -> None:
    rng = random.Random(7)
    lease = rig.admit(1, 60)
    whole = lease.everything()
    for number in range(2500):
        damaged = bytearray(rng.choice(whole[1:]))
        bit = rng.randrange(8 * (HEADER_BYTES if number % 2 else len(damaged)))
        damaged[bit // 8] ^= 1 << bit % 8
        error = await rig.refusal(lease.open(), bytes(damaged))
        assert isinstance(error, CorruptFrame)
    assert rig.intake.refusals == {"corrupt_frame": 2500}
    assert not rig.heard(BlocksReceived)
    assert not rig.heard(Commit)
    assert (await rig.exchange(*whole))[-1].subject == Kind.COMMIT, "the lease is still good"


# ---- time ----------------------------------------------------------------------------------------------


async def test_a_late_frame_after_the_commit_is_refused(rig: Rig) -> None:
    lease = rig.admit(1, 40)
    await rig.exchange(*lease.everything())
    before = rig.written()
    zeros = lease.block(0, payload=bytes(LAYOUT.page_bytes))
    for late in ([lease.open()], [lease.open(), zeros], [zeros], [lease.commit()]):
        assert (await rig.refusal(*late)).label == "already_committed"
    assert rig.written() == before


async def turns() -> None:
    """Gives the event loop 50 turns, enough to read whatever was sent."""
    for _ in range(50):
        await asyncio.sleep(0)


async def test_nothing_is_written_between_the_commit_frame_and_the_engines_answer(rig: Rig) -> None:
    rig.commits = False
    lease, live = rig.admit(1, 16), Live(rig)
    await live.ask(lease.open())
    await live.ask(lease.block(0))
    live.send(lease.commit())
    waiting = asyncio.ensure_future(live.reply())
    await turns()
    assert (await rig.refusal(lease.open(), lease.block(0))).label == "already_committed"
    rig.intake.rearm(1, 2)
    assert refused([await waiting]).label == "stale_epoch"
    lease.epoch = 2
    assert (await rig.refusal(lease.open(), lease.block(0))).label == "already_committed"


async def test_a_request_that_ends_with_its_first_token_is_still_acknowledged(rig: Rig) -> None:
    rig.commits = False
    lease, live = rig.admit(1, 16), Live(rig)
    await live.ask(lease.open())
    await live.ask(lease.block(0))
    live.send(lease.commit())
    waiting = asyncio.ensure_future(live.reply())
    await turns()
    rig.intake.on_committed(1, 1)
    rig.intake.close(1)
    assert (await waiting).subject == Kind.COMMIT


async def test_a_rearm_ends_the_old_stream_at_once_and_keeps_what_is_in(rig: Rig) -> None:
    lease, live = rig.admit(1, 64), Live(rig)
    await live.ask(lease.open())
    await live.ask(lease.block(0))
    live.send(lease.block(1, flags=0))
    await asyncio.sleep(0)
    rig.intake.rearm(1, 2)
    assert rig.told[-1] == ReceiveClosed(1, 1), "the engine hears it before any other message"
    assert refused([await live.reply()]).label == "stale_epoch"
    arrived = {block for message in rig.heard(BlocksReceived) for block in message.blocks}
    lease.epoch = 2
    rest = [lease.block(i) for i in range(4) if i not in arrived]
    assert (await rig.exchange(lease.open(), *rest, lease.commit()))[-1].subject == Kind.COMMIT


async def test_frames_that_are_queued_when_the_epoch_ends_are_not_written(rig: Rig) -> None:
    lease, live = rig.admit(1, 64), Live(rig)
    await live.ask(lease.open())
    for index in range(4):
        live.send(lease.block(index))
    rig.intake.rearm(1, 2)
    assert refused([await live.reply()]).label == "stale_epoch"
    assert not rig.written()


async def test_a_second_prefill_may_send_again_what_the_first_one_sent(rig: Rig) -> None:
    lease = rig.admit(1, 40)
    await rig.exchange(lease.open(), lease.block(0))
    rig.intake.rearm(1, 2)
    lease.epoch = 2
    assert (await rig.exchange(*lease.everything()))[-1].subject == Kind.COMMIT


async def test_only_a_later_epoch_rearms(rig: Rig) -> None:
    lease = rig.admit(1, 16)
    rig.intake.rearm(1, 1)
    rig.intake.rearm(9, 5)
    assert (await rig.exchange(*lease.everything()))[-1].subject == Kind.COMMIT


async def test_a_closed_lease_ends_its_stream_and_takes_nothing_more(rig: Rig) -> None:
    lease, live = rig.admit(1, 64), Live(rig)
    await live.ask(lease.open())
    live.send(lease.block(0))
    rig.intake.close(1)
    lease.pages.close()
    assert rig.told[-1] == ReceiveClosed(1, 1)
    assert isinstance(refused([await live.reply()]), LeaseUnknown)
    assert (await rig.refusal(lease.open())).label == "lease_unknown"
    rig.intake.close(1)
    assert not rig.written()
    assert len(rig.heard(ReceiveClosed)) == 1


async def test_pages_of_an_ended_request_wait_for_its_stream(rig: Rig) -> None:
    lease, live = rig.admit(1, 64), Live(rig)
    await live.ask(lease.open())
    lease.pages.close()
    assert rig.pool.snapshot_counts().quarantined == 4
    rig.intake.close(1)
    assert rig.pool.snapshot_counts().free == rig.pool.pages
    await live.replies.aclose()


async def test_one_lease_has_one_stream_at_a_time(rig: Rig) -> None:
    lease, live = rig.admit(1, 16), Live(rig)
    await live.ask(lease.open())
    assert (await rig.refusal(lease.open())).label == "handoff_refused"
    assert (await live.ask(lease.block(0))).subject == Kind.BLOCK, "the first stream goes on"
    live.send(None)
    with pytest.raises(StopAsyncIteration):
        await live.reply()
    assert (await rig.exchange(*lease.everything()))[-1].subject == Kind.COMMIT


async def test_a_cancelled_stream_lets_go_of_its_lease(rig: Rig) -> None:
    lease, live = rig.admit(1, 32), Live(rig)
    await live.ask(lease.open())
    reading = asyncio.ensure_future(live.reply())
    await asyncio.sleep(0)
    reading.cancel()
    await asyncio.wait({reading})
    await live.replies.aclose()
    assert rig.told == [ReceiveOpened(1, 1), ReceiveClosed(1, 1)]


async def test_the_engines_refusal_of_a_commit_reaches_the_sender(rig: Rig) -> None:
    rig.commits = False
    lease, live = rig.admit(1, 16), Live(rig)
    await live.ask(lease.open())
    await live.ask(lease.block(0))
    live.send(lease.commit())
    waiting = asyncio.ensure_future(live.reply())
    await turns()
    rig.intake.close(1, BatonError("the sequence failed", "x"))
    assert refused([await waiting]).message == "the sequence failed"


# ---- anything in any order -----------------------------------------------------------------------------

KINDS = ["block", "block", "block", "commit", "open", "rearm", "close", "flip", "foreign", "stale"]
MOVES = st.lists(
    st.tuples(
        st.sampled_from(KINDS),
        st.integers(0, 1),
        st.integers(0, 5),
    ),
    max_size=25,
)


@given(MOVES)
def test_whatever_comes_a_page_holds_its_own_block_or_nothing(moves: list[tuple[str, int, int]]) -> None:
    asyncio.run(_play(moves))


async def _play(moves: list[tuple[str, int, int]]) -> None:
    rig = Rig()
    leases = [rig.admit(0, 50), rig.admit(1, 70, held=2)]
    streams = [Live(rig), Live(rig)]
    all_streams = list(streams)
    for move, who, index in moves:
        lease, other = leases[who], leases[1 - who]
        if move == "rearm":
            lease.epoch += 1
            rig.intake.rearm(who, lease.epoch)
            continue
        if move == "close":
            rig.intake.close(who)
            lease.pages.close()
            continue
        if move == "open":
            streams[who] = Live(rig)
            all_streams.append(streams[who])
        streams[who].send(_move(move, lease, other, index))
        reading = asyncio.ensure_future(streams[who].reply())
        await asyncio.wait({reading}, timeout=20)
        assert reading.done(), "every frame here is answered, or its stream has ended"
        reading.exception()
    right = {lease.pages.pages[i]: lease.payload(i) for lease in leases for i in range(len(lease.hashes))}
    held = set(leases[1].pages.pages[:2])
    for page, data in rig.written().items():
        assert data == right[page]
        assert page not in held
    for commit in rig.heard(Commit):
        lease = leases[commit.key]
        for index in range(lease.pages.held, len(lease.hashes)):
            assert bytes(rig.memory.page(lease.pages.pages[index])) == lease.payload(index)
    assert len(rig.heard(Commit)) == len({commit.key for commit in rig.heard(Commit)})
    for stream in all_streams:
        await stream.replies.aclose()
    assert sorted((m.key, m.epoch) for m in rig.heard(ReceiveOpened)) == sorted(
        (m.key, m.epoch) for m in rig.heard(ReceiveClosed)
    )
    rig.end()


def _move(move: str, lease: Lease, other: Lease, index: int) -> bytes:
    if move == "open":
        return lease.open()
    if move == "commit":
        return lease.commit()
    if move == "foreign":
        return lease.block(index, hash=(other.hashes * 2)[index], payload=other.payload(index))
    if move == "stale":
        return lease.block(index, epoch=lease.epoch - 1, payload=other.payload(index))
    if move == "flip":
        raw = bytearray(lease.block(index, payload=lease.payload(index)))
        raw[index * 13] ^= 1
        return bytes(raw)
    return lease.block(index)


def test_a_stream_that_was_refused_and_ends_late_leaves_the_one_after_it_alone() -> None:
    rig = Rig()
    lease, lines = rig.admit(1, 40), [QueuedReplyStream(), QueuedReplyStream()]
    first, second = map(rig.intake.accept, lines)
    deliver(first, lease.open())
    deliver(first, lease.block(0, payload=b"too short"))
    assert lines[0].ended
    deliver(second, lease.open())
    first.over(None)  # its connection is closed by now
    assert not lines[1].ended
    for sent in lease.everything()[1:]:
        deliver(second, sent)
    assert rig.heard(Commit)
    rig.end()
