"""Wrong frames and wrong senders are refused with nothing written."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from baton.kv.layout.page import layout_for
from baton.kv.wire import frames
from baton.kv.wire.control import Closing, encode_closing
from baton.kv.wire.frames import HEADER_BYTES, Kind
from baton.protos.channel import BlocksReceived, Commit, ReceiveClosed
from baton.protos.errors import CorruptFrame
from baton.protos.nouns import TokenRun
from tests.decode_worker.io.intake_rig import Lease, Rig, rig

__all__ = ["rig"]


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
    "a commit without a first token": (
        "HandoffRefused",
        lambda a, b: [
            *[a.block(i) for i in (1, 2, 3)],
            a.commit(body=encode_closing(Closing(TokenRun(60, ()), 0))),
        ],
    ),
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
