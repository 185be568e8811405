"""Two workers that lay KV out differently: bridged value for value, or refused in words before a byte moves."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from baton.kv.layout.bridge import (
    Bridge,
    bridge,
    codec_of,
    land,
    land_part,
    shard_of,
    wire_bytes,
    wire_layout,
    with_codec,
)
from baton.kv.layout.codecs import from_float32, to_float32
from baton.kv.layout.page import layout_for
from baton.protos.errors import ConfigError, LayoutMismatch
from baton.protos.nouns import KvLayout, LayerGroup

HEADS, DIM, LAYERS = 4, 8, 3
GROUPS = [LayerGroup("full", ("k", "v"), LAYERS, HEADS, DIM), LayerGroup("window", ("k", "v"), 2, 2 * HEADS, 4, 32)]


def layout(dtype: str = "float32", rank: int = 0, count: int = 1) -> KvLayout:
    groups = [msgspec.structs.replace(g, kv_heads=g.kv_heads // count) for g in GROUPS]
    return msgspec.structs.replace(layout_for(dtype, groups), shard_rank=rank, shard_count=count)


def values(seed: int = 1) -> list[np.ndarray]:
    """Returns what the model computed, group by group: [layer x plane x token][head][dim]."""
    rng = np.random.default_rng(seed)
    return [
        rng.normal(size=(g.layers * 2 * 16, g.kv_heads, g.head_dim)).astype(np.float32) for g in GROUPS
    ]  # fmt: skip


def page_of(layout: KvLayout, computed: list[np.ndarray]) -> memoryview:
    """The page that a worker of ``layout`` would hold of them."""
    parts = []
    for group, whole in zip(layout.groups, computed, strict=True):
        first = layout.shard_rank * group.kv_heads
        parts.append(from_float32(whole[:, first : first + group.kv_heads], layout.dtype).tobytes())
    page = memoryview(bytearray(b"".join(parts)))
    assert len(page) == layout.page_bytes
    return page


@pytest.mark.parametrize(
    ("sender", "receiver"),
    [
        (layout("float32"), layout("bfloat16")),
        (layout("float32"), layout("float16")),
        (layout("bfloat16"), layout("bfloat16", 1, 2)),
        (layout("float32"), layout("bfloat16", 3, 4)),
        (layout("float32", 1, 2), layout("float32", 2, 4)),
        (layout("float32", 1, 2), layout("float32", 3, 4)),
    ],
    ids=["dtype", "other dtype", "shard", "both", "first of my halves", "second of my halves"],
)
def test_what_arrives_is_what_the_receiver_would_have_computed(sender: KvLayout, receiver: KvLayout) -> None:
    made = bridge(sender, receiver)
    assert made is not None
    assert made.unit == receiver.page_bytes
    assert bytes(made.convert(page_of(sender, values()))) == bytes(page_of(receiver, values()))


def test_equal_layouts_need_no_bridge() -> None:
    assert bridge(layout(), layout()) is None


@pytest.mark.parametrize("codec", ["int8", "fp8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_codec_brings_nearly_the_same_values_in_fewer_bytes(codec: str, dtype: str) -> None:
    theirs = with_codec(layout(dtype), codec)
    made = bridge(layout(dtype), theirs)
    assert made is not None
    wire = made.convert(page_of(layout(dtype), values()))
    assert len(wire) == made.unit == wire_bytes(theirs) < theirs.page_bytes
    page = memoryview(bytearray(theirs.page_bytes))
    land(wire, page, theirs)
    sent, got = to_float32(page_of(layout(dtype), values()), dtype), to_float32(page, dtype)
    assert np.max(np.abs(sent - got)) < {"int8": 0.03, "fp8": 0.2, "int4": 0.3}[codec]
    assert np.mean(np.abs(sent - got)) / np.mean(np.abs(sent)) < {"int8": 0.02, "fp8": 0.04, "int4": 0.12}[codec]


def test_a_codec_and_a_shard_together() -> None:
    theirs = with_codec(layout("bfloat16", 1, 2), "int8")
    made = Bridge(layout("float32"), theirs)
    page = memoryview(bytearray(theirs.page_bytes))
    land(made.convert(page_of(layout(), values())), page, theirs)
    near = to_float32(page_of(layout("bfloat16", 1, 2), values()), "bfloat16")
    assert np.max(np.abs(near - to_float32(page, "bfloat16"))) < 0.05


def test_fidelity_keeps_coded_kv_apart_and_goes_one_way_only() -> None:
    coded = with_codec(layout("bfloat16"), "int8")
    assert (coded.fidelity, codec_of(coded), codec_of(layout())) == ("bfloat16~int8", "int8", "")
    assert bridge(coded, coded) is not None, "what is labelled as coded is coded on the wire too"
    with pytest.raises(LayoutMismatch, match="may have been through int8 are not taken as 'bfloat16'"):
        bridge(coded, layout("bfloat16"))
    with pytest.raises(LayoutMismatch, match="may have been through int8"):
        bridge(coded, with_codec(layout("bfloat16"), "fp8"))


ONE = layout_for("float32", 1, 2, 8)
PACED = layout_for("uint8", 1, 1, 8, "paced")
REFUSED = {
    "dtype: float32 pages would claim a precision": (layout("bfloat16"), layout("float32")),
    "dtype: float16 pages would claim": (layout("bfloat16"), layout("float16")),
    "holds heads 0…1, the receiver .* needs 2…3": (layout("float32", 0, 2), layout("float32", 1, 2)),
    "holds heads 0…1, the receiver .* needs 0…3; neither has all": (layout("float32", 0, 2), layout("float32")),
    "kv_heads: sender 2 x 1 shards, receiver 4 x 1": (ONE, layout_for("float32", 1, 4, 8)),
    "head_dim: sender 8, receiver 16": (ONE, layout_for("float32", 1, 2, 16)),
    r"groups\[0\].layers: sender 1, receiver 2": (ONE, layout_for("float32", 2, 2, 8)),
    "groups: sender has 2, receiver 1": (layout(), ONE),
    "page_bytes: receiver's 20480 aren't 32 tokens": (layout(), msgspec.structs.replace(layout(), block_tokens=32)),
    "block_tokens: sender's pages of 24 tokens": (msgspec.structs.replace(layout(), block_tokens=24), layout()),
    "fidelity: sender 'paced', receiver 'float32'": (PACED, layout_for("float32", 1, 1, 8)),
}  # fmt: skip


@pytest.mark.parametrize("text", REFUSED)
def test_what_cannot_be_bridged_is_refused_by_name(text: str) -> None:
    with pytest.raises(LayoutMismatch, match=text):
        bridge(*REFUSED[text])


def gathered(senders: list[KvLayout], receiver: KvLayout) -> memoryview:
    """The receiver's page, of what each of its senders sent."""
    page = memoryview(bytearray(receiver.page_bytes))
    for sender in senders:
        part, held = wire_layout(sender, receiver), page_of(sender, values())
        made = bridge(sender, part)
        wire = held if made is None else made.convert(held)
        assert len(wire) == wire_bytes(part)
        land_part(wire, page, part, receiver)
    return page


