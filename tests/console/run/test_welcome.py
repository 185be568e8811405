"""Tests that the lines which ``baton serve`` prints once the cluster is up can be pasted as they are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from baton.cluster.config import load_config
from baton.console.run.serve import welcome
from baton.launch.local import LocalCluster


def welcomed(**router: object) -> str:
    config = load_config(flags={"worker": {"device": "paced:zero"}, "router": router})
    return welcome(cast(LocalCluster, SimpleNamespace(config=config, name="demo", url="http://127.0.0.1:8000")))


def test_the_command_to_try_has_a_place_for_the_key_where_one_is_asked_for() -> None:
    assert "curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type" in welcomed()
    assert "completions -H 'Authorization: Bearer YOUR_KEY' -H 'Content-Type" in welcomed(keys_file="keys.json")
