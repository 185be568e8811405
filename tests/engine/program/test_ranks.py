"""Tests how a program is dealt among ranks: every row to somebody, heads with the KV they read, widths that can't
be.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.program import ops as p
from baton.engine.program.rank_program import Rank
from baton.engine.program.ranks import possible_widths, require_splittable, split
from baton.protos.errors import ConfigError
from tests.engine.test_models import program


@given(total=st.integers(1, 5000), count=st.integers(1, 16))
def test_parts_are_all_rows_in_order(total: int, count: int) -> None:
    parts = [Rank(index, count).part(total) for index in range(count)]
    assert [begin for begin, _ in parts] == [0, *(end for _, end in parts[:-1])]
    assert parts[-1][1] == total
    if total >= count:
        assert all(begin < end for begin, end in parts)


@given(group=st.integers(1, 8), kv_heads=st.integers(1, 12), data=st.data())
def test_each_query_head_is_one_ranks_who_has_the_kv_heads_of_its_queries_and_no_other(
    group: int, kv_heads: int, data: st.DataObject
) -> None:
    heads = group * kv_heads
    count = data.draw(st.integers(1, heads))
    ranges = [Rank(index, count).heads(heads, kv_heads) for index in range(count)]
    assert [begin for (begin, _), _ in ranges] == [0, *(end for (_, end), _ in ranges[:-1])]
    assert ranges[-1][0][1] == heads
    for (q0, q1), (k0, k1) in ranges:
        assert q0 < q1
        assert {q // group for q in range(q0, q1)} == set(range(k0, k1))
        assert (q1 - q0) % (k1 - k0) == 0, "each KV head of a rank serves as many of its queries"
    sizes = [q1 - q0 for (q0, q1), _ in ranges]
    assert max(sizes) <= max(group * -(-kv_heads // count), -(-group // max(1, count // kv_heads)))


@pytest.mark.parametrize(
    "kind", ["gemma2", "gpt_oss", "jamba", "llama", "mixtral", "phi3", "phimoe", "qwen2", "qwen3_moe"]
)
def test_ranks_have_all_rows_of_every_matrix_between_them(kind: str) -> None:
    whole = program(kind, num_attention_heads=4, num_key_value_heads=4, num_hidden_layers=2)
    rows = {weight.name: sum(shape[0] for shape in weight.shapes) for weight in whole.weights}
    for count in (2, 4):
        ranks = [split(whole, Rank(index, count)) for index in range(count)]
        for name in ranks[0].rows:
            parts = sorted(part for rank in ranks for part in rank.rows[name])
            assert [begin for begin, _ in parts] == [0, *(end for _, end in parts[:-1])], name
            assert parts[-1][1] == rows[name], name
        assert {frozenset(rank.widths.items()) for rank in ranks} == {frozenset(ranks[0].widths.items())}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("qwen3_moe", {"mlp_only_layers": [0]}),
        ("deepseek_v3", {"first_k_dense_replace": 1}),
        ("deepseek_v2", {"first_k_dense_replace": 1}),
    ],
)
def test_what_each_rank_computes_whole_is_in_no_shared_register(kind: str, changes: dict[str, Any]) -> None:
    own = split(program(kind, **changes), Rank(0, 2))
    mixed = {op.out for op in own.program.ops if isinstance(op, p.MixExperts | p.Combine)}
    dense = {op.out for op in own.program.ops if isinstance(op, p.Meet)}
    assert mixed & dense, "layers with and without experts write the same register"
    assert not mixed & set(own.widths)


@pytest.mark.parametrize(
    ("changes", "count", "says"),
    [
        (
            {"num_attention_heads": 14, "num_key_value_heads": 2},
            15,
            "the model has 14 attention heads; use 1 to 14",
        ),
        ({"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 8, "vocab_size": 9}, 16, "9 rows"),
        ({}, 65, "1 to 64 ranks"),
    ],
)
def test_a_width_that_cannot_be_is_refused_with_those_that_can(
    changes: dict[str, Any], count: int, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        require_splittable(program("llama", **changes), count)


def test_an_op_that_ranks_do_not_know_runs_on_one_only() -> None:
    class Strange(p.RmsNorm, frozen=True, tag=True):
        """An op of another architecture."""

    whole = program("llama", num_attention_heads=4, num_key_value_heads=4)
    strange = msgspec.structs.replace(whole, ops=(*whole.ops, Strange("x", None, "norm", 1e-5, "h")))
    assert possible_widths(whole, 4) == (1, 2, 3, 4)
    assert possible_widths(strange, 4) == (1,)
