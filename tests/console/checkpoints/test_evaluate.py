"""Tests `baton evaluate`: what it prints, what it writes, and how a verdict ends it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.console.checkpoints.evaluate import ABOVE
from baton.console.main import app
from baton.kernels.abi import native
from tests.conformance.checkpoints import make


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("judged"), "llama2", tokenizer=True)


@pytest.fixture
def ask(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    native.library()  # before the cache is another place, where kernels would be compiled anew
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path))
    (tmp_path / "text.txt").write_text("a river in the hills\n\f\nthe night train left late")
    common = ["evaluate", str(model), "--text", str(tmp_path / "text.txt"), "--threads", "1"]

    def run(*more: str):
        return CliRunner().invoke(app, [*common, *more])

    return run


def test_a_model_beside_itself_passes_and_says_so_in_json(ask, model: Path) -> None:
    done = ask("--against", str(model), "--only", "loss", "--fail-above", "0.1%", "--json", "-")
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    assert found["passes"] is True
    added = next(figure for figure in found["figures"] if figure["judged"] == "loss")
    assert (added["value"], added["tolerance"]) == (0, 0.001)


def test_a_change_above_its_tolerance_ends_with_an_exit_code_of_its_own(ask, model: Path) -> None:
    rounded = ("--quantization", "int4", "--against", str(model), "--only", "paths", "--tokens", "4")
    done = ask(*rounded, "--prompts", "2", "--fail-above", "kl=0")
    assert done.exit_code == ABOVE
    assert "fails" in done.stdout


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ("--fail-above", "1%"),
            "--fail-above loss is the most that may differ from a reference: it needs --against",
        ),
        (
            ("--fail-above", "kl=1", "--only", "loss", "--against", "x"),
            "--fail-above kl needs the part paths in --only",
        ),
    ],
)
def test_a_tolerance_of_what_is_not_measured_is_refused_before_a_model_is_loaded(
    ask, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], said: str
) -> None:
    def load(*_: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("baton.evaluate.local.LocalSubject.__init__", load)
    done = ask(*flags)
    assert done.exit_code == 1
    assert said in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--only", "speed"), "loss, paths, needle, tasks"),
        (("--fail-above", "speed=1"), "is unknown"),
        (("--sweep", "--fail-above", "1%", "--only", "loss"), "leave out --only, --fail-above"),
        (("--also", "x"), "--also x: it is measured by a --sweep"),
        (("--against-quantization", "int8"), "--against-quantization: there is no reference"),
        (("--only", "needle", "--needle", "5000"), "--needle 5000: the context has room for 1024"),
        (("--only", "paths"), "paths compare two sides: add --against"),
        (("--text", "/nowhere/text.txt"), "can't be read"),
        (("--tasks", "/nowhere/tasks.jsonl", "--only", "tasks"), "No such file"),
        (("--sweep", "--json", "/nowhere/x.json"), "can't write"),
        (("--sweep", "--kv-selection", "sinks:16,window:32"), "leave out --kv-selection"),
        (("--plot", "x.svg"), "--plot draws what a --sweep measured"),
        (("--sweep", "--plot", "x.pdf"), "a plot is a .png or a .svg"),
        (("--sweep", "--quantization", "int4", "--against", "x"), "leave out --quantization, --against"),
        (("--quantization-override", "int8"), "'int8': write PATTERN=SCHEME"),
        (("--quantization-override", "*.nothing=int8"), "'*.nothing' names no layer that is rounded"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(ask, flags: tuple[str, ...], said: str) -> None:
    done = ask(*flags)
    assert done.exit_code == 1
    assert said in " ".join(done.stderr.split())
