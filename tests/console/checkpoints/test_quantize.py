"""Tests `baton quantize`: what it refuses before it begins, and that it ends with a checkpoint to judge."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.console.main import app
from tests.conformance.checkpoints import make

SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "vocab_size": 300, "num_hidden_layers": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("plain"), "llama2", tokenizer=True, **SIZES)


@pytest.fixture
def ask(model: Path, tmp_path: Path):
    def run(*flags: str):
        return CliRunner().invoke(app, ["quantize", str(model), "--out", str(tmp_path / "out"), *flags])

    return run


def test_it_says_what_it_made_and_how_to_judge_it(ask, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a river in the hills and the sea\n" * 20)
    done = ask("--calibration", str(tmp_path / "text.txt"), "--group", "32", "--tokens", "32", "--samples", "4")
    assert done.exit_code == 0, done.stderr
    said = " ".join(done.stderr.split())
    assert "only 4 samples of 32 tokens" in said
    assert "baton evaluate" in said
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert (settings["quant_method"], settings["group_size"]) == ("gptq", 32)


def test_a_model_with_experts_is_written_as_transformers_loads_them(tmp_path: Path) -> None:
    sizes = SIZES | {"intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2}
    model, out = make(tmp_path / "plain", "mixtral", tokenizer=True, **sizes), tmp_path / "out"
    (tmp_path / "text.txt").write_text("a river in the hills and the sea\n" * 20)
    text = ("--calibration", str(tmp_path / "text.txt"), "--group", "32", "--tokens", "32", "--samples", "2")
    for method in ("gptq", "awq"):
        done = CliRunner().invoke(
            app, ["quantize", str(model), "--out", str(out / method), "--method", method, *text]
        )
        assert done.exit_code == 0, done.stderr
        settings = json.loads((out / method / "config.json").read_text())["quantization_config"]
        assert settings["format"] == "pack-quantized"
        assert settings["config_groups"]["group_0"]["weights"]["symmetric"] is True
        assert "transformers doesn't" not in done.stderr
    done = CliRunner().invoke(app, ["quantize", str(model), "--out", str(tmp_path / "nf4"), "--method", "nf4"])
    assert done.exit_code == 0, done.stderr
    assert "transformers doesn't load experts as bitsandbytes" in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--group", "32"), "gptq reads text: give --calibration FILE"),
        (("--method", "hqq"), "use rtn, gptq"),
        (("--method", "rtn", "--group", "96"), "groups of 96 don't divide"),
        (("--calibration", "/nowhere/text.txt", "--group", "32"), "No such file"),
        (("--calibration", "self", "--group", "32", "--tokens", "2048"), "made for contexts of 1024"),
        (("--method", "smoothquant", "--bits", "4"), "--bits 4: smoothquant has 8"),
    ],
)
def test_what_cannot_be_done_is_one_sentence_and_leaves_no_folder(
    ask, tmp_path: Path, flags: tuple[str, ...], said: str
) -> None:
    done = ask(*flags)
    assert done.exit_code == 1
    assert said in " ".join(done.stderr.split())
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written_is_refused_before_the_model_writes_a_text(
    ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(*_: object) -> None:
        raise AssertionError("a text was written")

    monkeypatch.setattr("baton.quantize.calibration.own_text", write)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    done = ask("--calibration", "self", "--group", "32")
    assert done.exit_code == 1
    assert "isn't empty: name another --out" in " ".join(done.stderr.split())
