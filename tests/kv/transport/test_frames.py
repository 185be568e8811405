"""Frames: what is written is read, and no damaged bit passes."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.kv.transport import control, frames
from baton.kv.transport.frames import HEADER_BYTES, Frame, Kind
from baton.protos.errors import CorruptFrame, StaleEpoch
from baton.protos.nouns import TokenLogprob, TokenLogprobs, TokenRun

U16, U32 = st.integers(0, 2**16 - 1), st.integers(0, 2**32 - 1)
FRAMES = st.builds(
    Frame,
    kind=st.sampled_from(Kind),
    lease=st.binary(min_size=16, max_size=16),
    epoch=U32,
    index=U32,
    hash=st.binary(min_size=32, max_size=32),
    shard_rank=U16,
    shard_count=U16,
    flags=st.integers(0, 255),
    subject=U16,
    payload=st.binary(max_size=200),
)


@given(FRAMES)
def test_a_frame_is_read_as_it_was_written(frame: Frame) -> None:
    raw = frames.encode(frame)
    assert len(raw) == HEADER_BYTES + len(frame.payload)
    assert frames.decode(raw) == frame


@given(FRAMES)
def test_the_wire_form_is_fixed(frame: Frame) -> None:
    raw = frames.encode(frame)
    assert raw[:4] == b"BKV1"
    assert raw[4] == frame.kind
    assert raw[12:16] == frame.epoch.to_bytes(4, "little")
    assert (raw[16:32], raw[40:72], raw[80:]) == (frame.lease, frame.hash, frame.payload)


def test_every_flipped_bit_of_the_header_and_every_payload_bit_is_refused() -> None:
    raw = frames.encode(Frame(Kind.BLOCK, b"l" * 16, 1, 2, b"h" * 32, payload=random.Random(1).randbytes(64)))
    for bit in range(8 * len(raw)):
        damaged = bytearray(raw)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptFrame):
            frames.decode(damaged)


def test_one_flipped_bit_in_any_of_many_frames_is_refused() -> None:
    rng, refused = random.Random(2), 0
    for number in range(4000):
        payload = rng.randbytes(rng.choice((0, 1, 100, 4096, 65536)))
        raw = bytearray(
            frames.encode(Frame(Kind.BLOCK, rng.randbytes(16), 1, number, rng.randbytes(32), payload=payload))
        )
        bit = rng.randrange(8 * (len(raw) if number % 2 else HEADER_BYTES))
        raw[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptFrame):
            frames.decode(raw)
        refused += 1
    assert refused == 4000


@given(FRAMES, st.data())
def test_a_frame_cut_short_or_run_on_is_refused(frame: Frame, data: st.DataObject) -> None:
    raw = frames.encode(frame)
    with pytest.raises(CorruptFrame):
        frames.decode(raw[: data.draw(st.integers(0, len(raw) - 1))])
    with pytest.raises(CorruptFrame):
        frames.decode(raw + data.draw(st.binary(min_size=1, max_size=9)))


@given(st.binary(max_size=200))
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(CorruptFrame):
        frames.decode(noise)


@given(st.lists(U32, max_size=70))
def test_an_acknowledgement_names_its_blocks(blocks: list[int]) -> None:
    reply = frames.decode(frames.ack(Frame(Kind.BLOCK, b"l" * 16, 3), blocks))
    assert (reply.kind, reply.subject, reply.epoch) == (Kind.ACK, Kind.BLOCK, 3)
    assert list(frames.acked_blocks(reply)) == blocks


def test_a_ragged_acknowledgement_is_refused() -> None:
    with pytest.raises(CorruptFrame, match="u32"):
        frames.acked_blocks(Frame(Kind.ACK, payload=b"123"))


def test_control_payloads_are_read_as_they_were_written() -> None:
    run = TokenRun(3, (5, 6), (TokenLogprobs(TokenLogprob(5, -0.5, 1)),) * 2, "stop", 6)
    closing = control.Closing(run, 48)
    assert control.decode_closing(control.encode_closing(closing)) == closing
    error = control.decode_error(control.encode_error(StaleEpoch("epoch 1 is over", "epoch")))
    assert (type(error), error.message, error.param) == (StaleEpoch, "epoch 1 is over", "epoch")


def test_a_control_payload_that_does_not_parse_is_refused() -> None:
    for decode in (control.decode_opening, control.decode_closing, control.decode_error):
        with pytest.raises(CorruptFrame, match="payload"):
            decode(b"\xff\xff\xff")
