"""Tests baton.tls.identity: files that are missing, don't fit, end, or change."""

import asyncio
import errno
import logging
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop

from baton.protos.errors import ConfigError
from baton.tls.authority import Authority
from baton.tls.identity import AGAIN_S, LOOK_S, Identity, TlsFiles, only_names, only_roles
from tests.tls.papers import files, identity


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def house(tmp_path: Path) -> Authority:
    made = Authority(tmp_path)
    made.make(["worker", "router"])
    return made


def of(house: Authority, role: str = "worker") -> TlsFiles:
    folder = house.folder
    return TlsFiles(str(folder / f"{role}.crt"), str(folder / f"{role}.key"), str(folder / "ca.crt"))


@asynccontextmanager
async def listening(server: Identity) -> AsyncIterator[int]:
    """A port that says "hello" to who gets in."""

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        writer.close()

    serving = await asyncio.start_server(greet, "127.0.0.1", 0, ssl=server.listener())
    async with serving:
        yield serving.sockets[0].getsockname()[1]


async def greeted(port: int, client: ssl.SSLContext | None, name: str = "worker.baton.internal") -> bytes:
    name_or_none = name if client else None
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client, server_hostname=name_or_none)
    try:
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        return await asyncio.wait_for(reader.read(), 30)
    finally:
        writer.close()


@pytest.mark.parametrize("kind", ["cert", "key", "ca"])
def test_a_missing_file_is_refused_with_its_setting(house: Authority, kind: str) -> None:
    Path(getattr(of(house), kind)).unlink()
    with pytest.raises(ConfigError, match=rf"tls\.{kind} .*No such file.*baton certs make") as raised:
        Identity(of(house))
    assert raised.value.param == f"tls.{kind}"


def test_a_key_of_another_certificate_is_refused(house: Authority) -> None:
    own, other = of(house), of(house, "router")
    with pytest.raises(ConfigError, match="are not a certificate and its key"):
        Identity(TlsFiles(own.cert, other.key, own.ca))


def test_a_ca_file_without_a_certificate_is_refused(house: Authority) -> None:
    Path(of(house).ca).write_text("no certificate")
    with pytest.raises(ConfigError, match="holds no CA certificate"):
        Identity(of(house))


