"""The router's queue without an event loop: who is tried, in what order, and who may pass whom."""

from __future__ import annotations

import msgspec
import pytest

from baton.router.dispatch.fair_queue import (
    LOOK_AHEAD,
    MOST_IDLE,
    PATIENCE_S,
    FairQueue,
    FairShares,
    Order,
    Place,
    RequestLoad,
    work_of,
)


class Waiter(msgspec.Struct, eq=False):
    name: str
    order: Order
    pool: str = "m"
    queue: str = "short"
    since: float = 0.0


def tried(queue: FairQueue[Waiter], now: float = 0.0, over: str = "") -> str:
    """Names in the order in which a pump tries them; the wait of those in ``over`` ends."""
    names: list[str] = []

    def attempt(waiter: Waiter) -> bool:
        names.append(waiter.name)
        return waiter.name in over

    queue.pump(now, attempt)
    return "".join(names)


@pytest.fixture
def queue() -> FairQueue[Waiter]:
    return FairQueue()


def test_whoever_finds_no_room_keeps_the_place_and_is_passed_by_a_few(queue: FairQueue[Waiter]) -> None:
    for at, name in enumerate("abcdefghijkl"):
        queue.add(Waiter(name, (0.0, at)))
    assert tried(queue, over="j") == "abcdefgh" == "abcdefghijkl"[:LOOK_AHEAD]
    assert tried(queue, over="ac") == "abcdefghij"
    assert "".join(w.name for w in queue) == "bdefghijkl"


def test_nobody_of_its_pool_passes_one_who_waited_too_long(queue: FairQueue[Waiter]) -> None:
    queue.add(Waiter("a", (0.0, 0)))
    queue.add(Waiter("b", (0.0, 1), since=PATIENCE_S))
    queue.add(Waiter("c", (0.0, 2), queue="long"))
    queue.add(Waiter("d", (0.0, 3), pool="other"))
    assert tried(queue, now=PATIENCE_S) == "abcd"
    assert tried(queue, now=PATIENCE_S + 0.1) == "ad"


def test_an_attempt_may_pump_for_the_others_and_meets_itself_nowhere(queue: FairQueue[Waiter]) -> None:
    for at, name in enumerate("abc"):
        queue.add(Waiter(name, (0.0, at)))
    names: list[str] = []

    def attempt(waiter: Waiter) -> bool:
        names.append(waiter.name)
        if waiter.name == "a":
            queue.pump(0.0, attempt)
        return True

    queue.pump(0.0, attempt)
    assert (names, bool(queue)) == (["a", "b", "c"], False)


def test_one_that_waits_again_has_its_place_before_those_that_came_later(queue: FairQueue[Waiter]) -> None:
    shares = FairShares()
    first, second = (Waiter(name, shares.order("m", RequestLoad(work=10))) for name in "ab")
    shares.placed("m", Place(first.order, RequestLoad(work=10)), [Place(second.order, RequestLoad(work=10))])
    shares.placed("m", Place(second.order, RequestLoad(work=10)))
    shares.idle("m")
    for waiter in (Waiter("c", shares.order("m", RequestLoad(work=10))), second, first):
        queue.add(waiter)
    assert tried(queue) == "abc"
    queue.remove(second)
    queue.remove(second)
    assert tried(queue) == "ac"


def test_a_request_of_low_priority_that_waits_gives_a_newcomer_no_start_before_those_who_ask_already() -> None:
    shares = FairShares()
    load = RequestLoad(priority=1000, tenant="batch", work=10)
    batch = Place(shares.order("m", load), load)
    busy = RequestLoad(tenant="busy", work=10)
    for _ in range(100):
        shares.placed("m", Place(shares.order("m", busy), busy), [batch])
    newcomer = shares.order("m", RequestLoad(tenant="new", work=10))
    assert shares.order("m", busy)[0] - newcomer[0] <= 10


def test_work_counts_an_output_bound_only_as_far_as_answers_reach() -> None:
    assert (work_of(100, 50), work_of(100, 50, 3), work_of(1, 1 << 20)) == (150, 250, 1025)


def test_pools_that_were_named_once_are_not_kept_and_virtual_time_moves_on() -> None:
    shares, load = FairShares(), RequestLoad(tenant="a", work=10.0)
    waits, again = shares.order("kept", load), shares.order("left", load)
    shares.placed("left", Place(again, load))
    shares.idle("left")
    for name in range(3 * MOST_IDLE):
        shares.order(f"model {name}", load)
        shares.idle(f"model {name}")
    assert len(shares._virtual) <= MOST_IDLE + 1
    assert len(shares._first_arrivals) <= MOST_IDLE + 1
    assert shares.order("left", load) > again  # one that waits again is before all that come later
    other = shares.order("kept", RequestLoad(tenant="b"))
    assert waits < other < shares.order("kept", load)  # its shares are as they were
