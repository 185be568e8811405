"""A store that hangs costs one request a bounded time, and the others nothing."""

import asyncio

import pytest

from baton.cluster.store.buckets import RateBuckets
from baton.cluster.store.patience import CircuitBreaker

WAIT_S, REST_S = 60.0, 1.0


class Store:
    """Late, silent, or prompt; counts how often it was asked."""

    def __init__(self):
        self.asked, self.late, self.answers = 0, True, asyncio.Event()

    async def __call__(self):
        self.asked += 1
        if self.late:
            raise TimeoutError
        await self.answers.wait()
        return "yes"


@pytest.fixture
def now():
    return [100.0]


@pytest.fixture
def patience(now):
    return CircuitBreaker(WAIT_S, REST_S, lambda: now[0])


async def late(patience, store):
    with pytest.raises(TimeoutError):
        await patience.ask(store)


async def asking(patience, store):
    """A question that is under way."""
    task, before = asyncio.create_task(patience.ask(store)), store.asked
    while store.asked == before:
        await asyncio.sleep(0)
    return task


async def test_a_store_that_says_nothing_is_late_after_the_bound():
    store = Store()
    store.late = False
    await asyncio.wait_for(late(CircuitBreaker(0.01), store), 20)
    assert store.asked == 1


async def test_a_store_that_was_late_is_not_asked_again_before_its_rest_is_over(patience, now):
    store = Store()
    for _ in range(5):
        await late(patience, store)
    now[0] += 0.99
    await late(patience, store)
    assert store.asked == 1
    now[0] += 0.02
    await late(patience, store)
    assert store.asked == 2


async def test_after_its_rest_one_question_tries_and_the_others_pass(patience, now):
    store = Store()
    await late(patience, store)
    now[0] += REST_S
    store.late = False
    trying = await asking(patience, store)
    await late(patience, store)
    store.answers.set()
    assert await trying == "yes"
    assert [await patience.ask(store) for _ in range(3)] == ["yes"] * 3
    assert store.asked == 5


async def test_a_question_whose_asker_leaves_lets_another_try_later(patience, now):
    store = Store()
    await late(patience, store)
    now[0] += REST_S
    store.late = False
    leaving = await asking(patience, store)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    store.answers.set()
    await late(patience, store)
    now[0] += WAIT_S + REST_S
    assert await patience.ask(store) == "yes"


async def test_an_error_is_an_answer(patience):
    async def broken():
        raise ConnectionRefusedError

    for _ in range(2):
        with pytest.raises(ConnectionRefusedError):
            await patience.ask(broken)
    store = Store()
    store.late = False
    store.answers.set()
    assert await patience.ask(store) == "yes"


async def test_a_redis_that_is_late_leaves_a_rate_to_each_router(redis):
    buckets = RateBuckets(redis, "ns", CircuitBreaker(0.0, REST_S, lambda: 100.0))
    assert [await buckets.take({"k": (6, 1)}) for _ in range(2)] == [None, None]
