"""Tests what `baton check` and `baton serve` say of the files and folders that a configuration names."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from baton.cluster.config import load_config
from baton.console.setup.findings import Finding
from baton.console.setup.places import files_of, places_of


def findings(folder: Path, text: str) -> dict[str, Finding]:
    (folder / "baton.toml").write_text(text)
    return {found.subject: found for found in places_of(load_config(str(folder / "baton.toml")))}


def adapter(folder: Path, **fields: object) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4} | fields))
    (folder / "adapter_model.safetensors").touch()
    return folder


@pytest.mark.parametrize(
    ("text", "key", "said"),
    [
        ("[worker.adapters]\nsql = '/nowhere/sql'\n", "worker.adapters.sql", "'/nowhere/sql': No such file"),
        ("[worker]\nspeculation = 'suffix+draft:/nowhere'\n", "worker.speculation", "/nowhere: no such directory"),
        ("[worker]\nrank_key_file = '/nowhere/key'\n", "worker.rank_key_file", "No such file"),
        ("[worker]\nshared_tier = '/proc/version/x'\n", "worker.shared_tier", "/proc/version is no folder"),
        ("[worker]\ncache_dir = '/proc/version/x'\n", "worker.cache_dir", "/proc/version is no folder"),
        (
            "[worker]\ndisk_tier_bytes = 1\ndisk_tier_dir = '/proc/version'\n",
            "worker.disk_tier_dir",
            "/proc/version is no folder",
        ),
        ("[router]\ntrace_file = '/nowhere/t.jsonl'\n", "router.trace_file", "in a folder that is there"),
        (
            "[[cluster.pools]]\nname = 'big'\nrole = 'decode'\nworker = {speculation = 'medusa:/nowhere'}\n",
            "worker.speculation",
            "/nowhere: no such directory",
        ),
    ],
)
def test_what_workers_would_not_find_is_named_by_its_key(tmp_path: Path, text: str, key: str, said: str) -> None:
    found = findings(tmp_path, text)[key]
    assert found.state == "fail"
    assert said in found.what


def test_what_is_there_is_ok_and_a_hub_id_may_be(tmp_path: Path) -> None:
    sql = adapter(tmp_path / "sql")
    found = findings(
        tmp_path,
        f"[worker]\nspeculation = 'draft:some/model'\nshared_tier = '{tmp_path}/tier'\n[worker.adapters]\n"
        f"sql = '{sql}'\n[router]\ntrace_file = '{tmp_path}/served.jsonl'\n",
    )
    assert {one.state for one in found.values()} == {"ok"}
    assert not (tmp_path / "tier").exists(), "a check makes nothing"


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("[worker]\ncache_dir = 'PLACE'\n", "worker.cache_dir"),
        ("[worker]\nspeculation = 'draft:PLACE'\n", "worker.speculation"),
        ("[router]\ntrace_file = 'PLACE/t.jsonl'\n", "router.trace_file"),
        ("[adapters]\nroot = 'PLACE'\n", "adapters.root"),
    ],
)
@pytest.mark.parametrize("place", ["/tmp/" + "x" * 300, "~nobody.at.all/x"])
def test_a_place_that_cannot_be_looked_at_is_a_finding(tmp_path: Path, text: str, key: str, place: str) -> None:
    assert findings(tmp_path, text.replace("PLACE", place))[key].state in ("fail", "warn")


def test_a_file_of_keys_that_cannot_be_looked_at_is_a_finding(tmp_path: Path) -> None:
    (tmp_path / "baton.toml").write_text(f"[router]\nkeys_file = '/tmp/{'x' * 300}'\n")
    [found] = files_of(load_config(str(tmp_path / "baton.toml")))
    assert (found.subject, found.state) == ("router.keys_file", "fail")


def test_a_trace_goes_to_what_is_there_and_can_be_written_though_its_folder_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda at, mode: not Path(at).is_dir())  # root may write anywhere
    text = f"[router]\ntrace_file = '{tmp_path}/served.jsonl'\n"
    assert findings(tmp_path, text)["router.trace_file"].state == "fail"
    (tmp_path / "served.jsonl").touch()
    assert findings(tmp_path, text)["router.trace_file"].state == "ok"
    of_each = text + "processes = 2\n"
    assert findings(tmp_path, of_each)["router.trace_file"].state == "fail", "each process makes a file of its own"


def test_a_home_is_the_same_for_the_check_and_for_who_uses_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "key").write_text("k" * 16)
    places = "[worker]\nrank_key_file = '~/key'\n[router]\ntrace_file = '~/served.jsonl'\n"
    assert {found.state for found in findings(tmp_path, places).values()} == {"ok"}


def test_an_adapter_that_would_be_refused_is_named_with_the_field(tmp_path: Path) -> None:
    dora = adapter(tmp_path / "dora", use_dora=True)
    found = findings(tmp_path, f"[worker.adapters]\nsql = '{dora}'\n")["worker.adapters.sql"]
    assert (found.state, "use_dora" in found.what) == ("fail", True)


def test_a_root_of_adapters_may_be_mounted_later(tmp_path: Path) -> None:
    assert findings(tmp_path, "[adapters]\nroot = '/nowhere'\n")["adapters.root"].state == "warn"
