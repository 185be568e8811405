"""Keys at rest, keys at the door."""

from __future__ import annotations

import pytest

from baton.protos.errors import ConfigError, Unauthenticated
from baton.router.access.keys import KeyRing, add_key, read_keys, revoke_key


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
    add_key(path, "a", 1.0)
    with pytest.raises(ConfigError, match="no key 'x'"):
        revoke_key(path, "x")
    path.write_text('{"keys": [{"id": 1}]}')
    with pytest.raises(ConfigError, match=str(path)):
        read_keys(path)