@pytest.mark.parametrize(
    ("dtype", "receiver", "senders"),
    [
        ("float32", layout("float32"), [(0, 2), (1, 2)]),
        ("bfloat16", layout("bfloat16"), [(3, 4), (1, 4), (0, 4), (2, 4)]),
        ("float32", layout("bfloat16"), [(1, 2), (0, 2)]),
        ("float32", layout("float32", 1, 2), [(2, 4), (3, 4)]),
    ],
    ids=["two to one", "four to one, in any order", "another dtype besides", "four to two"],
)
def test_a_page_gathered_of_shards_is_what_the_receiver_would_have_computed(
    dtype: str, receiver: KvLayout, senders: list[tuple[int, int]]
) -> None:
    found = gathered([layout(dtype, *shard) for shard in senders], receiver)
    assert bytes(found) == bytes(page_of(receiver, values()))


def test_coded_parts_are_gathered_too() -> None:
    receiver = with_codec(layout("bfloat16"), "int8")
    found = to_float32(gathered([layout("float32", rank, 2) for rank in range(2)], receiver), "bfloat16")
    assert np.max(np.abs(found - to_float32(page_of(layout("bfloat16"), values()), "bfloat16"))) < 0.05


def test_parts_that_are_none_are_refused_by_name() -> None:
    assert shard_of(layout(), 0, 1) == layout()
    for rank, count in ((2, 2), (0, 3), (0, 0)):
        whole = layout("float32", 0, 2) if count == 3 else layout()
        with pytest.raises(LayoutMismatch, match=f"shard {rank} of {count}, the receiver is .*: no part of it"):
            shard_of(whole, rank, count)
    with pytest.raises(LayoutMismatch, match="with 4, 8 KV heads aren't gathered of 8"):
        shard_of(layout(), 0, 8)
    with pytest.raises(LayoutMismatch, match="pages of uint8"):
        shard_of(PACED, 0, 1 << 4)


def test_a_codec_that_does_not_fit_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'zip' is unknown; choose one of none, int8, fp8"):
        with_codec(layout(), "zip")
    with pytest.raises(ConfigError, match="codes float KV, and this worker keeps paced"):
        with_codec(PACED, "int8")
    assert with_codec(layout(), "none") == layout()
