"""Tests what `baton place` is to have, over a real Redis: the config's numbers, and who asks for others."""

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from redis import Redis

from baton.cluster.config import BatonConfig, load_config
from baton.cluster.membership import connect
from baton.cluster.scale import ScaleRequest, ask, key
from baton.launch.ray import follow
from baton.launch.ray.follow import ScaleFollower
from baton.launch.redis_server import RedisServer

PATIENCE_S = 30.0
NEVER_S = 0.3


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with tempfile.TemporaryDirectory(prefix="bt-") as folder:  # unix sockets end at 107 bytes
        found = RedisServer(Path(folder)).start()
        yield found
        found.stop()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "LOOK_S", 0.02)


@pytest.fixture
def starts() -> Iterator[Callable[..., ScaleFollower]]:
    started: list[ScaleFollower] = []

    def start(config: BatonConfig, file: str = "") -> ScaleFollower:
        started.append(ScaleFollower(config, file))
        started[-1].start()
        return started[-1]

    yield start
    for one in started:
        one.stop()


def config(url: str, prefill: int = 1, decode: int = 1) -> BatonConfig:
    return load_config(
        flags={"redis": {"url": url}, "cluster": {"prefill": prefill, "decode": decode}}, search=Path("/nowhere")
    )


def written(file: Path, url: str, prefill: int) -> str:
    replaced(file, f"[redis]\nurl = '{url}'\n[cluster]\nprefill = {prefill}\n")
    return str(file)


def replaced(file: Path, text: str) -> None:
    """At once, because who follows it takes up half of a file as well."""
    draft = file.with_suffix(".new")
    draft.write_text(text)
    draft.replace(file)


def taken(following: ScaleFollower) -> tuple[int, int]:
    """Waits for the next numbers and returns them."""
    deadline = time.monotonic() + PATIENCE_S
    while (found := following.take()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found.cluster.prefill, found.cluster.decode


def logged(caplog, text: str) -> None:
    """Until the log says so."""
    deadline = time.monotonic() + PATIENCE_S
    while text not in caplog.text:
        assert time.monotonic() < deadline, caplog.text
        time.sleep(0.01)


def wish(url: str, prefill: int, decode: int) -> None:
    """Asks for other numbers, as `baton scale` does."""

    async def say() -> None:
        client = connect(url)
        await ask(client, "baton", ScaleRequest(prefill, decode))
        await client.aclose()

    asyncio.run(say())


def test_the_configs_numbers_hold_until_others_are_asked_for(server: RedisServer, starts) -> None:
    following = starts(config(server.url, 2, 1))
    assert taken(following) == (2, 1)
    wish(server.url, 3, 4)
    assert taken(following) == (3, 4)
    wish(server.url, 3, 4)
    time.sleep(NEVER_S)
    assert following.take() is None, "the same again is nothing new"


def test_who_starts_again_goes_on_with_what_was_asked(server: RedisServer, starts) -> None:
    first = starts(config(server.url))
    assert taken(first) == (1, 1)
    wish(server.url, 1, 3)
    assert taken(first) == (1, 3)
    first.stop()
    assert taken(starts(config(server.url))) == (1, 3)
    assert taken(starts(config(server.url, 2))) == (2, 1), "another config comes after it"


def test_a_config_that_changes_while_it_runs_is_taken_up(
    server: RedisServer, starts, tmp_path: Path, caplog
) -> None:
    file = tmp_path / "baton.toml"
    following = starts(load_config(written(file, server.url, 1)), str(file))
    assert taken(following) == (1, 1)
    wish(server.url, 2, 2)
    assert taken(following) == (2, 2)
    written(file, server.url, 4)
    assert taken(following) == (4, 1)
    replaced(file, "[cluster]\nprefil = 5\n")
    logged(caplog, "is not taken up: unknown setting cluster.prefil")
    assert following.take() is None
    written(file, server.url, 5)
    assert taken(following) == (5, 1)


def test_a_redis_that_is_away_or_empty_again_changes_nothing(server: RedisServer, starts, caplog) -> None:
    settings = config(server.url)
    server.stop()
    following = starts(settings)
    logged(caplog, "nothing is placed until it is back")
    assert following.take() is None, "nobody knows what was asked"
    server.start()
    assert taken(following) == (1, 1)
    wish(server.url, 1, 2)
    assert taken(following) == (1, 2)
    with Redis.from_url(server.url) as client:
        client.flushall()
        deadline = time.monotonic() + PATIENCE_S
        while not client.exists(key("baton")):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert following.take() is None
    wish(server.url, 1, 3)
    assert taken(following) == (1, 3)


def test_numbers_that_cannot_be_are_nobodys_and_the_next_ones_are_heard(server: RedisServer, starts) -> None:
    following = starts(config(server.url))
    assert taken(following) == (1, 1)
    with Redis.from_url(server.url) as client:
        client.set(key("baton"), msgspec.msgpack.encode(ScaleRequest(3, 0, serial=9)))
    time.sleep(NEVER_S)
    assert following.take() is None
    wish(server.url, 2, 2)
    assert taken(following) == (2, 2)


def test_without_a_redis_the_config_decides(starts) -> None:
    assert taken(starts(config("", 2, 3))) == (2, 3)
