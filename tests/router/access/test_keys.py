"""Keys at rest, keys at the door."""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from baton.protos.errors import ConfigError, Unauthenticated
from baton.router.access import keys
from baton.router.access.keys import ApiKey, KeyRing, add_key, read_keys, revoke_key


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_key_is_kept_as_a_hash_and_opens_the_door(tmp_path):
    path = tmp_path / "keys.json"
    text = add_key(path, "acme", 1.0, name="ci", requests_per_min=5)
    assert text not in path.read_text()
    assert path.stat().st_mode & 0o077 == 0
    found = KeyRing(path, Clock()).find(text)
    assert (found.tenant, found.name, found.requests_per_min) == ("acme", "ci", 5)


def test_a_file_that_is_changed_keeps_its_owner_and_mode(tmp_path):
    path = tmp_path / "keys.json"
    add_key(path, "acme", 1.0)
    path.chmod(0o640)
    if os.geteuid() == 0:
        os.chown(path, 65534, 65534)
    before = path.stat()
    revoke_key(path, read_keys(path)[0].id)
    after = path.stat()
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)


def test_keys_that_are_added_at_once_are_all_there(tmp_path):
    path = tmp_path / "keys.json"
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda number: add_key(path, f"t{number}", 1.0), range(24)))
    assert {key.tenant for key in read_keys(path)} == {f"t{number}" for number in range(24)}


@pytest.mark.parametrize(
    "spoil", [lambda k: k[:-1] + ("A" if k[-1] != "A" else "B"), lambda k: k[3:], lambda k: ""]
)
def test_a_wrong_key_opens_nothing(tmp_path, spoil):
    path = tmp_path / "keys.json"
    text = add_key(path, "acme", 1.0)
    with pytest.raises(Unauthenticated):
        KeyRing(path, Clock()).find(spoil(text))
    with pytest.raises(Unauthenticated):
        KeyRing(path, Clock()).find("bt-000000000000-" + text[16:])


def test_a_running_ring_notices_new_and_revoked_keys_and_survives_a_broken_file(tmp_path):
    path, clock = tmp_path / "keys.json", Clock()
    first = add_key(path, "acme", 1.0)
    ring = KeyRing(path, clock)
    second = add_key(path, "other", 2.0)
    with pytest.raises(Unauthenticated):
        ring.find(second)  # it looks once a second
    clock.now += 1
    assert ring.find(second).tenant == "other"
    revoke_key(path, ring.find(first).id)
    clock.now += 1
    with pytest.raises(Unauthenticated):
        ring.find(first)
    path.write_text("{")
    clock.now += 1
    assert ring.find(second).tenant == "other"
    assert len(ring) == 2


def test_a_revocation_counts_as_soon_as_the_file_can_be_read_again(tmp_path, monkeypatch, caplog):
    path, clock = tmp_path / "keys.json", Clock()
    text = add_key(path, "acme", 1.0)
    ring = KeyRing(path, clock)
    revoke_key(path, ring.find(text).id)
    with monkeypatch.context() as failing:
        failing.setattr(keys, "read_keys", _too_many_files)
        for _ in range(3):
            clock.now += 1
            assert ring.find(text).tenant == "acme"
        said = [record.message for record in caplog.records if "too many open files" in record.message]
        assert said == ["API keys stay as they were, and a revoked one stays valid: too many open files"]
        clock.now += keys.WARN_EVERY_S
        assert ring.find(text).tenant == "acme"
    assert caplog.text.count("too many open files") == 2, "as long as it lasts, once a minute"
    clock.now += 1
    with pytest.raises(Unauthenticated):
        ring.find(text)


def test_a_change_while_the_file_is_first_read_is_read_too(tmp_path, monkeypatch):
    path, clock = tmp_path / "keys.json", Clock()
    text = add_key(path, "acme", 1.0)

    def read_and_revoked(of: Path) -> list[ApiKey]:
        found = read_keys(of)
        monkeypatch.undo()
        revoke_key(of, found[0].id)
        return found

    monkeypatch.setattr(keys, "read_keys", read_and_revoked)
    ring = KeyRing(path, clock)
    clock.now += 1
    with pytest.raises(Unauthenticated):
        ring.find(text)


def _too_many_files(_: Path) -> list[ApiKey]:
    raise ConfigError("too many open files", "router.keys_file")


def test_tenants_have_salts_of_their_own_the_same_everywhere(tmp_path):
    path = tmp_path / "keys.json"
    for tenant in ("a", "a", "b"):
        add_key(path, tenant, 1.0)
    a, again, b = (k.salt for k in read_keys(path))
    assert a == again != b
    assert len(a) == 16


def test_mistakes_are_named(tmp_path):
    path = tmp_path / "keys.json"
    with pytest.raises(ConfigError, match="no such file"):
        KeyRing(path, Clock())
    with pytest.raises(ConfigError, match="tenant 'a b'"):
        add_key(path, "a b", 1.0)
    with pytest.raises(ConfigError, match="weight"):
        add_key(path, "a", 1.0, weight=0.0)
    for option, field in (("adapter", {"adapters": ("sql", "team/sql")}), ("bound", {"adapter": "team/sql"})):
        with pytest.raises(ConfigError, match=f"--{option}: adapter name 'team/sql': use"):
            add_key(path, "a", 1.0, **field)
    add_key(path, "a", 1.0)
    for field, value in (
        ("weight", math.inf),
        ("weight", 1e-320),
        ("tokens_per_min", 2**62),
        ("requests_per_min", -1),
    ):
        with pytest.raises(ConfigError, match=field):
            add_key(path, "a", 1.0, **{field: value})
    assert len(read_keys(path)) == 1  # which can still be read
    with pytest.raises(ConfigError, match="no key 'x'"):
        revoke_key(path, "x")
    path.write_text('{"keys": [{"id": 1}]}')
    with pytest.raises(ConfigError, match=str(path)):
        read_keys(path)
