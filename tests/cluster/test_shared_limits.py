"""Buckets and records that every router shares, against a real server; and none when it is away."""

from baton.cluster.membership import connect
from baton.cluster.store.buckets import RateBuckets
from baton.cluster.store.patience import CircuitBreaker
from baton.cluster.store.records import RecordStore

PATIENCE_S = 60.0  # for a Redis of a busy machine


async def test_two_routers_draw_from_one_bucket(redis):
    first, second = (RateBuckets(redis, "ns", CircuitBreaker(PATIENCE_S)) for _ in range(2))
    assert await first.take({"requests:k": (2, 1)}) == 0.0
    assert await second.take({"requests:k": (2, 1)}) == 0.0
    wait = await first.take({"requests:k": (2, 1)})
    assert wait is not None
    assert 20 < wait <= 30


async def test_taking_is_all_or_nothing_and_spending_overdraws(redis):
    buckets = RateBuckets(redis, "ns", CircuitBreaker(PATIENCE_S))
    both = {"requests:k": (1, 1), "tokens:k": (600, 500)}
    assert await buckets.take(both) == 0.0
    await buckets.spend({"tokens:k": (600, 200)})
    wait = await buckets.take({"tokens:k": (600, 100)})
    assert wait is not None
    assert 10 < wait <= 20.1  # 100 overdrawn and 100 asked, 10 a second
    refused = await buckets.take({"fresh:k": (10, 1), "tokens:k": (600, 100)})
    assert refused
    assert not await redis.exists("{ns}:bucket:fresh:k")


async def test_a_bucket_is_kept_until_it_is_full_again_however_far_it_was_overdrawn(redis):
    buckets = RateBuckets(redis, "ns", CircuitBreaker(PATIENCE_S))
    assert await buckets.take({"tokens:k": (1_000, 100_000)}) == 0.0
    assert await redis.pttl("{ns}:bucket:tokens:k") > 6_000_000 - 60_000, "100,000 tokens at 1,000 a minute"
    await buckets.spend({"tokens:k": (1_000, 10_000)})
    assert await redis.pttl("{ns}:bucket:tokens:k") > 6_600_000 - 60_000


async def test_what_an_answer_used_counts_also_where_its_bucket_is_no_longer_kept(redis):
    buckets = RateBuckets(redis, "ns", CircuitBreaker(PATIENCE_S))
    await buckets.spend({"tokens:k": (600, 800)})
    wait = await buckets.take({"tokens:k": (600, 100)})
    assert wait is not None
    assert 20 < wait <= 30.1  # 200 overdrawn and 100 asked, 10 a second


async def test_the_time_before_an_answer_ended_does_not_pay_for_it(redis):
    buckets = RateBuckets(redis, "ns", CircuitBreaker(PATIENCE_S))
    assert await buckets.take({"tokens:k": (600, 1)}) == 0.0
    seconds, _ = await redis.time()
    await redis.hset("{ns}:bucket:tokens:k", "at", (seconds - 3600) * 1000)
    await buckets.spend({"tokens:k": (600, 1_200)})
    wait = await buckets.take({"tokens:k": (600, 100)})
    assert wait is not None
    assert 60 < wait <= 70.1  # 600 overdrawn and 100 asked, 10 a second


async def test_what_is_given_back_fills_a_bucket_and_never_more(redis):
    buckets = RateBuckets(redis, "ns", CircuitBreaker(PATIENCE_S))
    assert await buckets.take({"tokens:k": (600, 600)}) == 0.0
    await buckets.spend({"tokens:k": (600, -600)})
    assert await buckets.take({"tokens:k": (600, 600)}) == 0.0
    await buckets.spend({"tokens:k": (600, -60_000)})
    assert await redis.pttl("{ns}:bucket:tokens:k") > 60_000
    await buckets.spend({"tokens:k": (600, 1_200)})
    wait = await buckets.take({"tokens:k": (600, 100)})
    assert wait is not None
    assert 60 < wait <= 70.1  # 600 overdrawn and 100 asked, 10 a second


async def test_records_are_kept_for_a_while(redis):
    store = RecordStore(redis, "ns", kept_s=60)
    await store.put({"a": b"1", "b": b"2"})
    assert (await store.get("a"), await store.get("b"), await store.get("c")) == (b"1", b"2", None)
    assert 0 < await redis.pttl("{ns}:request:a") <= 60_000
    assert await store.get("x" * 1000) is None


async def test_a_store_that_is_away_costs_nothing_but_its_answers(tmp_path):
    client = connect(f"unix://{tmp_path}/none")
    buckets, store = RateBuckets(client, "ns"), RecordStore(client, "ns")
    assert await buckets.take({"k": (1, 1)}) is None
    await buckets.spend({"k": (1, 1)})
    await store.put({"a": b"1"})
    assert await store.get("a") is None
    await client.aclose()
