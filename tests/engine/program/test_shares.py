"""What each rank has of a program, by rows and by layers, and what is refused in words."""

from __future__ import annotations

import itertools

import pytest

from baton.engine.program import ops as p
from baton.engine.program.shares import Widths
from baton.protos.errors import ConfigError
from tests.engine.test_models import program

KINDS = ["gemma2", "gemma3_text", "gpt_oss", "llama", "mixtral", "olmo2", "phi3", "qwen2", "qwen3_moe"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [2, 3, 4])
def test_each_op_is_one_ranks_and_what_lies_between_ranks_is_the_residual_stream(kind: str, count: int) -> None:
    whole = program(kind, num_hidden_layers=4)
    shares = [Widths(pp=count).share(whole, index) for index in range(count)]
    assert [op for share in shares for op in share.program.ops] == list(whole.ops)
    attended = [[op.layer for op in share.program.ops if isinstance(op, p.PagedAttention)] for share in shares]
    assert {len(layers) for layers in attended} <= {4 // count, 4 // count + 1}
    for one, other in itertools.pairwise(shares):
        assert one.handed == other.given
        assert "x" in one.handed.registers
    assert shares[0].given.registers == ()
    assert shares[-1].handed == shares[0].last
    named = {weight.name for share in shares for weight in share.program.weights}
    assert named == {weight.name for weight in whole.weights}
    assert sum(len(share.program.weights) for share in shares) <= len(whole.weights) + count


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_shares_rows_has_every_op_and_meets_once_a_layer(kind: str) -> None:
    whole = program(kind, num_hidden_layers=4)
    ops = Widths(cp=3).share(whole, 1).program.ops
    assert [op for op in ops if not isinstance(op, p.AllGather)] == list(whole.ops)
    meetings = [at for at, op in enumerate(ops) if isinstance(op, p.AllGather)]
    assert len(meetings) == 4
    assert all(isinstance(ops[at - 1], p.RopeAppend) for at in meetings)


@pytest.mark.parametrize(
    ("kind", "widths", "says"),
    [
        ("llama", Widths(pp=5), "pp is 5, and the model has 4 layers; use 1 to 4"),
        ("llama", Widths(tp=2, pp=2), "tp is 2 and pp is 2: ranks share a model in one way; set the others to 1"),
        ("llama", Widths(cp=65), "cp is 65; use 1 to 64"),
        ("llama", Widths(tp=0), "tp is 0; use 1 to 64"),
        ("deepseek_v3", Widths(cp=2), "cp is 2, and LatentAttention runs on one rank only; use 1"),
        ("deepseek_v2", Widths(pp=2), "pp is 2, and LatentAttention runs on one rank only; use 1"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(kind: str, widths: Widths, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        widths.require(program(kind, num_hidden_layers=4))
    assert refused.value.param == says.partition(" is ")[0] or "and" in says


def test_the_widths_that_work_are_named_for_each_kind() -> None:
    whole = program("llama", num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=3)
    assert Widths(tp=2).possible(whole, 8) == (1, 2, 4)
    assert Widths(cp=2).possible(whole, 4) == (1, 2, 3, 4)
    assert Widths(pp=2).possible(whole, 8) == (1, 2, 3)
    latent = program("deepseek_v3", num_hidden_layers=3)
    assert Widths(cp=2).possible(latent, 8) == Widths(pp=2).possible(latent, 8) == (1,)
