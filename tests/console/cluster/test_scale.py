"""Tests `baton scale`: what it takes, whom it asks, and that the roles it reports are those that are played."""

import asyncio
import time

import msgspec
import pytest
from typer.testing import CliRunner

from baton.cluster.membership import Membership, connect
from baton.cluster.scale import ScaleRequest, announce_placer, begin, read
from baton.console.cluster.scale import parse
from baton.console.main import app
from baton.launch.redis_server import RedisServer
from baton.protos.nouns import KvLayout, WorkerInfo

INFO = WorkerInfo(
    "w", "i", "decode", "127.0.0.1:1", "m", "f", KvLayout("float32", (), 256, "float32"), 16, 16, (), 1
)
run = CliRunner().invoke


@pytest.fixture
def plays(server: RedisServer):
    """Fills the cluster of a Redis with ready workers, slot by slot in a role."""

    def fill(**roles: str) -> str:
        async def write() -> None:
            redis = connect(server.url)
            await redis.flushall()
            for slot, role in roles.items():
                info = msgspec.structs.replace(INFO, worker_id=slot.replace("_", "-"), role=role)
                assert await Membership(redis, "baton", info, ttl_s=60).beat()
            await redis.aclose()

        asyncio.run(write())
        return server.url

    return fill


def scaled(url: str, *args: str):
    done = run(app, ["scale", *args, "--redis", url])
    return done.exit_code, " ".join(done.output.split())


async def asked(url: str) -> ScaleRequest | None:
    redis = connect(url)
    try:
        return await read(redis, "baton")
    finally:
        await redis.aclose()


async def numbers_were_placed(url: str) -> None:
    redis = connect(url)
    await begin(redis, "baton", ScaleRequest(1, 1))
    await redis.aclose()


async def placer_looks(url: str) -> None:
    redis = connect(url)
    await announce_placer(redis, "baton")
    await redis.aclose()


def test_numbers_are_read_and_others_refused_in_one_line() -> None:
    assert parse(["prefill=3", "decode=1"]) == {"prefill": 3, "decode": 1}
    for wrong in ("prefill", "prefill=x", "king=3", "decode=-1", "decode=²"):
        code, said = scaled("unix:///nowhere", wrong)
        assert (code, "give prefill=N, decode=N or both" in said) == (1, True), said


def test_without_waiting_it_only_asks(plays) -> None:
    url = plays()
    assert scaled(url, "prefill=3", "decode=2", "--wait", "0") == (0, "prefill=3 decode=2, asked for")
    asyncio.run(placer_looks(url))
    code, late = scaled(url, "decode=4", "--wait", "0.3")
    assert (code, "not so after 0.3 s" in late) == (1, True), late
    assert asyncio.run(asked(url)) == ScaleRequest(3, 4, 2)


def test_where_nobody_places_workers_that_is_said_at_once_and_nothing_is_asked(plays) -> None:
    url, began = plays(prefill_0="prefill", decode_0="decode"), time.monotonic()
    code, said = scaled(url, "decode=4", "--wait", "30")
    assert (code, "nobody places workers in the namespace 'baton'" in said) == (1, True), said
    assert "`baton serve` or `baton place`" in said
    assert time.monotonic() - began < 20
    assert asyncio.run(asked(url)) is None


def test_a_placer_of_an_older_build_that_gives_no_sign_is_not_denied(plays, server) -> None:
    url = plays(prefill_0="prefill", decode_0="decode")
    asyncio.run(numbers_were_placed(url))
    code, said = scaled(url, "decode=4", "--wait", "30")
    assert (code, "gives no sign" in said, "older build" in said, "`--wait 0` asks it" in said) == (
        1,
        True,
        True,
        True,
    )
    assert "workers here run baton unknown" in said
    assert asyncio.run(asked(url)).decode == 1


def test_slots_that_play_the_roles_that_were_asked_for_are_a_success(plays) -> None:
    code, said = scaled(plays(prefill_0="prefill", decode_0="decode"), "prefill=1", "decode=1")
    assert (code, said.startswith("prefill=1 decode=1 after")) == (0, True), said


@pytest.mark.parametrize("pool", [{}, {"small_0": "decode", "small_1": "prefill"}], ids=["alone", "beside a pool"])
def test_slots_that_play_other_roles_are_none_and_the_way_back_is_said(plays, pool) -> None:
    url = plays(prefill_0="decode", prefill_1="decode", decode_0="prefill", decode_1="decode", **pool)
    code, said = scaled(url, "prefill=2", "decode=2")
    assert code == 1
    assert "prefill=1 decode=3" in said
    assert "decode-0 plays prefill, prefill-0 plays decode, prefill-1 plays decode" in said
    assert "`baton role prefill-0 prefill` turns that" in said  # one is short, though three play other roles
    assert "ratio set" not in said  # that counts the pool's workers too


@pytest.mark.parametrize(
    ("roles", "asked_for", "missing"),
    [
        ({"prefill_0": "decode", "decode_0": "prefill"}, ("prefill=0", "decode=1"), "decode"),
        ({"prefill_0": "decode", "decode_0": "decode", "decode_1": "prefill"}, ("decode=1",), "prefill"),
    ],
)
def test_the_last_workers_of_a_role_are_not_scaled_away_by_their_slots_names(
    plays, roles, asked_for, missing
) -> None:
    url = plays(**roles)
    code, said = scaled(url, *asked_for)
    assert (code, f"no {missing} worker would be left" in said) == (1, True), said
    assert f"baton role {missing}-0 {missing}" in said
    assert asyncio.run(asked(url)) is None  # nobody was asked to drain them


def test_a_redis_that_does_not_answer_is_one_line() -> None:
    code, said = scaled("unix:///nowhere", "prefill=1", "decode=1")
    assert (code, said.startswith("error: no Redis answers at unix:///nowhere")) == (1, True), said
