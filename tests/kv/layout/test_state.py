"""Tests state planes: their sizes and hashes, what differs in words, what a hybrid ships, and that damage is
seen.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton.decode_worker.io.handoff_sink import HandoffSink
from baton.decode_worker.io.intake import Intake
from baton.decode_worker.io.intake_lease import IntakeLease
from baton.engine.models import program_for
from baton.engine.program.config import ModelConfig
from baton.kv.layout import prefix
from baton.kv.layout.bridge import can_ship, shard_of, with_codec
from baton.kv.layout.page import in_pages_of, layout_for, require_same
from baton.kv.layout.state import state_bytes, state_hashes, state_offsets, state_pages
from baton.kv.memory import block_sums
from baton.kv.memory.host_pages import PageMemory
from baton.kv.wire import control
from baton.kv.wire.base import QueuedReplyStream
from baton.kv.wire.frames import Block, Frame, Kind
from baton.protos.channel import BlocksReceived
from baton.protos.errors import ConfigError, LayoutMismatch
from baton.protos.nouns import BLOCK_TOKENS, KvLayout, LayerGroup, StatePlane

STATES = StatePlane("conv", 3, (10, 3)), StatePlane("delta", 3, (2, 4, 5))
LAYOUT = layout_for("float32", 1, 1, 4, states=STATES)
FLIPS = 10_000


def changed(**fields: Any) -> KvLayout:
    return msgspec.structs.replace(LAYOUT, **fields)


def test_a_state_fills_whole_pages_of_the_pool_behind_one_another() -> None:
    assert state_bytes(LAYOUT) == 4 * (3 * 30 + 3 * 40)
    assert state_pages(LAYOUT) == 2  # of 512 bytes
    assert state_offsets(LAYOUT) == {"conv": 0, "delta": 360}
    assert state_pages(layout_for("float32", 1, 1, 4)) == 0


def test_hashes_of_a_state_are_of_its_block_and_place_and_of_nothing_else() -> None:
    one, other = prefix.block_hashes(prefix.root("f", "float32"), list(range(32)))
    found = [*state_hashes(one, 3), *state_hashes(other, 3), one, other]
    assert len(set(found)) == len(found)
    assert list(state_hashes(one, 2)) == found[:2]
    assert found[0].hex() == "4e31cbbe57d591f566956cedb27ce45595d394181e68a8dd90657f285d63e478"


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        (changed(states=()), "states[conv]: sender none, receiver 3 layers of 10 x 3"),
        (changed(states=STATES[:1]), "states[delta]: sender none, receiver 3 layers of 2 x 4 x 5"),
        (
            changed(states=(STATES[0], StatePlane("delta", 3, (2, 4, 6)))),
            "states[delta]: sender 3 layers of 2 x 4 x 6, receiver 3 layers of 2 x 4 x 5",
        ),
        (changed(states=(*STATES, StatePlane("dream", 1, (1,)))), "states: sender's 'dream' is unknown here"),
        (changed(states=STATES[::-1]), "states: sender ['delta', 'conv'], receiver ['conv', 'delta']"),
        (
            changed(groups=(LayerGroup("full", ("k", "w"), 1, 1, 4),)),
            "groups[0].planes: sender's 'w' is unknown here",
        ),
    ],
)
def test_what_differs_or_is_unknown_is_refused_by_name_before_a_byte_moves(theirs: KvLayout, words: str) -> None:
    with pytest.raises(LayoutMismatch) as caught:
        require_same(theirs, LAYOUT)
    assert words in caught.value.message
    assert not can_ship(theirs, LAYOUT)


def test_state_is_not_bridged_sharded_or_coded() -> None:
    other = layout_for("bfloat16", 1, 1, 4, states=STATES)
    assert can_ship(LAYOUT, LAYOUT)
    assert not can_ship(LAYOUT, other)
    assert not can_ship(LAYOUT, in_pages_of(LAYOUT, 32))
    with pytest.raises(ConfigError, match="recurrent state"):
        with_codec(LAYOUT, "int8")
    with pytest.raises(LayoutMismatch, match="recurrent state"):
        shard_of(layout_for("float32", 1, 2, 4, states=STATES), 0, 2)


def test_a_hybrid_of_three_to_one_ships_a_third_of_what_a_dense_model_does_at_32k() -> None:
    config = ModelConfig(Path("config.json"), QWEN3_NEXT, ())
    hybrid = program_for(config)
    (group,) = hybrid.groups
    blocks = 32768 // BLOCK_TOKENS
    own = layout_for("bfloat16", hybrid.groups, states=hybrid.states)
    dense = layout_for("bfloat16", [msgspec.structs.replace(group, layers=48)])
    assert (group.layers, own.states[1].layers) == (12, 36)
    state = state_pages(own) * own.page_bytes
    shipped = blocks * own.page_bytes + state
    assert shipped <= blocks * dense.page_bytes / 3 + state
    assert shipped - state == blocks * dense.page_bytes / 4


async def test_each_of_ten_thousand_flipped_bits_of_state_is_caught() -> None:
    rng, pages = random.Random(5), state_pages(LAYOUT)
    hashes = prefix.chain(prefix.root("f", "float32"), [1] * 20)
    hashes += state_hashes(hashes[-1], pages)
    memory, told = PageMemory.create(8, LAYOUT.page_bytes), list[Any]()
    intake = Intake(memory, LAYOUT, "f", told.append)
    intake.register(IntakeLease(1, b"l" * 16, 1, range(len(hashes)), hashes, 0))
    said = control.Opening("r", LAYOUT, "p0", len(hashes), 4, "m", "f")
    opening = Frame(Kind.OPEN, b"l" * 16, 1, control.encode_opening(said))
    whole = [rng.randbytes(LAYOUT.page_bytes) for _ in range(pages)]
    table = tuple(Block(2 + n, hashes[2 + n], block_sums.checksum(page)) for n, page in enumerate(whole))
    frame = Frame(Kind.BLOCK, b"l" * 16, 1, flags=1, unit=LAYOUT.page_bytes, blocks=table)
    for _ in range(FLIPS):
        sink = HandoffSink(intake, QueuedReplyStream())
        sink.take(opening)
        places = sink.place(frame)
        assert places is not None
        for place, page in zip(places, whole, strict=True):
            place[:] = page
        bit = rng.randrange(8 * LAYOUT.page_bytes)
        places[rng.randrange(pages)][bit // 8] ^= 1 << bit % 8
        sink.landed(frame, [block_sums.checksum(bytes(place)) for place in places])
        sink.over(None)
    await asyncio.sleep(0)
    assert intake.refusals == {"corrupt_frame": FLIPS}
    assert not any(isinstance(message, BlocksReceived) for message in told)


QWEN3_NEXT: dict[str, Any] = {
    "model_type": "qwen3_next",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 10,
}
