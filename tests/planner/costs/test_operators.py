"""Step time from operator timings."""

import re
import shutil
from pathlib import Path

import pytest

from baton.planner.costs.grid import Axis
from baton.planner.costs.model_shape import from_config, known_models, model_shape
from baton.planner.costs.operators import PrefillChunk, RankLink, load_operators
from baton.protos.errors import ConfigError

RUNS = Path(__file__).parents[2] / "data" / "vllm_real"
LLAMA, QWEN = RUNS / "rtx4090_llama-3.1-8b" / "profile", RUNS / "rtxpro6000_qwen3-32b" / "profile"
LINK = RankLink(16e9, 20e-6)


def test_tables_give_back_their_points_and_lines_between_and_beyond() -> None:
    axis = Axis([((1, 10), 1.0), ((1, 20), 2.0), ((3, 10), 5.0)])
    assert axis.at(1, 10) == 1.0
    assert axis.at(1, 15) == 1.5
    assert axis.at(1, 30) == 3.0
    assert axis.at(2, 10) == 3.0
    assert axis.at(0, 10) == 1.0


def test_a_known_model_has_the_weights_and_kv_its_name_says() -> None:
    llama = model_shape("meta-llama/Llama-3.1-8B")
    assert llama.weights == pytest.approx(8.03e9, rel=0.01)
    assert llama.kv_bytes_per_token == 131072
    assert known_models()["opt-66b"].weights == pytest.approx(66e9, rel=0.02)
    assert known_models()["bloom-176b"].weights == pytest.approx(176e9, rel=0.02)


def test_a_config_json_is_read_and_what_it_lacks_is_named(tmp_path: Path) -> None:
    fields = '"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4'
    (tmp_path / "config.json").write_text("{" + fields + ', "vocab_size": 100}')
    assert from_config(str(tmp_path)).head_dim == 16
    assert not from_config(str(tmp_path)).tied
    (tmp_path / "config.json").write_text("{" + fields + ', "vocab_size": 100, "model_type": "gemma2"}')
    assert from_config(str(tmp_path)).tied
    for what in ("n_routed_experts", "kv_lora_rank", "linear_num_value_heads"):
        (tmp_path / "config.json").write_text("{" + fields + f', "vocab_size": 100, "{what}": 64' + "}")
        with pytest.raises(ConfigError, match=f"{what} says that .* not modelled"):
            model_shape(str(tmp_path))
    (tmp_path / "config.json").write_text("{" + fields + "}")
    with pytest.raises(ConfigError, match="vocab_size"):
        model_shape(str(tmp_path))
    with pytest.raises(ConfigError, match="qwen3-32b"):
        model_shape("no-such-model")


def test_more_work_takes_longer() -> None:
    profile = load_operators(str(LLAMA))
    decode = profile.step_seconds([], [1000] * 32)
    assert 0.015 < profile.step_seconds([], [1000]) < decode < 0.03
    assert profile.step_seconds([], [2000] * 32) > decode
    prompt = profile.step_seconds([PrefillChunk(2048, 0)], [])
    assert prompt == pytest.approx(0.193, rel=0.02)
    assert profile.step_seconds([PrefillChunk(2016, 0)], [1000] * 32) > profile.step_seconds(
        [PrefillChunk(2016, 0)], []
    )


def test_several_prompts_cost_less_attention_than_one_of_their_length() -> None:
    profile = load_operators(str(LLAMA))
    many = profile.attention_seconds([PrefillChunk(512, 0)] * 4, [])
    assert many < profile.attention_seconds([PrefillChunk(2048, 0)], [])


def test_ranks_that_communicate_need_a_link() -> None:
    with pytest.raises(ConfigError, match="link_bw"):
        load_operators(str(QWEN))
    near, far = load_operators(str(QWEN), link=LINK), load_operators(str(QWEN), link=RankLink(8e9, 20e-6))
    assert near.tp == 2
    assert near.step_seconds([PrefillChunk(2048, 0)], []) == pytest.approx(0.357, rel=0.02)
    assert far.step_seconds([PrefillChunk(2048, 0)], []) > near.step_seconds([PrefillChunk(2048, 0)], [])


def test_a_meta_that_names_the_widths_of_another_measured_split_is_taken(tmp_path: Path) -> None:
    """One meta.yaml is of every split that was measured, and says the last one's widths."""
    shutil.copytree(LLAMA, tmp_path / "p")
    meta = tmp_path / "p" / "meta.yaml"
    halved = re.sub(
        r"(intermediate_size|num_attention_heads|num_key_value_heads): (\d+)",
        lambda m: f"{m[1]}: {int(m[2]) // 2}",
        meta.read_text(),
    )
    meta.write_text(halved.replace("tp_degrees: [1]", "tp_degrees: [1, 2]"))
    assert load_operators(str(tmp_path / "p"), tp=1).tp == 1
    meta.write_text(halved)
    with pytest.raises(ConfigError, match="intermediate_size 7168 per rank"):
        load_operators(str(tmp_path / "p"), tp=1)


def test_timings_may_lie_in_a_folder_per_split(tmp_path: Path) -> None:
    shutil.copytree(QWEN, tmp_path / "p")
    (tmp_path / "p" / "tp2").mkdir()
    for name in ("attention", "dense", "per_sequence"):
        shutil.move(tmp_path / "p" / f"{name}.csv", tmp_path / "p" / "tp2")
    found = load_operators(str(tmp_path / "p"), tp=2, link=LINK)
    assert found.step_seconds([PrefillChunk(2048, 0)], []) == pytest.approx(0.357, rel=0.02)


def test_a_meta_without_a_model_is_an_error_that_says_so(tmp_path: Path) -> None:
    shutil.copytree(LLAMA, tmp_path / "p")
    (tmp_path / "p" / "meta.yaml").write_text("tp_degrees: [1]\n")
    with pytest.raises(ConfigError, match="names no model"):
        load_operators(str(tmp_path / "p"))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("tp_degrees: [one]", "tp_degrees: could not convert"),
        ("engine_effective: vllm", "engine_effective must be a mapping"),
        ("engine_effective: {hf_overrides: {num_attention_heads: few}}", "num_attention_heads: could not convert"),
        ("skew_fit: {per_tp: {1: 0.3}}", "1 must be a mapping"),
        ("skew_fit: {per_tp: {'1': {alpha_default: [0.3]}}}", "alpha_default: float"),
    ],
)
def test_a_meta_that_says_no_number_where_one_belongs_is_an_error_that_names_it(
    tmp_path: Path, line: str, said: str
) -> None:
    shutil.copytree(LLAMA, tmp_path / "p")
    (tmp_path / "p" / "meta.yaml").write_text(f"model: meta-llama/Llama-3.1-8B\n{line}\n")
    with pytest.raises(ConfigError, match=said):
        load_operators(str(tmp_path / "p"), tp=1)


def test_a_profile_of_another_parallelism_or_with_a_bad_row_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="intermediate_size"):
        load_operators(str(QWEN), tp=1)
    shutil.copytree(LLAMA, tmp_path / "p")
    (tmp_path / "p" / "dense.csv").write_text("layer,tokens,time_us\nact_fn,one,2\n")
    with pytest.raises(ConfigError, match=r"dense.csv line 2"):
        load_operators(str(tmp_path / "p"))
    (tmp_path / "p" / "dense.csv").unlink()
    with pytest.raises(ConfigError, match=r"dense.csv"):
        load_operators(str(tmp_path / "p"))
