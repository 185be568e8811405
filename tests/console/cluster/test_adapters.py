"""Tests `baton adapters`: what a file asks for beside what is served, over HTTP, and what is fetched from the
hub.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from rich.console import Console
from typer.testing import CliRunner

from baton.console.cluster import adapters
from baton.console.cluster.adapters import FILES, WantedAdapter, difference, table
from baton.console.main import app
from tests.fake_hub import hub


def entry(name: str, root: str = "", **fields: Any) -> dict[str, Any]:
    base = {
        "id": name, "parent": "demo", "root": root or name, "adapter_id": f"{name}@{'1' * 16}", "tenant": "",
        "pinned": False, "by": "operator", "created": 1, "workers": ["decode-0"],
    }  # fmt: skip
    return base | fields


class Router(ThreadingHTTPServer):
    """Answers as a router does; keeps what it was asked and refuses what it is told to."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.served: dict[str, dict[str, Any]] = {}
        self.refusals: dict[str, list[int]] = {}
        self.asked: list[tuple[str, dict[str, Any]]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Router

    def log_message(self, *args: object) -> None:
        return

    def do_GET(self) -> None:
        self._answer(200, {"object": "list", "data": list(self.server.served.values())})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        name, served = body["lora_name"], self.server.served
        self.server.asked.append((self.path, body))
        if self.server.refusals.get(name):
            status = self.server.refusals[name].pop(0)
            self._answer(status, {"error": {"message": f"{name} is refused"}})
            return
        told = served.get(name, entry(name))
        if self.path.endswith("unload_lora_adapter"):
            served.pop(name)
        else:
            fields = {"pinned": body["pinned"], "tenant": body["tenant"]}
            told = served[name] = entry(name, body["lora_path"], **fields)
        self._answer(200, told)

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def router() -> Iterator[Router]:
    with Router() as running:
        threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield running
        running.shutdown()


def baton(*arguments: str, router: Router | None = None) -> tuple[int, str]:
    url = ["--url", router.url] if router is not None else []
    result = CliRunner().invoke(app, ["adapters", *arguments, *url])
    return result.exit_code, result.output


def test_adapters_are_added_listed_and_removed(router: Router) -> None:
    assert baton("add", "sql", "team/sql", "--pinned", "--tenant", "acme", router=router)[0] == 0
    path, body = router.asked[0]
    assert path == "/v1/load_lora_adapter"
    assert (body["lora_path"], body["pinned"], body["tenant"]) == ("team/sql", True, "acme")
    code, text = baton("list", router=router)
    assert code == 0
    assert {"sql", "team/sql", "acme", "decode-0"} <= set(text.split())
    assert baton("remove", "sql", router=router)[0] == 0
    assert router.served == {}


def test_a_file_is_applied_and_what_is_served_as_it_says_is_left_alone(router: Router, tmp_path: Path) -> None:
    router.served = {"sql": entry("sql", "sql/1"), "law": entry("law"), "own": entry("own", by="config")}
    file = tmp_path / "a.json"
    file.write_text('{"sql": {"path": "sql/2"}, "law": {"path": "law"}, "new": {"path": "new", "pinned": true}}')
    assert baton("apply", str(file), router=router)[0] == 0
    assert [(b["lora_name"], b["load_inplace"]) for _, b in router.asked] == [("sql", True), ("new", False)]
    router.served["old"] = entry("old")
    assert baton("apply", str(file), "--prune", router=router)[0] == 0
    assert set(router.served) == {"sql", "law", "new", "own"}
    assert "nothing to change" in baton("apply", str(file), "--prune", router=router)[1]


def test_one_bad_adapter_of_a_file_hinders_no_other_and_is_named(router: Router, tmp_path: Path) -> None:
    router.refusals = {"bad": [400]}
    file = tmp_path / "a.json"
    file.write_text('{"bad": {"path": "bad"}, "good": {"path": "good"}}')
    code, text = baton("apply", str(file), "--wait", "60", router=router)
    assert code == 1
    assert "bad is refused" in text
    assert set(router.served) == {"good"}


def test_apply_waits_for_workers_that_are_starting(router: Router, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(adapters, "AGAIN_S", 0.01)
    router.refusals = {"sql": [503, 503]}
    file = tmp_path / "a.json"
    file.write_text('{"sql": {"path": "sql"}}')
    assert baton("apply", str(file), "--wait", "60", router=router)[0] == 0
    assert len(router.asked) == 3


def test_a_file_with_unknown_fields_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text('{"sql": {"path": "sql", "pined": true}}')
    code, text = baton("apply", str(file), "--url", "http://127.0.0.1:1")
    assert code == 1
    assert "pined" in text


def test_only_what_differs_is_loaded_and_the_configurations_are_never_pruned() -> None:
    wanted = {"a": WantedAdapter("a"), "b": WantedAdapter("b", pinned=True), "c": WantedAdapter("c/2")}
    served = {
        "a": entry("a"),
        "b": entry("b"),
        "c": entry("c", "c/1"),
        "d": entry("d"),
        "e": entry("e", by="config"),
    }
    assert difference(wanted, served) == (["b", "c"], ["d"])


def test_an_adapter_of_the_configuration_is_replaced_only_by_another_folder() -> None:
    served = {
        "a": entry("a", "/srv/adapters/team/a", by="config"),
        "b": entry("b", "/srv/adapters/team/b", by="config"),
        "c": entry("c", "/srv/adapters/team/c", by="config"),
    }
    wanted = {
        "a": WantedAdapter("team/a", pinned=True),
        "b": WantedAdapter("other/b"),
        "c": WantedAdapter("team/c", tenant="acme"),
    }
    assert difference(wanted, served) == (["b", "c"], [])


def test_an_adapter_that_no_worker_has_read_is_shown_as_such() -> None:
    text = StringIO()
    Console(file=text, width=160).print(table([entry("sql", adapter_id="", workers=[], created=0)]))
    assert "not read yet" in text.getvalue()
    assert "none" in text.getvalue()


def test_a_folder_whose_name_looks_like_markup_is_shown_as_it_is() -> None:
    text = StringIO()
    Console(file=text, width=160).print(table([entry("sql", root="team[/x]/sql")]))
    assert "team[/x]/sql" in text.getvalue()


def fetched(parts: tuple[str, ...]):
    def snapshot(hub_id: str, allow_patterns: list[str], local_dir: str) -> str:
        for part in parts:
            Path(local_dir, part).write_text(hub_id)
        return local_dir

    return snapshot


def test_adapters_are_fetched_whole_and_once(tmp_path: Path, monkeypatch) -> None:
    file, root = tmp_path / "a.json", tmp_path / "root"
    file.write_text('{"sql": {"path": "team/sql", "hub": "acme/sql"}, "own": {"path": "own"}}')
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetched(FILES))
    assert baton("fetch", str(file), str(root))[0] == 0
    assert sorted(p.name for p in (root / "team" / "sql").iterdir()) == sorted(FILES)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetched(()))
    assert baton("fetch", str(file), str(root))[0] == 0  # it is there


