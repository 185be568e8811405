"""Several ranks' answers have the bits of one rank's, for every architecture, width and form of weight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baton.engine.backends.ranks import runner
from baton.engine.program.program import Program
from baton.engine.program.ranks import require_splittable
from baton.engine.program.shares import Widths
from baton.kernels.abi import native
from baton.protos.errors import BatonError, ConfigError
from tests.conformance.checkpoints import make
from tests.conformance.kinds import KINDS
from tests.conformance.small_kinds import SMALL
from tests.engine.backends.ranks.same_bits import same_bits
from tests.engine.test_models import program
from tests.thorough import first_now

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native kernels here")

WIDTHS = [
    ("jamba", 3), ("phimoe", 2), ("cohere2", 4),
    ("gpt_oss", 2), ("qwen2_mixed", 3), ("olmo2", 3), ("granite_hybrid", 4), ("deepseek_v3", 3), ("mistral", 5),
    ("gemma2", 6),
    ("gemma2", 4), ("llama3", 4),
    ("gemma3", 3), ("olmo3", 2), ("olmo2", 4),
    ("qwen2_mixed", 4), ("llama2", 2), ("llama_yarn", 4), ("qwen3", 3), ("mixtral", 4), ("qwen2", 2),
    ("llama_linear", 4), ("llama3", 6), ("qwen2_mixed", 2), ("llama_dynamic", 2), ("mistral_full", 4),
    ("qwen3_next", 2), ("granite_hybrid", 3), ("bamba", 2), ("qwen3_5", 3), ("granite_hybrid", 2), ("qwen3_5", 2),
    ("qwen3_moe_norm", 4), ("qwen3_bias", 2), ("qwen3_moe", 2), ("gemma3", 2), ("gemma3", 4), ("phi3", 2),
    ("phi3_long", 2), ("gemma2", 2), ("llama3", 2), ("qwen3_moe", 3), ("phi3", 3), ("gpt_oss", 5), ("qwen2", 3),
    ("deepseek_v2", 2), ("deepseek_v2_lite", 4), ("qwen2_moe", 2), ("glm4_moe", 2),
    ("starcoder2", 2), ("nemotron_h", 2), ("llama4", 2), ("hunyuan_dense", 4), ("hunyuan_moe", 2), ("glm4", 3),
    ("glm", 2), ("ernie4_5", 2), ("cohere", 2), ("ministral3", 4), ("jamba", 2),
    ("granite", 2), ("smollm3", 2), ("exaone4", 2), ("ministral", 4), ("seed_oss", 2), ("gemma", 2), ("olmoe", 2),
    ("qwen3_5_moe", 2), ("granite_dense", 2), ("minimax_m2", 4), ("ernie4_5_moe", 2), ("glm4_moe_lite", 2),
    ("gemma3n", 2), ("gemma3n", 3), ("gemma3n", 4), ("cohere2", 2), ("deepseek_v3", 2), ("glm4", 2),
    ("hunyuan_dense", 2), ("minimax_m2", 2), ("ministral", 2), ("ministral3", 2), ("mistral", 2), ("mixtral", 2),
    ("olmo2", 2), ("cohere", 3), ("ernie4_5", 3), ("ernie4_5_moe", 3), ("exaone4", 3), ("gemma", 3), ("glm", 3),
    ("glm4_moe", 3), ("glm4_moe_lite", 3), ("gpt_oss", 3), ("granite", 3), ("hunyuan_moe", 3), ("llama4", 3),
    ("olmo3", 3), ("olmoe", 3), ("phimoe", 3), ("qwen2_moe", 3), ("seed_oss", 3),
    ("smollm3", 3), ("starcoder2", 3),
]  # fmt: skip
ROWS = [
    ("llama4", 2),
    ("qwen3_moe", 3), ("gemma2", 2), ("olmo2", 2), ("llama3", 4), ("qwen2_mixed", 2), ("gpt_oss", 2),
    ("mixtral", 2), ("gemma3", 2), ("mistral", 3), ("qwen3", 2), ("phi3_long", 3),
    ("phimoe", 2), ("starcoder2", 3), ("cohere2", 2), ("hunyuan_dense", 2), ("cohere", 2), ("ernie4_5", 3),
    ("exaone4", 2), ("gemma", 2), ("glm", 2), ("glm4", 2), ("glm4_moe", 2), ("granite", 3), ("hunyuan_moe", 2),
    ("ministral", 2), ("ministral3", 2), ("olmo3", 2), ("olmoe", 2), ("qwen2_moe", 2), ("seed_oss", 2),
    ("smollm3", 2), ("minimax_m2", 2), ("ernie4_5_moe", 2),
    ("gemma3n", 2), ("gemma3n", 3), ("ernie4_5", 2), ("granite", 2), ("llama2", 2), ("mistral", 2), ("phi3", 2),
    ("qwen3_moe", 2), ("starcoder2", 2),
]  # fmt: skip
LAYERS = [
    ("gemma3n", 3),
    ("starcoder2", 2), ("jamba", 2),
    ("gemma2", 2), ("qwen3_next", 2), ("deepseek_v2", 2), ("qwen3_moe", 2), ("olmo2", 3), ("bamba", 2),
    ("qwen3_5", 2), ("granite_hybrid", 2), ("glm4_moe", 2), ("llama3", 2),
    ("qwen2_mixed", 2), ("gpt_oss", 2),
    ("mixtral", 2), ("gemma3", 2), ("mistral", 2), ("qwen3", 2), ("phi3_long", 2),
    ("phimoe", 2), ("cohere2", 3), ("llama4", 2), ("nemotron_h", 2), ("cohere", 2), ("deepseek_v3", 2),
    ("ernie4_5", 2), ("exaone4", 2), ("gemma", 2), ("glm", 2), ("glm4", 2), ("granite", 2), ("hunyuan_dense", 2),
    ("hunyuan_moe", 2), ("ministral", 2), ("ministral3", 2), ("olmo3", 2), ("olmoe", 2), ("qwen2_moe", 2),
    ("qwen3_5_moe", 2), ("seed_oss", 2), ("smollm3", 2), ("minimax_m2", 2), ("ernie4_5_moe", 2),
    ("glm4_moe_lite", 2), ("cohere2", 2), ("gemma3n", 2), ("olmo2", 2),
]  # fmt: skip
DEALT = [
    ("qwen3_moe", "ep", 3), ("gpt_oss", "ep", 2), ("qwen2_mixed", "tp+pp", 2), ("mixtral", "ep", 2),
    ("qwen3_moe_norm", "tp+pp", 2), ("gemma2", "tp+pp", 2), ("mixtral", "tp+pp+ep", 2), ("qwen3_moe", "ep", 4),
    ("qwen3_moe_norm", "ep", 5), ("gpt_oss", "tp+pp", 2), ("llama3", "tp+pp", 2), ("phi3_long", "tp+pp", 2),
    ("mistral", "tp5+pp2", 10), ("gpt_oss", "tp+ep", 2), ("qwen3", "tp3+pp2", 6), ("olmo2", "tp+pp", 2),
    ("qwen3_next", "tp+pp", 2), ("bamba", "tp+pp", 2), ("granite_hybrid", "tp3+pp2", 6),
    ("deepseek_v3", "tp+pp", 2), ("qwen2_moe", "ep", 2), ("deepseek_v2", "tp+ep", 2), ("glm4_moe", "ep", 3),
    ("phimoe", "ep", 2), ("llama4", "ep", 2), ("jamba", "tp+pp", 2), ("phimoe", "tp+pp", 2),
    ("cohere2", "tp+pp", 2), ("starcoder2", "tp+pp", 2), ("hunyuan_moe", "ep", 2), ("olmoe", "ep", 2),
    ("cohere", "tp+pp", 2), ("deepseek_v2", "tp+pp", 2), ("ernie4_5", "tp+pp", 2), ("exaone4", "tp+pp", 2),
    ("gemma", "tp+pp", 2), ("gemma3", "tp+pp", 2), ("glm", "tp+pp", 2), ("glm4", "tp+pp", 2),
    ("glm4_moe", "tp+pp", 2), ("granite", "tp+pp", 2), ("hunyuan_dense", "tp+pp", 2), ("hunyuan_moe", "tp+pp", 2),
    ("llama4", "tp+pp", 2), ("ministral", "tp+pp", 2), ("ministral3", "tp+pp", 2), ("nemotron_h", "tp+pp", 2),
    ("olmo3", "tp+pp", 2), ("olmoe", "tp+pp", 2), ("qwen2_moe", "tp+pp", 2), ("qwen3_5_moe", "tp+pp", 2),
    ("qwen3_5", "tp+pp", 2), ("seed_oss", "tp+pp", 2), ("smollm3", "tp+pp", 2), ("minimax_m2", "ep", 3),
    ("ernie4_5_moe", "ep", 2), ("glm4_moe_lite", "tp+ep", 2), ("minimax_m2", "tp+pp", 2),
    ("ernie4_5_moe", "tp+pp", 2), ("glm4_moe_lite", "tp+pp", 2),
    ("gemma3n", "tp+pp", 2), ("gemma3n", "tp2+pp3", 6), ("glm4_moe", "ep", 2), ("minimax_m2", "ep", 2),
    ("qwen3_moe", "ep", 2), ("granite_hybrid", "tp+pp", 2), ("mistral", "tp+pp", 2), ("mixtral", "tp+pp", 2),
    ("qwen3", "tp+pp", 2),
]  # fmt: skip
# Recurrent layers with as many heads as ranks.
WIDER: list[tuple[str, int, dict[str, int]]] = [
    ("bamba", 4, {"mamba_n_groups": 4}),
    ("nemotron_h", 4, {"n_groups": 4}),
    ("qwen3_5_moe", 3, {"linear_num_key_heads": 3, "linear_num_value_heads": 6}),
    ("qwen3_next", 3, {"linear_num_key_heads": 3, "linear_num_value_heads": 6}),
]
OWN_WINDOWS = [
    ("gemma3", "tp", 2, 1), ("gpt_oss", "pp", 2, 1), ("gpt_oss", "tp+ep", 2, 2), ("gemma3", "cp", 3, 1),
    ("gemma3", "tp2+pp2", 4, 2), ("gpt_oss", "ep", 2, 1), ("olmo3", "tp", 2, 1), ("gemma3n", "tp2+pp2", 4, 2),
]  # fmt: skip
FAMILIES = list({str(fields["model_type"]): kind for kind, fields in (KINDS | SMALL).items()}.values())
FORMS: list[dict[str, Any]] = [
    {"quantization": "int8"},
    {"quantization": "int4", "kv_cache_dtype": "int8"},
    {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
    {"dtype": "bfloat16"},
]


@pytest.mark.parametrize(("kind", "count"), first_now(WIDTHS, 5), ids=lambda value: str(value))
def test_answers_logprobs_and_pages_are_those_of_one_rank(tmp_path: Path, kind: str, count: int) -> None:
    same_bits(make(tmp_path, kind), count)


@pytest.mark.parametrize(("kind", "count", "changes"), first_now(WIDER, 0), ids=str)
def test_recurrent_layers_dealt_among_more_ranks_have_the_bits_of_one(
    tmp_path: Path, kind: str, count: int, changes: dict[str, int]
) -> None:
    same_bits(make(tmp_path, kind, **changes), count)


@pytest.mark.parametrize(("kind", "count"), first_now(ROWS, 3), ids=lambda value: str(value))
def test_rows_dealt_among_ranks_have_the_bits_of_one(tmp_path: Path, kind: str, count: int) -> None:
    same_bits(make(tmp_path, kind), count, "cp", chunk=170)


@pytest.mark.parametrize(("kind", "count"), first_now(LAYERS, 3), ids=lambda value: str(value))
def test_layers_dealt_among_ranks_have_the_bits_of_one(tmp_path: Path, kind: str, count: int) -> None:
    same_bits(make(tmp_path, kind), count, "pp", chunk=170)


@pytest.mark.parametrize(("kind", "share", "count"), first_now(DEALT, 3), ids=lambda value: str(value))
def test_experts_or_stages_dealt_among_ranks_have_the_bits_of_one(
    tmp_path: Path, kind: str, share: str, count: int
) -> None:
    same_bits(make(tmp_path, kind), count, share, chunk=170)


@pytest.mark.parametrize(("kind", "share", "count", "hosts"), first_now(OWN_WINDOWS, 3), ids=str)
def test_ranks_read_windows_from_pages_of_their_own(
    tmp_path: Path, kind: str, share: str, count: int, hosts: int
) -> None:
    same_bits(make(tmp_path, kind), count, share, chunk=170, hosts=hosts, window_pages="own")


@pytest.mark.parametrize("fields", first_now([{"quantization": "int8"}, {"dtype": "bfloat16"}], 0), ids=str)
def test_latents_beside_rounded_weights_keep_their_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    monkeypatch.setenv("BATON_CACHE_DIR", str(Path(native.built(native.isa())).parents[1]))
    for share in ("tp", "pp", "tp+pp"):
        same_bits(make(tmp_path / "model", "deepseek_v3"), 2, share, cache_dir=str(tmp_path / "cache"), **fields)


@pytest.mark.parametrize("fields", first_now(FORMS, 0), ids=str)
@pytest.mark.parametrize("kind", ["qwen3_next", "granite_hybrid", "bamba"])
def test_recurrent_states_beside_rounded_weights_keep_their_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, fields: dict[str, Any]
) -> None:
    monkeypatch.setenv("BATON_CACHE_DIR", str(Path(native.built(native.isa())).parents[1]))
    for share in ("tp", "tp+pp"):
        same_bits(make(tmp_path / "model", kind), 2, share, cache_dir=str(tmp_path / "cache"), **fields)


@pytest.mark.parametrize("fields", first_now(FORMS, 1), ids=lambda fields: "-".join(map(str, fields.values())))
@pytest.mark.parametrize("kind", first_now(["qwen2_mixed", "qwen3_moe_norm"], 1))
def test_rounded_weights_and_narrow_kv_keep_their_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, fields: dict[str, Any]
) -> None:
    monkeypatch.setenv("BATON_CACHE_DIR", str(Path(native.built(native.isa())).parents[1]))
    experts = ("ep",) if "moe" in kind else ()
    for share in ("tp", "cp", "pp", "tp+pp", *experts):
        same_bits(make(tmp_path / "model", kind), 2, share, cache_dir=str(tmp_path / "cache"), **fields)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("kind", first_now(FAMILIES, 0))
def test_rounded_weights_of_every_architecture_keep_their_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, quantization: str
) -> None:
    monkeypatch.setenv("BATON_CACHE_DIR", str(Path(native.built(native.isa())).parents[1]))
    same_bits(make(tmp_path / "model", kind), 2, cache_dir=str(tmp_path / "cache"), quantization=quantization)


@pytest.mark.parametrize("fields", first_now(FORMS, 0), ids=str)
def test_several_residual_streams_beside_rounded_weights_keep_their_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    monkeypatch.setenv("BATON_CACHE_DIR", str(Path(native.built(native.isa())).parents[1]))
    for share in ("tp", "cp", "pp", "tp+pp"):
        same_bits(make(tmp_path / "model", "gemma3n"), 2, share, cache_dir=str(tmp_path / "cache"), **fields)


def test_a_context_that_rope_is_extended_for_has_the_same_factors_on_ranks(tmp_path: Path) -> None:
    same_bits(make(tmp_path, "phi3_long"), 2, max_model_len=1024)  # the original context is 1,000


def test_latents_that_would_be_dealt_by_rows_are_refused_with_what_works() -> None:
    for widths in (Widths(cp=2), Widths(ep=2)):
        with pytest.raises(ConfigError, match="latent attention isn't shared by rows; use 1, or tp or pp"):
            widths.require(program("deepseek_v3"))


@pytest.mark.parametrize(
    ("widths", "held"),
    [
        (Widths(tp=2), [kind for kind, count in WIDTHS if count == 2]),
        (Widths(tp=4), [kind for kind, count, *_ in (*WIDTHS, *WIDER) if count in (3, 4)]),
        (Widths(cp=2), [kind for kind, count in ROWS if count == 2]),
        (Widths(pp=2), [kind for kind, count in LAYERS if count == 2]),
        (Widths(ep=2), [kind for kind, share, count in DEALT if (share, count) == ("ep", 2)]),
        (Widths(tp=2, pp=2), [kind for kind, share, count in DEALT if (share, count) == ("tp+pp", 2)]),
    ],
    ids=str,
)
def test_every_architecture_that_ranks_can_share_is_held_to_one_rank(widths: Widths, held: list[str]) -> None:
    kinds = KINDS | SMALL
    others = {str(kind["model_type"]) for kind in kinds.values()} - {
        str(kinds[kind]["model_type"]) for kind in held
    }
    assert {each for each in others if takes(widths, program(each))} == set()


def takes(widths: Widths, program: Program) -> bool:
    try:
        widths.require(program)
    except ConfigError:
        return False
    return True


def test_an_architecture_whose_columns_ranks_cannot_share_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="EmbedText runs on one rank only; use 1"):
        require_splittable(program("bert"), 2)
    with pytest.raises(ConfigError, match="tp is 3, and a recurrent layer has 2 key heads; use 1 to 2"):
        require_splittable(program("qwen3_next", linear_num_key_heads=2), 3)
    with pytest.raises(ConfigError, match="has 8 heads in 2 groups, which don't come out even; use 1 to 2"):
        require_splittable(program("bamba", mamba_n_heads=8, mamba_n_groups=2), 3)


def test_more_sequences_than_ranks_share_states_of_are_refused_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "MOST_STATES", 1)
    with pytest.raises(BatonError, match=r"6 sequences is more than 1 whose states .*; lower worker\.max_batch"):
        same_bits(make(tmp_path, "bamba"), 2, "pp")
