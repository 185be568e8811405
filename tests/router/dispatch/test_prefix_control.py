"""Tests who may pin how much, and which workers are asked; workers and Redis are lists here."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from baton.cluster.prefix_pins import PinnedPrefix
from baton.protos.errors import InvalidRequest, PinsFull, RequestUnknown, Unavailable, WorkerLost
from baton.router.dispatch.prefix_control import PrefixControl, PrefixWish
from baton.router.request.context import RequestContext
from baton.router.request.request import ChoiceSummary


class Store(dict[str, PinnedPrefix]):
    """Stands for Redis; ``away`` makes it fail."""

    away = False

    async def put(self, pin, lasts_s):
        assert lasts_s <= pin.until - pin.created
        if self.away:
            raise Unavailable("away")
        self[pin.id] = pin

    async def remove(self, pin):
        if self.away:
            raise Unavailable("away")
        self.pop(pin, None)

    async def all(self):
        return list(self.values())


class Link:
    """A worker that pins what it is told, or says why not."""

    up = True

    def __init__(self, name: str, role: str = "prefill", error: Exception | None = None):
        self.info = SimpleNamespace(
            worker_id=name,
            role=role,
            fingerprint="f",
            layout="l",
            model_id="m",
            address=f"at {name}",
            incarnation=f"{name}1",
        )
        self.error, self.pinned = error, {}

    async def pin_prefix(self, request, timeout_s):
        if self.error is not None:
            raise self.error
        self.pinned[request.pin] = request.source
        return len(request.token_ids) // 16 * 16

    async def unpin_prefix(self, pin):
        self.pinned.pop(pin, None)


def control(store, *links, most=1000):
    ids = iter(f"p{i}" for i in range(99))
    return PrefixControl(links, store, most, lambda: 50.0, lambda: next(ids))


def wish(tokens=100, workers=1, tenant=""):
    key = SimpleNamespace(tenant=tenant) if tenant else None
    return PrefixWish("m", tuple(range(tokens)), RequestContext(key=key), workers, 60.0)


READ = ChoiceSummary(100, prefill_worker="a", decode_worker="d")


async def test_the_reader_pins_and_others_of_its_kind_fetch_from_it():
    links = [Link("c"), Link("a"), Link("b"), Link("d", "decode")]
    store = Store()
    pin = await control(store, *links).add(wish(workers=3), READ)
    assert pin.workers == {"a": 96, "b": 96, "c": 96}
    assert [link.pinned for link in links] == [{"p0": "at a"}, {"p0": ""}, {"p0": "at a"}, {}]
    assert (pin.until, store["p0"]) == (110.0, pin)


async def test_a_worker_that_refuses_is_left_out_unless_it_is_the_reader():
    full = PinsFull("full", "worker.pinned_share")
    pin = await control(Store(), Link("a"), Link("b", error=full)).add(wish(workers=2), READ)
    assert list(pin.workers) == ["a"]
    with pytest.raises(PinsFull):
        await control(Store(), Link("a", error=full), Link("b")).add(wish(workers=2), READ)


async def test_more_workers_than_there_are_and_a_reader_that_left_are_refused():
    with pytest.raises(InvalidRequest, match="workers is 3: 2 prefill workers"):
        await control(Store(), Link("a"), Link("b")).add(wish(workers=3), READ)
    with pytest.raises(WorkerLost):
        await control(Store(), Link("b")).add(wish(), READ)


async def test_without_redis_nothing_stays_pinned():
    store, link = Store(), Link("a")
    store.away = True
    with pytest.raises(Unavailable):
        await control(store, link).add(wish(), READ)
    assert link.pinned == {}


async def test_a_tenant_is_bounded_and_sees_its_own_and_operators_all():
    store, link = Store(), Link("a")
    one = control(store, link, most=200)
    for tenant in ("x", "x", "y"):
        async with one.room(tenant, False, 100):
            await one.add(wish(tenant=tenant), READ)
    with pytest.raises(PinsFull, match="of 200 that a tenant may have") as refused:
        await one.room("x", False, 100).__aenter__()
    assert refused.value.param == "router.max_pinned_tokens"
    async with one.room("x", True, 10_000):
        pass
    assert [pin.id for pin in await one.listed("x", False)] == ["p0", "p1"]
    assert [pin.id for pin in await one.listed("", True)] == ["p0", "p1", "p2"]
    with pytest.raises(RequestUnknown):
        await one.remove("p2", "x", False)
    await one.remove("p2", "y", False)
    assert set(link.pinned) == {"p0", "p1"}


async def test_a_worker_that_has_restarted_is_said_to_keep_nothing_and_counts_no_more():
    store, links = Store(), [Link("a"), Link("b")]
    one = control(store, *links, most=200)
    async with one.room("x", False, 200):
        await one.add(wish(workers=2, tenant="x"), READ)
    with pytest.raises(PinsFull):
        await one.room("x", False, 100).__aenter__()
    links[1].up = False  # away is not gone
    (pin,) = await one.listed("x", False)
    assert (set(pin.workers), pin.lost) == ({"a", "b"}, ())
    links[1].up, links[1].info.incarnation = True, "b2"
    (pin,) = await one.listed("x", False)
    assert (pin.workers, pin.lost) == ({"a": 96}, ("b",))
    async with one.room("x", False, 100):
        pass
    await one.remove("p0", "x", False)
    assert (store, links[0].pinned) == ({}, {})


async def test_a_worker_that_has_changed_its_role_keeps_what_it_pinned():
    store, links = Store(), [Link("a"), Link("b")]
    one = control(store, *links)
    await one.add(wish(workers=2), READ)
    links[1].info.incarnation, links[1].info.role = "b1.2", "decode"
    (pin,) = await one.listed("", True)
    assert (set(pin.workers), pin.lost) == ({"a", "b"}, ())
    await one.remove("p0", "", True)
    assert (store, links[0].pinned, links[1].pinned) == ({}, {}, {})


class DeafStore(Store):
    """Writes, and its answer is lost."""

    async def put(self, pin, lasts_s):
        await super().put(pin, lasts_s)
        raise Unavailable("the connection broke")


async def test_a_pin_that_was_written_down_though_the_answer_was_lost_is_not_listed():
    store, link = DeafStore(), Link("a")
    with pytest.raises(Unavailable):
        await control(store, link).add(wish(), READ)
    assert (store, link.pinned) == ({}, {})


async def test_what_a_tenant_is_about_to_pin_counts_as_well():
    one = control(Store(), Link("a"), most=200)
    async with one.room("x", False, 150):
        with pytest.raises(PinsFull, match="150 are"):
            await one.room("x", False, 100).__aenter__()
        async with one.room("y", False, 100):
            pass
    async with one.room("x", False, 200):
        pass
    assert not one._promised


class SlowLink(Link):
    """Pins, and never says so."""

    async def pin_prefix(self, request, timeout_s):
        await super().pin_prefix(request, timeout_s)
        self.asked.set()
        await asyncio.Event().wait()

    async def unpin_prefix(self, pin):
        await asyncio.sleep(0)
        await super().unpin_prefix(pin)


@pytest.mark.parametrize("cancels", [1, 2])
async def test_a_client_that_leaves_before_the_pin_is_written_down_leaves_none_behind(cancels):
    first, slow, store = Link("a"), SlowLink("b"), Store()
    slow.asked = asyncio.Event()
    one = control(store, first, slow)
    adding = asyncio.create_task(one.add(wish(workers=2), READ))
    await slow.asked.wait()
    assert first.pinned
    assert slow.pinned
    for _ in range(cancels):
        adding.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await adding
    await asyncio.gather(*one._unpinning)
    assert (first.pinned, slow.pinned, store) == ({}, {}, {})


async def test_a_prefix_that_cannot_be_forgotten_is_unpinned_and_can_be_deleted_again():
    store, link = Store(), Link("a")
    one = control(store, link)
    pin = await one.add(wish(), READ)
    store.away = True
    with pytest.raises(Unavailable):
        await one.remove(pin.id, "", True)
    assert link.pinned == {}
    store.away = False
    assert await one.remove(pin.id, "", True) == pin
    assert not store
