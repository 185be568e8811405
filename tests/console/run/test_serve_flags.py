"""Each flag of ``baton serve`` sets the key of the configuration that it names, and only when it is given."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from baton.cluster.config import BatonConfig
from baton.console.main import app
from baton.console.run import serve
from baton.console.run.serve_flags import FLAGS, settings_of

GIVEN = {str: "x", int: 7, bool: True}
USAGE = 2  # exit status of a command line that can't be read


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Returns the list of calls that ``serve`` gets instead of running."""
    calls: list[Any] = []
    monkeypatch.setattr(serve, "run", lambda config, flags: calls.append((config, flags)) or 0)
    return calls


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.name)
def test_a_flag_sets_its_key_and_no_other(flag: Any, seen: list[Any]) -> None:
    option = f"--{flag.name.replace('_', '-')}"
    arguments = [option] if flag.kind is bool else [option, str(GIVEN[flag.kind])]
    assert CliRunner().invoke(app, ["serve", *arguments]).exit_code == 0
    ((config, flags),) = seen
    assert config is None
    set_keys = {
        f"{section}.{key}": v for section, keys in flags.items() for key, v in keys.items() if v is not None
    }
    assert set_keys == {flag.key: GIVEN[flag.kind]}


def test_every_flag_names_a_key_of_the_configuration_once() -> None:
    keys = [flag.key for flag in FLAGS]
    assert len(set(keys)) == len(keys)
    for key in keys:
        section, _, name = key.partition(".")
        assert name in type(getattr(BatonConfig(), section)).model_fields, key


def test_without_flags_nothing_is_set_and_the_config_file_is_handed_on(seen: list[Any]) -> None:
    assert CliRunner().invoke(app, ["serve", "--config", "mine.toml"]).exit_code == 0
    assert seen == [("mine.toml", settings_of({flag.name: None for flag in FLAGS}))]


def test_a_flag_that_is_unknown_is_refused(seen: list[Any]) -> None:
    assert CliRunner().invoke(app, ["serve", "--prefil", "2"]).exit_code == USAGE
    assert not seen
