"""Tests baton.tls.authority: what a development CA writes."""

import datetime
import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from baton.protos.errors import ConfigError
from baton.tls.authority import ROLES, Authority


def leaf(folder: Path, role: str) -> x509.Certificate:
    return x509.load_pem_x509_certificate((folder / f"{role}.crt").read_bytes())


def names(cert: x509.Certificate) -> list[str]:
    return [str(n.value) for n in cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value]


def test_every_role_gets_a_leaf_of_the_ca_that_names_it_and_nobody_else_may_read_a_key(tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    made = Authority(folder)
    assert made.make(hosts=["baton.example", "10.1.2.3"]) == list(ROLES)
    ca = leaf(folder, "ca")
    for role in ROLES:
        cert = leaf(folder, role)
        cert.verify_directly_issued_by(ca)
        assert names(cert)[0] == f"{role}.baton.internal"
        assert {"10.1.2.3", "baton.example"} <= set(names(cert))
        assert ("127.0.0.1" in names(cert)) == (role in ("router", "redis", "ray"))
        usages = cert.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        assert set(usages) == {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}
        life = cert.not_valid_after_utc - cert.not_valid_before_utc
        assert datetime.timedelta(days=90) <= life < datetime.timedelta(days=91)
        assert not cert.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert ca.extensions.get_extension_for_class(x509.BasicConstraints).value == x509.BasicConstraints(True, 0)
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_good_leaves_stay_and_those_near_their_end_are_made_anew(tmp_path: Path) -> None:
    made = Authority(tmp_path)
    made.make(days=90)
    assert made.make() == []
    old = leaf(tmp_path, "worker")
    made.issue("worker", ["worker.baton.internal"], days=0.001)
    assert Authority(tmp_path).make() == ["worker"]
    assert leaf(tmp_path, "worker").serial_number != old.serial_number
    made.issue("client", ["client.baton.internal"], days=-1)
    assert made.make() == ["client"]


def test_a_renewed_leaf_keeps_its_names_and_the_ca_stays(tmp_path: Path) -> None:
    Authority(tmp_path).make(hosts=["far.example"])
    before, ca = leaf(tmp_path, "router"), (tmp_path / "ca.crt").read_bytes()
    assert Authority(tmp_path).make(["router"], anew=True) == ["router"]
    after = leaf(tmp_path, "router")
    assert after.serial_number != before.serial_number
    assert set(names(after)) == set(names(before))
    assert "far.example" in names(after)
    assert (tmp_path / "ca.crt").read_bytes() == ca


def test_what_is_shown_says_when_a_leaf_ends_and_whose_it_is(tmp_path: Path) -> None:
    ours, other = Authority(tmp_path / "a"), Authority(tmp_path / "b")
    ours.make(["worker"])
    other.make(["worker"])
    (tmp_path / "a" / "client.crt").write_bytes((tmp_path / "b" / "worker.crt").read_bytes())
    shown = {one.role: one for one in ours.show()}
    assert shown["worker"].signed_here
    assert not shown["client"].signed_here
    assert shown["ca"].ends > shown["worker"].ends


@pytest.mark.parametrize(("name", "text"), [("ca.key", "holds no key"), ("ca.crt", "holds no certificate")])
def test_a_damaged_ca_is_refused_by_name(tmp_path: Path, name: str, text: str) -> None:
    Authority(tmp_path)
    (tmp_path / name).write_text("rubbish")
    with pytest.raises(ConfigError, match=rf"{name} {text}"):
        Authority(tmp_path)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="certificates can't be kept in"):
        Authority(tmp_path / "file" / "certs")
