"""Tests that what can't be served is refused before anything is started."""

from pathlib import Path

import pytest

from baton.cluster.config import load_config
from baton.cluster.served_model import DEMO
from baton.launch.servable import servable_model
from baton.protos.errors import CheckpointError, ConfigError
from tests.conformance.checkpoints import make


def asked(**worker: str) -> str:
    return servable_model(load_config(flags={"worker": worker}, search=Path("/nowhere")))


def test_a_known_architecture_a_hub_id_and_a_paced_engine_pass() -> None:
    assert asked() == str(DEMO)
    assert asked(model="Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    assert asked(device="paced:zero") == ""


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ('{"model_type": "nosuch"}', "'nosuch', an unknown architecture; choose from .*llama"),
        ("{}", "model_type is missing"),
        ("not json", r"config\.json"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "hidden_size"),
    ],
)
def test_a_config_that_no_engine_reads_is_refused_by_its_field(tmp_path: Path, config: str, said: str) -> None:
    (tmp_path / "tokenizer.json").touch()
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(CheckpointError, match=said):
        asked(model=str(tmp_path))
    assert asked(model=str(tmp_path), device="paced:zero") == str(tmp_path)


def test_a_number_of_ranks_that_cannot_be_is_refused_with_those_that_can() -> None:
    with pytest.raises(ConfigError, match=r"tp is 50, and the model has (\d+) attention heads; use 1 to \1"):
        servable_model(load_config(flags={"cluster": {"decode_tp": 50}}, search=Path("/nowhere")))
    with pytest.raises(ConfigError, match=r"several ranks run on cpu or cuda, .* is paced:zero"):
        asked(device="paced:zero", tp="2")
    with pytest.raises(ConfigError, match=r"pp is 9, and the model has \d layers; use 1 to \d"):
        servable_model(load_config(flags={"cluster": {"prefill_pp": 9}}, search=Path("/nowhere")))
    with pytest.raises(ConfigError, match="ep is 2, and the model has no layers of experts; use 1"):
        servable_model(load_config(flags={"cluster": {"decode_ep": 2}}, search=Path("/nowhere")))
    with pytest.raises(
        ConfigError, match=r"tp is 2 and cp is 2: cp goes with no other number of ranks, .*; set the others to 1"
    ):
        asked(tp="2", cp="2")


def test_the_ranks_of_a_pool_are_judged_by_its_own_device() -> None:
    def pooled(base: str, own: str) -> str:
        pools = [{"name": "wide", "role": "decode", "worker": {"device": own, "tp": 2}}]
        flags = {"worker": {"device": base, "model": str(DEMO)}, "cluster": {"pools": pools}}
        return servable_model(load_config(flags=flags, search=Path("/nowhere")))

    assert pooled("cuda", "cpu") == pooled("cpu", "cuda") == str(DEMO)
    for device in ("auto", "paced:zero"):
        with pytest.raises(ConfigError, match=f"tp is 2: several ranks run on cpu or cuda, .* is {device}"):
            pooled("cpu", device)


def test_ranks_on_cards_share_columns_alone(tmp_path: Path) -> None:
    for share in ("cp", "pp"):
        with pytest.raises(ConfigError, match=f"{share} is 2: ranks on cards share a model's columns alone"):
            asked(model=str(DEMO), device="cuda", **{share: "2"})
    experts = make(tmp_path, "mixtral", tokenizer=True)
    with pytest.raises(ConfigError, match="tp is 2: layers of experts run on one card; use 1, or device cpu"):
        asked(model=str(experts), device="cuda", tp="2")


def test_a_context_longer_than_the_models_is_refused() -> None:
    assert asked(max_model_len="2048") == str(DEMO)
    with pytest.raises(ConfigError, match="max_model_len is 4096, and the model was made for contexts of 2048"):
        asked(max_model_len="4096")
