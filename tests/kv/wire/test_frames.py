"""Tests frames: what is written is read, and no damaged bit passes."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.kv.memory import block_sums
from baton.kv.wire import control, frames
from baton.kv.wire.frames import HEADER_BYTES, WITH_BLOCKS, Block, Frame, Kind
from baton.protos.errors import CorruptFrame, StaleEpoch
from baton.protos.nouns import TokenLogprob, TokenLogprobs, TokenRun

U16, U32 = st.integers(0, 2**16 - 1), st.integers(0, 2**32 - 1)
BLOCKS = st.lists(st.builds(Block, U32, st.binary(min_size=32, max_size=32), st.integers(0, 2**64 - 1)), max_size=5)
COMMON = {
    "lease": st.binary(min_size=16, max_size=16),
    "epoch": U32,
    "shard_rank": U16,
    "shard_count": U16,
    "subject": U16,
    "sequence": st.integers(0, 2**64 - 1),
}
CONTROL = st.builds(
    Frame, kind=st.sampled_from(sorted(set(Kind) - WITH_BLOCKS)), body=st.binary(max_size=200),
    flags=st.integers(0, 255), **COMMON,
)  # fmt: skip
CARRYING = st.builds(
    Frame, kind=st.sampled_from([Kind.BLOCK, Kind.PROBE]), flags=st.sampled_from([0, 1]), unit=st.integers(0, 50),
    blocks=BLOCKS.map(tuple), **COMMON,
)  # fmt: skip
FRAMES = CONTROL | CARRYING


def raw(frame: Frame) -> bytes:
    """Returns ``frame`` as a message with bytes for each block."""
    return frames.message(frame, [bytes(range(frame.unit))] * len(frame.blocks))


def block_frame(*pages: bytes, **fields: Any) -> tuple[Frame, bytes]:
    """A right BLOCK frame of ``pages``, and its message."""
    table = tuple(Block(i, b"h" * 32, block_sums.checksum(page)) for i, page in enumerate(pages))
    frame = Frame(Kind.BLOCK, b"l" * 16, 1, unit=len(pages[0]), blocks=table, **fields)
    return frame, frames.message(frame, pages)


def read(message: bytes) -> None:
    """Checks a message as a receiver does before it believes it."""
    frame, payload = frames.split(message)
    frames.check_blocks(frame, [block_sums.checksum(page) for page in payload])


@given(FRAMES)
def test_a_frame_is_read_as_it_was_written(frame: Frame) -> None:
    decoded, payload = frames.split(raw(frame))
    assert decoded == frame
    assert [bytes(page) for page in payload] == [bytes(range(frame.unit))] * len(frame.blocks)
    assert frames.body_bytes(raw(frame)) + HEADER_BYTES == len(frames.encode(frame))


@given(CONTROL)
def test_the_wire_form_is_fixed(frame: Frame) -> None:
    data = raw(frame)
    assert data[:4] == b"BKV1"
    assert data[4] == frame.kind
    assert data[12:16] == frame.epoch.to_bytes(4, "little")
    assert data[40:48] == frame.sequence.to_bytes(8, "little")
    assert (data[16:32], data[64:]) == (frame.lease, frame.body)


def test_the_wire_form_of_blocks_is_fixed() -> None:
    _, data = block_frame(b"first", b"other")
    assert int.from_bytes(data[32:36], "little") == 2
    assert int.from_bytes(data[36:40], "little") == 5
    said = block_sums.checksum(b"first").to_bytes(8, "little")
    assert data[64:108] == (0).to_bytes(4, "little") + b"h" * 32 + said
    assert data[152:] == b"firstother"


def test_blocks_that_lie_elsewhere_are_named_by_their_offsets() -> None:
    frame, _ = block_frame(b"first", b"other", flags=frames.ELSEWHERE, offsets=(7, 2**40))
    assert frames.split(frames.encode(frame)) == (frame, [])


def test_every_flipped_bit_of_header_body_and_blocks_is_refused() -> None:
    rng = random.Random(1)
    _, data = block_frame(rng.randbytes(64), rng.randbytes(64))
    read(data)
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptFrame):
            read(damaged)


def test_one_flipped_bit_in_any_of_ten_thousand_frames_is_refused() -> None:
    rng, refused = random.Random(2), 0
    for number in range(10_000):
        size = rng.choice((1, 100, 4096, 16384))
        _, message = block_frame(*(rng.randbytes(size) for _ in range(rng.choice((1, 1, 3)))))
        data = bytearray(message)
        bit = rng.randrange(8 * (len(data) if number % 2 else HEADER_BYTES))
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptFrame):
            read(data)
        refused += 1
    assert refused == 10_000


@given(FRAMES, st.data())
def test_a_frame_cut_short_or_run_on_is_refused(frame: Frame, data: st.DataObject) -> None:
    whole = raw(frame)
    with pytest.raises(CorruptFrame):
        frames.split(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(CorruptFrame):
        frames.split(whole + data.draw(st.binary(min_size=1, max_size=9)))


@given(st.binary(max_size=200), st.booleans())
def test_noise_is_refused(noise: bytes, with_magic: bool) -> None:
    with pytest.raises(CorruptFrame):
        frames.split(frames.MAGIC + noise if with_magic else noise)


@given(st.binary(min_size=60, max_size=60), st.sampled_from(Kind))
def test_whatever_a_header_says_little_is_read_after_it(rest: bytes, kind: Kind) -> None:
    try:
        size = frames.body_bytes(frames.MAGIC + bytes([kind]) + rest[1:])
    except CorruptFrame:
        return
    assert 0 <= size <= frames.MAX_BODY_BYTES


@given(st.lists(U32, max_size=70))
def test_an_acknowledgement_names_its_blocks(blocks: list[int]) -> None:
    reply = frames.decode(frames.ack(Frame(Kind.BLOCK, b"l" * 16, 3), blocks))
    assert (reply.kind, reply.subject, reply.epoch) == (Kind.ACK, Kind.BLOCK, 3)
    assert list(frames.acked_blocks(reply)) == blocks


def test_a_ragged_acknowledgement_is_refused() -> None:
    with pytest.raises(CorruptFrame, match="u32"):
        frames.acked_blocks(Frame(Kind.ACK, body=b"123"))


def test_control_payloads_are_read_as_they_were_written() -> None:
    run = TokenRun(3, (5, 6), (TokenLogprobs(TokenLogprob(5, -0.5, 1)),) * 2, "stop", 6)
    closing = control.Closing(run, 48)
    assert control.decode_closing(control.encode_closing(closing)) == closing
    error = control.decode_error(control.encode_error(StaleEpoch("epoch 1 is over", "epoch")))
    assert (type(error), error.message, error.param) == (StaleEpoch, "epoch 1 is over", "epoch")


def test_a_control_payload_that_does_not_parse_is_refused() -> None:
    for decode in (control.decode_opening, control.decode_closing, control.decode_error):
        with pytest.raises(CorruptFrame, match="body"):
            decode(b"\xff\xff\xff")
