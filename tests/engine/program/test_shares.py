"""Tests what each rank has of a program, by rows and by layers, and what is refused in words."""

from __future__ import annotations

import itertools

import pytest

from baton.engine.program import ops as p
from baton.engine.program.rank_program import Rank
from baton.engine.program.shares import Widths
from baton.protos.errors import ConfigError
from tests.engine.test_models import program

STREAMS = {
    "model_type": "gemma3n_text",
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"] * 2,
    "num_kv_shared_layers": 3,
}
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
    assert [op for op in ops if not isinstance(op, p.Meet)] == list(whole.ops)
    meetings = [at for at, op in enumerate(ops) if isinstance(op, p.Meet)]
    assert len(meetings) == 4
    assert all(isinstance(ops[at - 1], p.RopeAppend) for at in meetings)


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_ranks_that_share_experts_have_each_of_them_once_and_all_else_whole(kind: str) -> None:
    whole = program(kind, num_hidden_layers=2)
    ranks = [Widths(ep=3).share(whole, index) for index in range(3)]
    for layer in whole.experts:
        runs = [op for rank in ranks for op in rank.program.ops if isinstance(op, p.OwnExperts)]
        own = [(op.first, op.first + op.count) for op in runs if op.gate_up == layer.gate_up]
        assert own == [Rank(index, 3).experts(layer.experts) for index in range(3)]
        assert [begin for begin, _ in own[1:]] == [end for _, end in own[:-1]]
    dealt = {name for op in whole.experts for name in (op.gate_up, op.down)}
    dealt |= {name for op in whole.experts if op.gate for name in (op.gate.gate_up_bias, op.gate.down_bias)}
    assert all(set(rank.rows) == dealt for rank in ranks)
    meetings = [op for op in ranks[0].program.ops if isinstance(op, p.Meet | p.Exchange)]
    assert len(meetings) == 3 * 2, "of a layer: keys and values, rows, what experts made of them"


@pytest.mark.parametrize("kind", ["gemma2", "mixtral", "qwen2"])
def test_a_stage_of_several_ranks_has_its_layers_columns(kind: str) -> None:
    whole = program(kind, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=3)
    ranks = [Widths(tp=2, pp=3).share(whole, index) for index in range(6)]
    for index, rank in enumerate(ranks):
        columns, layers = Widths(tp=2).share(whole, index % 2), Widths(pp=3).share(whole, index // 2)
        assert {name: columns.rows[name] for name in rank.rows} == rank.rows
        assert {weight.name for weight in rank.program.weights} == {
            weight.name for weight in layers.program.weights
        }
        assert (rank.own_kv, rank.vocab, rank.columns, rank.stages) == (columns.own_kv, columns.vocab, 2, 3)
        assert (rank.given, rank.handed) == (layers.given, layers.handed)
        assert rank.first_shared == index // 2 * columns.shared_floats
        assert sum(rank.widths.values()) <= columns.shared_floats


@pytest.mark.parametrize(
    ("kind", "widths", "says"),
    [
        ("llama", Widths(pp=5), "pp is 5, and the model has 4 layers; use 1 to 4"),
        ("llama", Widths(tp=2, cp=2), "tp is 2 and cp is 2: cp goes with no other number of ranks"),
        ("mixtral", Widths(pp=2, ep=2), "pp is 2 and ep is 2: cp goes with no other .* ep with an equal tp only"),
        ("mixtral", Widths(tp=2, ep=4), "tp is 2 and ep is 4: cp goes with no other .* ep with an equal tp only"),
        ("mixtral", Widths(ep=9), "ep is 9, and a layer has 4 experts only; use 1 to 4"),
        ("llama", Widths(ep=2), "ep is 2, and the model has no layers of experts; use 1"),
        ("llama", Widths(tp=4, pp=9), "tp is 4 and pp is 9, and the model has 4 layers; use 1 to 4"),
        ("llama", Widths(tp=16, pp=8), "tp is 16 and pp is 8: that is 128 ranks; use 64 at most"),
        ("llama", Widths(cp=65), "cp is 65; use 1 to 64"),
        ("llama", Widths(tp=0), "tp is 0; use 1 to 64"),
        ("deepseek_v3", Widths(cp=2), "cp is 2, and latent attention isn't shared by rows; use 1, or tp or pp"),
        ("qwen3_next", Widths(cp=2), "cp is 2, and a recurrent state isn't shared by rows; use 1, or tp or pp"),
        ("jamba", Widths(cp=2), "cp is 2, and a recurrent state isn't shared by rows; use 1, or tp or pp"),
        ("bert", Widths(pp=2), "pp is 2, and EmbedText runs on one rank only; use 1"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(kind: str, widths: Widths, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        widths.require(program(kind, num_hidden_layers=4))
    assert refused.value.param == says.partition(" is ")[0] or "and" in says
    assert refused.value.param in (*widths.several, "tp")


def test_stages_hand_on_every_residual_stream_and_say_where_one_reads_what_another_wrote() -> None:
    whole = program(**STREAMS)
    shares = [Widths(pp=3).share(whole, index) for index in range(3)]
    assert [op for share in shares for op in share.program.ops] == list(whole.ops)
    rows = {weight.name: sum(shape[0] for shape in weight.shapes) for weight in whole.weights}
    (hidden,) = {weight.shapes[0][0] for weight in whole.weights if weight.name == "norm"}
    for share in shares[1:]:
        given = dict(zip(share.given.registers, share.given.widths, strict=True))
        assert given == {"inputs": rows["inputs_project"], "streams": rows["streams_in"], "x": hidden}
    assert all(share.crosses for share in shares), "the last layers read K and V of earlier stages"
    assert not Widths(pp=2).share(program("llama", num_hidden_layers=6), 0).crosses


@pytest.mark.parametrize("count", [2, 3, 4])
def test_each_rank_norms_values_of_its_own_heads_and_has_queries_of_its_own(count: int) -> None:
    whole = program(**STREAMS)
    dim = whole.head_dim
    for index in range(count):
        share = Widths(tp=count).share(whole, index)
        (first, end), heads = share.own_kv, share.program.heads
        at = [op.first for op in share.program.ops if isinstance(op, p.NormPart)][: end - first]
        assert at == [(heads + end - first + kv) * dim for kv in range(end - first)]
        names = {op.weight for op in share.program.ops if isinstance(op, p.Linear) and op.out == "queries"}
        assert {sum(end - begin for begin, end in share.rows[name]) for name in names} == {heads * dim}


def test_the_widths_that_work_are_named_for_each_kind() -> None:
    whole = program("llama", num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=3)
    assert Widths(tp=2).possible(whole, 8) == (1, 2, 3, 4)
    assert Widths(cp=2).possible(whole, 4) == (1, 2, 3, 4)
    assert Widths(pp=2).possible(whole, 8) == (1, 2, 3)
    recurrent = program("qwen3_next", num_hidden_layers=4)
    assert Widths(pp=2).possible(recurrent, 8) == (1, 2, 3, 4)
    latent = program("deepseek_v3", num_hidden_layers=3)
    assert Widths(cp=2).possible(latent, 8) == (1,)
    assert Widths(pp=2).possible(latent, 8) == (1, 2, 3)
