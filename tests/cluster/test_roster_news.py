import asyncio

import msgspec
from redis.asyncio import Redis

from baton.cluster.membership import Membership, PolledRoster
from baton.cluster.roster_news import WHOLE_S, RosterNews
from baton.launch.redis_server import RedisServer
from baton.protos.measurements import WorkerLoad
from baton.protos.nouns import KvLayout, WorkerInfo


def worker(name: str = "decode-0", incarnation: str = "a") -> WorkerInfo:
    layout = KvLayout("bytes", (), 64, "bytes")
    return WorkerInfo(name, incarnation, "decode", "127.0.0.1:1", "m", "ff", layout, 100, 100, (), 10)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


async def rows(redis: Redis, news: RosterNews) -> int:
    """Looks at the news; returns how many entries Redis read for it."""
    await redis.config_resetstat()
    await news.refresh()
    return int((await redis.info("commandstats")).get("cmdstat_hmget", {"calls": 0})["calls"])


async def test_only_what_changed_is_read(redis: Redis) -> None:
    members = [Membership(redis, "ns", worker(f"decode-{i}")) for i in range(5)]
    for member in members:
        await member.beat()
    news = RosterNews(redis, "ns")
    assert await rows(redis, news) == 5
    members[0].load = WorkerLoad(running=3)
    for member in members:
        await member.beat()
    assert await rows(redis, news) == 0, "loads are no news"
    members[1].info = msgspec.structs.replace(members[1].info, state="draining")
    await members[1].beat()
    seen = await news.refresh()
    assert seen["decode-1"].state == "draining"
    assert len(seen) == 5


async def test_one_that_comes_or_is_another_is_seen_at_the_next_look(redis: Redis) -> None:
    news = RosterNews(redis, "ns")
    assert await news.refresh() == {}
    await Membership(redis, "ns", worker()).beat()
    assert (await news.refresh())["decode-0"].incarnation == "a"
    await Membership(redis, "ns", worker(incarnation="b")).beat()
    assert (await news.refresh())["decode-0"].incarnation == "b"


async def test_one_that_leaves_says_so_and_is_forgotten_in_time(redis: Redis) -> None:
    clock = Clock()
    news = RosterNews(redis, "ns", clock)
    async with Membership(redis, "ns", worker(), ttl_s=0.1):
        await news.refresh()
    assert (await news.refresh())["decode-0"].state == "left"
    await asyncio.sleep(0.15)
    clock.now += WHOLE_S
    assert await news.refresh() == {}


async def test_an_entry_of_a_build_that_numbers_none_is_seen_with_the_next_news(redis: Redis) -> None:
    news = RosterNews(redis, "ns")
    await Membership(redis, "ns", worker()).beat()
    await news.refresh()
    older = msgspec.msgpack.encode(worker("decode-1"))
    await redis.sadd("{ns}:workers", "decode-1")
    await redis.hset("{ns}:worker:decode-1", mapping={"info": older, "load": b"", "lease_ms": 5000})
    await Membership(redis, "ns", worker("decode-2")).beat()
    assert set(await news.refresh()) == {"decode-0", "decode-1", "decode-2"}


async def test_a_flushed_redis_has_news_again(redis: Redis) -> None:
    news, member = RosterNews(redis, "ns"), Membership(redis, "ns", worker())
    for _ in range(3):
        member.info = msgspec.structs.replace(member.info, max_batch=member.info.max_batch + 1)
        await member.beat()
    await news.refresh()
    await redis.flushall()
    assert "decode-0" in await news.refresh(), "a missing key is not a dead worker"
    await Membership(redis, "ns", worker(incarnation="b")).beat()
    assert (await news.refresh())["decode-0"].incarnation == "b"


async def test_the_last_view_stays_while_redis_is_away(redis: Redis, server: RedisServer) -> None:
    news = RosterNews(redis, "ns")
    await Membership(redis, "ns", worker()).beat()
    seen = await news.refresh()
    server.stop()
    assert await news.refresh() == seen
    server.start()


async def test_a_heartbeat_is_one_question_with_its_changes_of_the_cache(redis: Redis) -> None:
    member = Membership(redis, "ns", worker())
    await member.beat()
    member.publish([bytes([i]) * 32 for i in range(3)], ())
    await redis.config_resetstat()
    await member.beat()
    assert (await redis.info("commandstats"))["cmdstat_evalsha"]["calls"] == 1
    assert await redis.scard(member.index.key) == 4, "three blocks and the incarnation"


async def test_a_description_that_is_the_same_stays_the_same_object(redis: Redis) -> None:
    roster, member = PolledRoster(redis, "ns"), Membership(redis, "ns", worker())
    await member.beat()
    first = (await roster.refresh())["decode-0"]
    member.load = WorkerLoad(running=1)
    await member.beat()
    second = (await roster.refresh())["decode-0"]
    assert first.info is second.info
    assert second.load.running == 1


async def test_a_heartbeat_goes_out_although_its_news_cannot_be_looked_at(redis: Redis) -> None:
    looked: list[str] = []

    def stumble() -> None:
        looked.append("once more")
        raise ValueError("a mistake of ours")

    member = Membership(redis, "ns", worker(), beat_s=0.02)
    member.look = stumble
    async with member, asyncio.timeout(30):
        while len(looked) < 2:
            await asyncio.sleep(0.005)
        await redis.flushall()
        while "decode-0" not in await PolledRoster(redis, "ns").refresh():
            await asyncio.sleep(0.005)
