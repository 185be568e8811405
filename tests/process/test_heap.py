"""Each process of a cluster settles its heap before it serves: no later collection walks what it began with."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from baton.cluster.config import load_config
from baton.engine import child
from baton.process.heap import YOUNG, settle_heap
from baton.router_host import main as router_host
from baton.worker import engine_main
from baton.worker import host as worker_host
from baton.worker.spec import WorkerSpec, dump_spec

CODE = """
import gc
kept = [{i: [i]} for i in range(200_000)]
gc.collect()
from baton.process.heap import settle_heap
settle_heap()
print(gc.get_freeze_count(), len(gc.get_objects()), gc.get_threshold()[0])
"""


def test_what_was_made_before_is_never_walked_again() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    frozen, walked, young = map(int, done.stdout.split())
    assert frozen > 400_000
    assert walked < 1_000
    assert young == YOUNG


async def test_a_router_settles_when_it_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    async def serve(config: Any, router_id: str, stop: Any, started: Callable[[Any], None], *rest: Any) -> None:
        assert done == []
        started(SimpleNamespace(url="http://here"))
        done.append("served")

    monkeypatch.setattr(router_host, "serve", serve)
    monkeypatch.setattr(router_host, "settle_heap", lambda: done.append("settled"))
    await router_host._until_signalled(load_config(search=tmp_path), tmp_path / "config.json", 0)
    assert done == ["settled", "served"]


def test_an_engine_settles_between_loading_and_its_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def build(*_: Any) -> Any:
        done.append("built")
        parts = SimpleNamespace(runner=None, adapters=SimpleNamespace(close=lambda: done.append("close")))
        return SimpleNamespace(run=lambda: done.append("run"), next_role="", parts=parts)

    ours, theirs = socket.socketpair()
    spec = dump_spec(WorkerSpec("decode-0", "decode", "/nowhere"))
    with ours:
        asked = ["engine_main", "--spec", spec, "--fd", str(theirs.detach()), "--parent", "1"]
        monkeypatch.setattr(sys, "argv", asked)
        monkeypatch.setattr(child, "die_with", lambda _: None)
        monkeypatch.setattr(child.signal, "signal", lambda *_: None)
        monkeypatch.setattr(engine_main, "build", build)
        monkeypatch.setattr(engine_main, "settle_heap", lambda: done.append("settled"))
        monkeypatch.setattr(engine_main, "_leave", lambda channel, status: status)
        assert engine_main.main() == 0
    assert done == ["built", "settled", "run", "close"]


def test_a_worker_is_told_to_settle_once_it_is_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Host(worker_host.WorkerHost):
        async def run(self) -> int:
            assert self.prepared is settle_heap
            return 7

    monkeypatch.setattr(worker_host, "WorkerHost", Host)
    spec = WorkerSpec.of("decode-0", "decode", tmp_path, device="paced:zero")
    assert worker_host.run(spec) == 7
