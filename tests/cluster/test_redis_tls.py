"""Redis over TLS, with an ACL: a real server behind a TLS front (the embedded one is built without)."""

import asyncio
import shutil
import ssl
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from redis.exceptions import RedisError

from baton.cluster.config import load_config
from baton.cluster.membership import Membership, PolledRoster, connect
from baton.cluster.store.redis_url import masked
from baton.launch.redis_server import RedisServer, check_redis
from baton.protos.errors import ConfigError
from baton.tls.identity import TlsFiles
from bench.tls_front import Front
from tests.cluster.test_membership import worker
from tests.tls.papers import authority, identity


@pytest.fixture
async def port() -> AsyncIterator[int]:
    with tempfile.TemporaryDirectory(prefix="bt-") as folder:  # pytest's own path is too long for a socket
        server = RedisServer(Path(folder)).start()
        try:
            async with fronted(server, Path(folder)) as number:
                yield number
        finally:
            server.stop()


@asynccontextmanager
async def fronted(server: RedisServer, folder: Path) -> AsyncIterator[int]:
    """Yields the port of a TLS front before the server, which has a user "baton" and no default user."""
    admin = connect(server.url)
    await admin.execute_command("ACL", "SETUSER", "baton", "on", ">p@ss word", "~*", "&*", "+@all")
    await admin.execute_command("ACL", "SETUSER", "default", "off")
    front = Front(folder / "redis.sock", identity("redis"))
    yield await front.start()
    await front.stop()
    await admin.aclose()


def url_of(port: int, folder: Path, **changed: str) -> str:
    redis = {
        "url": f"rediss://localhost:{port}/0", "username": "baton", "password": "p@ss word",
        "ca": str(folder / "ca.crt"), "cert": str(folder / "worker.crt"), "key": str(folder / "worker.key"),
    }  # fmt: skip
    return load_config(flags={"redis": redis | changed}).redis.url


async def test_members_and_roster_meet_over_tls_with_a_user_and_its_password(port: int) -> None:
    url = url_of(port, authority().folder)
    await asyncio.to_thread(check_redis, url)
    redis = connect(url)
    async with Membership(redis, "tls", worker("w1")):
        assert set(await PolledRoster(redis, "tls").refresh()) == {"w1"}
    await redis.aclose()


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"password": "wrong"}, "invalid username-password|WRONGPASS"),
        ({"ca": "stranger"}, "certificate verify failed"),
        ({"cert": "", "key": ""}, "."),
        ({"cert": "expired.crt", "key": "expired.key"}, "."),
    ],
)
async def test_wrong_credentials_are_a_config_error_that_shows_no_password(port: int, changed, why: str) -> None:
    folder = authority().folder
    named = {k: str(folder / v) if v.endswith((".crt", ".key")) else v for k, v in changed.items()}
    if changed.get("ca"):
        named["ca"] = str(authority("stranger").folder / "ca.crt")
    with pytest.raises(ConfigError, match=why) as raised:
        await asyncio.to_thread(check_redis, url_of(port, folder, **named))
    assert "p%40ss" not in raised.value.message
    assert "wrong" not in raised.value.message.partition("answers at")[2].partition(" ")[0]


async def test_a_new_connection_reads_renewed_certificates(port: int, tmp_path: Path) -> None:
    for name in ("worker.crt", "worker.key", "ca.crt"):
        shutil.copy(authority().folder / name, tmp_path / name)
    redis = connect(url_of(port, tmp_path))
    assert await redis.ping()
    shutil.copy(authority().folder / "expired.crt", tmp_path / "worker.crt")
    shutil.copy(authority().folder / "expired.key", tmp_path / "worker.key")
    await redis.connection_pool.disconnect()
    with pytest.raises((RedisError, OSError, ssl.SSLError)):
        await redis.ping()
    for name in ("worker.crt", "worker.key"):
        shutil.copy(authority().folder / name, tmp_path / name)
    await redis.connection_pool.disconnect()
    assert await redis.ping()
    await redis.aclose()


def test_credentials_are_put_into_the_url_and_not_shown() -> None:
    config = load_config(flags={"redis": {"url": "redis://h:1/0", "username": "u", "password": "a/b"}})
    assert config.redis.url == "redis://u:a%2Fb@h:1/0"
    assert masked(config.redis.url) == "redis://u:…@h:1/0"
    assert "secret" not in masked("unix:///s?password=secret")
    assert masked("redis://h:1") == "redis://h:1"


@pytest.mark.parametrize(
    ("redis", "text"),
    [
        ({"password": "x"}, "set redis.url"),
        ({"url": "redis://h", "ca": "/x"}, "begin redis.url with rediss://"),
        ({"url": "rediss://h", "cert": "/x"}, "belong together"),
    ],
)
def test_credentials_that_cannot_be_used_are_refused(redis, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load_config(flags={"redis": redis})


@pytest.mark.parametrize(
    ("tls", "text"),
    [
        ({"cert": "/a", "key": "/b"}, "ca is missing"),
        ({"dir": "/d", "cert": "/a", "key": "/b", "ca": "/c"}, "not both"),
        ({"client_ca": "/c"}, "need tls.dir"),
        ({"dir": "/d", "client_names": ["x"]}, "needs tls.client_ca"),
        ({"dir": "/d", "public_cert": "/p"}, "belong together"),
        ({"dir": "/d", "domain": "Baton!"}, "domain"),
        ({"folder": "/d"}, "unknown setting tls.folder"),
    ],
)
def test_a_tls_section_that_is_not_whole_is_refused_with_the_reason(tls, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load_config(flags={"tls": tls})


def test_client_certificates_are_authentication_enough_for_a_routable_address() -> None:
    routable = {"router": {"host": "0.0.0.0"}}
    with pytest.raises(ConfigError, match=r"tls\.client_ca"):
        load_config(flags=routable | {"tls": {"dir": "/d"}})
    assert load_config(flags=routable | {"tls": {"dir": "/d", "client_ca": "/d/ca.crt"}}).tls.enabled


def test_files_default_to_the_domain_of_the_config() -> None:
    assert TlsFiles("c", "k").name_of("worker") == "worker.baton.internal"