def test_one_that_is_over_or_ends_soon_is_complained_about(
    house: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    house.issue("worker", ["worker.baton.internal"], days=-1)
    Identity(of(house))
    assert "ended at" in caplog.text
    caplog.clear()
    house.issue("worker", ["worker.baton.internal"], days=2)
    Identity(of(house))
    assert "ends at" in caplog.text
    assert "baton certs renew" in caplog.text


def test_a_new_certificate_is_in_force_within_a_second_and_the_files_are_looked_at_once_in_it(
    house: Authority,
) -> None:
    clock = Clock()
    found = Identity(of(house), clock=clock)
    first = found.current()
    house.make(["worker"], anew=True)
    assert found.current() is first, "not looked at yet"
    clock.now += LOOK_S
    assert found.current().cert != first.cert
    assert found.generation == 1


def test_files_that_do_not_fit_leave_the_old_ones_in_force_and_are_told_once(
    house: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    found = Identity(of(house), clock=clock)
    first, key = found.current(), Path(of(house).key)
    good = key.read_bytes()
    key.write_bytes(Path(of(house, "router").key).read_bytes())
    for _ in range(3):
        clock.now += LOOK_S
        assert found.current() is first
    assert caplog.text.count("the old one stays") == 1
    key.write_bytes(good)
    clock.now += LOOK_S
    assert found.current().cert == first.cert
    assert found.generation == 1


def test_files_that_could_not_be_read_for_want_of_descriptors_are_read_again(
    house: Authority, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def scarce(path: Path) -> bytes:
        raise OSError(errno.EMFILE, "Too many open files")

    clock = Clock()
    found = Identity(of(house), clock=clock)
    first = found.current()
    house.make(["worker"], anew=True)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", scarce)
        for _ in range(3):
            clock.now += AGAIN_S
            assert found.current() is first
    clock.now += AGAIN_S
    assert found.current().cert != first.cert
    assert [r.message.count("Too many open files") for r in caplog.records if r.levelno == logging.ERROR] == [1]


async def test_a_ca_that_is_taken_out_lets_its_leaves_in_no_more(house: Authority, tmp_path_factory) -> None:
    clock, new = Clock(), Authority(tmp_path_factory.mktemp("new"))
    new.make(["worker"])
    server = Identity(of(house), clock=clock)
    async with listening(server) as port:
        old_client, new_client = Identity(of(house), clock=Clock()), Identity(of(new), clock=Clock())
        assert await greeted(port, old_client.current().client) == b"hello"
        both = Path(of(house).ca).read_bytes() + Path(of(new).ca).read_bytes()
        Path(of(house).ca).write_bytes(both)
        clock.now += LOOK_S
        assert await greeted(port, old_client.current().client) == b"hello"
        for kind in ("cert", "key", "ca"):  # one by one, as a careless copy does
            Path(getattr(of(house), kind)).write_bytes(Path(getattr(of(new), kind)).read_bytes())
        clock.now += LOOK_S
        assert await greeted(port, new_client.current().client) == b"hello"
        with pytest.raises(ssl.SSLCertVerificationError):
            await greeted(port, old_client.current().client)


WRONG = {
    "plaintext": (None, "plaintext"),
    "nothing shown": ("none", "the peer showed no certificate"),
    "a stranger": ("stranger", "refused: unable to get local issuer certificate"),
    "expired": ("expired", "refused: certificate has expired"),
    "another role": ("nobody", "somebody.example, not worker.baton.internal"),
}


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("name", WRONG)
def test_a_refused_handshake_is_in_the_log_with_the_ports_name_and_the_cause(
    name: str, loop, caplog: pytest.LogCaptureFixture
) -> None:
    who, cause = WRONG[name]

    async def visit() -> None:
        async with listening(identity("worker", "the KV port of decode-0", ("worker",))) as port:
            assert await greeted(port, identity().current().client) == b"hello"
            with pytest.raises((OSError, AssertionError)):
                assert await greeted(port, context(who)) == b"hello"
            async with asyncio.timeout(30):
                while not told():
                    await asyncio.sleep(0.01)

    def told() -> list[str]:
        said = [record.getMessage() for record in caplog.records if record.name == "baton.tls"]
        return [line for line in said if "refused on the KV port of decode-0" in line and cause in line]

    with asyncio.Runner(loop_factory=loop) as runner, caplog.at_level(logging.WARNING):
        runner.run(visit())


def context(who: str | None) -> ssl.SSLContext | None:
    if who is None:
        return None
    if who == "none":
        return ssl.create_default_context(cafile=files("worker").ca)
    found = files("worker", ca="ours", of="stranger") if who == "stranger" else files(who)
    return Identity(found).current().client


async def test_a_server_of_another_role_or_ca_is_refused_by_its_client() -> None:
    async with listening(identity("router")) as port:
        with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
            await greeted(port, identity("worker").current().client)
    async with listening(identity("worker", of="stranger", ca="ours")) as port:
        with pytest.raises(ssl.SSLCertVerificationError, match="unable to get local issuer"):
            await greeted(port, identity("worker").current().client)


def test_permits_say_what_speaks_against_a_peer() -> None:
    certificate = {"subjectAltName": (("DNS", "worker.baton.internal"), ("IP Address", "10.0.0.1"))}
    assert only_roles(files("worker"), ("router", "worker"))(certificate) == ""
    assert "not router.baton.internal" in only_roles(files("worker"), ("router",))(certificate)
    assert only_names(["worker.baton.internal"])(certificate) == ""
    assert "not in tls.client_names" in only_names(["a.example"])({})


def test_openssl_itself_finds_the_leaves_good(house: Authority) -> None:
    command = ["openssl", "verify", "-x509_strict", "-CAfile", of(house).ca, of(house).cert]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("no openssl command here")
    assert done.returncode == 0, done.stderr
