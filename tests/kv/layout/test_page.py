"""Tests layouts: sizes, and mismatches in words."""

from __future__ import annotations

import msgspec
import pytest

from baton.engine.backends.paced.runner import paced_spec
from baton.kv.layout.page import group_offsets, layout_for, require_same
from baton.protos.errors import ConfigError, LayoutMismatch
from baton.protos.nouns import LayerGroup


def test_a_page_holds_both_planes_of_every_layer() -> None:
    layout = layout_for("bfloat16", 32, 8, 128)
    assert layout.page_bytes == 32 * 2 * 16 * 8 * 128 * 2
    assert layout.fidelity == "bfloat16"


def test_groups_follow_one_another() -> None:
    groups = (LayerGroup("full", ("k", "v"), 2, 2, 8), LayerGroup("window", ("latent",), 3, 1, 4, 64))
    layout = layout_for("float32", groups, fidelity="fp8-e4m3")
    assert group_offsets(layout) == [0, 2 * 2 * 16 * 2 * 8 * 4]
    assert layout.page_bytes == 2 * 2 * 16 * 2 * 8 * 4 + 3 * 16 * 4 * 4
    assert layout.fidelity == "fp8-e4m3"


def test_equal_layouts_agree() -> None:
    require_same(layout_for("float32", 2, 2, 8), layout_for("float32", 2, 2, 8))


def test_a_mismatch_names_every_difference() -> None:
    sender, receiver = layout_for("float32", 2, 2, 8), layout_for("bfloat16", 2, 4, 8)
    with pytest.raises(LayoutMismatch) as caught:
        require_same(sender, receiver)
    for words in (
        "dtype: sender 'float32', receiver 'bfloat16'",
        "groups[0].kv_heads: sender 2, receiver 4",
        "fidelity: sender 'float32', receiver 'bfloat16'",
    ):
        assert words in caught.value.message
    assert "page_bytes" not in caught.value.message
    assert not caught.value.retryable


@pytest.mark.parametrize(
    ("field", "value"),
    [("shard_rank", 1), ("shard_count", 2), ("version", 2), ("block_tokens", 32), ("page_bytes", 1)],
)
def test_any_other_field_counts_too(field: str, value: int) -> None:
    layout = layout_for("float32", 2, 2, 8)
    with pytest.raises(LayoutMismatch, match=field):
        require_same(msgspec.structs.replace(layout, **{field: value}), layout)


def test_another_number_of_groups_is_named() -> None:
    one = layout_for("float32", [LayerGroup("full", ("k", "v"), 2, 2, 8)])
    two = layout_for("float32", [LayerGroup("full", ("k", "v"), 1, 2, 8)] * 2)
    with pytest.raises(LayoutMismatch, match="groups"):
        require_same(one, two)


def test_an_unknown_dtype_lists_the_choices() -> None:
    with pytest.raises(ConfigError, match="float32, bfloat16"):
        layout_for("float33", 1, 1, 1)


def test_an_empty_page_is_refused() -> None:
    with pytest.raises(ConfigError, match="empty"):
        layout_for("float32", 0, 1, 1)


def test_the_paced_engines_own_plane_is_known() -> None:
    layout = paced_spec("test", 32, 997, 4096).layout
    require_same(layout, layout)
