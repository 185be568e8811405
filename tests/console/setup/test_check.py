"""Tests `baton check`: what is right passes, what is wrong is named with its key, in text and in JSON."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.console.main import app
from baton.console.setup.check import CHART, overlaid, refusals


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["check", *arguments])
    return result.exit_code, result.output


def findings(*arguments: str) -> dict[str, dict[str, str]]:
    code, text = run("--json", *arguments)
    found = json.loads(text)
    assert found["ok"] == (code == 0)
    return {f["subject"]: f for f in found["findings"]}


def toml(folder: Path, text: str) -> str:
    file = folder / "baton.toml"
    file.write_text(text)
    return str(file)


def test_a_right_config_passes(tmp_path: Path) -> None:
    code, text = run("-f", toml(tmp_path, "[router]\nport = 9000\n[worker]\ndevice = 'paced:zero'\n"))
    assert code == 0, text


@pytest.mark.parametrize(
    ("text", "key", "said"),
    [
        ("[router]\nprot = 1\n", "router.prot", "unknown setting"),
        ("[router]\nport = 99999\n", "router.port", "less than or equal to 65535"),
        ("[router]\npolicy = 'best'\n", "router.policy", "best"),
        ("[router]\nhost = '0.0.0.0'\n", "router.host", "no authentication"),
        ("[router]\nkeys_file = '/nowhere/keys.json'\n", "router.keys_file", "no such file"),
        ("[worker]\nkv_transport = 'pigeon'\n", "worker.kv_transport", "pigeon"),
        ("[worker]\ndevice = 'paced:pigeon'\n", "worker.device", "choose one of"),
        ("[worker]\nmodel = '/nowhere/model'\n", "worker.model", "no model directory"),
        ("[worker\n", "config", "baton.toml"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, key: str, said: str) -> None:
    found = findings("-f", toml(tmp_path, text))
    assert found[key]["state"] == "fail"
    assert said in found[key]["what"]


def test_a_checkpoint_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    found = findings("-f", toml(tmp_path, f"[worker]\nmodel = '{tmp_path}'\n"))
    assert (found["worker.model"]["state"], "tokenizer.json" in found["worker.model"]["what"]) == ("fail", True)


def test_values_of_every_profile_pass() -> None:
    pytest.importorskip("helm_python")
    for file in sorted(CHART.glob("values*.yaml")):
        found = findings("-f", str(file))
        assert found["chart"]["what"].startswith("renders"), file
        assert found["config"]["state"] == "ok"


def test_wrong_values_are_named_and_later_files_win(tmp_path: Path) -> None:
    pytest.importorskip("helm_python")
    (tmp_path / "a.yaml").write_text("router: {replicas: 0}\nconfig: {router: {policy: best}}\n")
    (tmp_path / "b.yaml").write_text("router: {replicas: 3}\n")
    assert findings("-f", str(tmp_path / "a.yaml"))["router.replicas"]["state"] == "fail"
    both = findings("-f", str(tmp_path / "a.yaml"), "-f", str(tmp_path / "b.yaml"))
    assert "router.replicas" not in both
    assert both["router.policy"]["state"] == "fail"


def test_a_pools_own_settings_are_read_as_its_pods_would(tmp_path: Path) -> None:
    pytest.importorskip("helm_python")
    (tmp_path / "a.yaml").write_text("workers: {pools: {decode: {settings: {dtype: float8}}}}\n")
    found = findings("-f", str(tmp_path / "a.yaml"))
    assert found["workers.pools.decode.settings.dtype"]["state"] == "fail"


@pytest.mark.parametrize(
    ("text", "key", "known"),
    [
        ("rooter: {}", "values", "ratio, redis, router, service"),
        ("router: {prot: 1}", "router", "ports, preStopSeconds"),
        ("workers: {pools: {prefill: {replica: 1}}}", "workers.pools.prefill", "replicas"),
        ("config: {router: {prot: 1}}", "config.router", "policy, port"),
    ],
)
def test_a_key_that_the_chart_does_not_know_is_told_with_those_that_it_knows(
    tmp_path: Path, text: str, key: str, known: str
) -> None:
    pytest.importorskip("helm_python")
    (tmp_path / "a.yaml").write_text(text)
    found = findings("-f", str(tmp_path / "a.yaml"))[key]
    assert found["state"] == "fail"
    assert found["remedy"].startswith(f"keys of {key}: ")
    assert known in found["remedy"]


def test_without_the_helm_engine_the_config_in_the_values_is_checked_still(tmp_path, monkeypatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "helm_python", None)
    (tmp_path / "a.yaml").write_text("config: {router: {polici: cost}}\n")
    found = findings("-f", str(tmp_path / "a.yaml"))
    assert found["chart"]["state"] == "skip"
    assert found["config.router.polici"]["state"] == "fail"


def test_files_that_are_no_config_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("- 1\n")
    assert run()[0] == run("-f", str(tmp_path / "a.yaml"))[0] == run("-f", str(tmp_path / "no.yaml"))[0] == 1
    assert run("-f", "a.toml", "-f", "b.yaml")[0] == 1


def test_layers_merge_as_in_helm() -> None:
    assert overlaid({"a": {"b": 1, "c": 2}, "d": [1]}, {"a": {"b": 3}, "d": [2]}) == {
        "a": {"b": 3, "c": 2},
        "d": [2],
    }


def test_the_engines_messages_are_read() -> None:
    assert refusals("x\n- at '/a/b': got string\n- at '': y") == [("a.b", "got string"), ("values", "y")]
    assert refusals("execution error: \n\n  values: tls.mode is odd: mend it\n") == [
        ("tls.mode", "tls.mode is odd: mend it")
    ]