def test_the_hubs_client_fetches_an_adapters_two_files_and_an_unknown_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (stored := tmp_path / "stored").mkdir()
    for name in (*FILES, "README.md"):
        (stored / name).write_text(name)
    file, root = tmp_path / "a.json", tmp_path / "root"
    file.write_text(
        '{"sql": {"path": "team/sql", "hub": "acme/sql"}, "gone": {"path": "gone", "hub": "acme/gone"}}'
    )
    with hub({"acme/sql": stored}) as url:
        of_hub = huggingface_hub.constants  # which reads HF_ENDPOINT when it is imported
        for name in ("ENDPOINT", "HUGGINGFACE_CO_URL_TEMPLATE"):
            monkeypatch.setattr(of_hub, name, getattr(of_hub, name).replace(of_hub._HF_DEFAULT_ENDPOINT, url))
        monkeypatch.setattr(of_hub, "HF_HUB_CACHE", str(tmp_path / "cache"))
        code, text = baton("fetch", str(file), str(root))
    assert code == 1
    assert "the adapter acme/gone can't be fetched" in text
    found = {path.name: path.read_text() for path in (root / "team" / "sql").iterdir()}
    assert found == {name: name for name in FILES}
    assert [path.name for path in root.iterdir()] == ["team"]


def test_what_is_no_adapter_leaves_no_folder(tmp_path: Path, monkeypatch) -> None:
    file, root = tmp_path / "a.json", tmp_path / "root"
    file.write_text('{"sql": {"path": "sql", "hub": "acme/sql"}}')
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetched(FILES[:1]))
    code, text = baton("fetch", str(file), str(root))
    assert code == 1
    assert "no adapter_model.safetensors" in text
    assert list(root.iterdir()) == []


def test_nothing_is_fetched_to_beside_the_root(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text('{"sql": {"path": "../sql", "hub": "acme/sql"}}')
    code, text = baton("fetch", str(file), str(tmp_path / "root"))
    assert code == 1
    assert "relative to adapters.root" in text
