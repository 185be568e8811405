"""The ways to the other hosts of a decode worker's ranks, which each receive a part of every page."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from baton.kv.layout.extents import MOST_RECEIVERS
from baton.kv.wire.describing import ask_worker
from baton.protos.errors import WorkerLost
from baton.protos.nouns import Extent, KvReceiver, WorkerInfo
from tests.kv.transport.auto_house import House, house, probe

__all__ = ["house"]


async def test_a_host_of_ranks_that_cannot_be_reached_gets_its_part_by_its_worker(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    auto, part = house.auto(), (Extent(0, 8, 0, 1),)
    there = KvReceiver(house.grpc, part), KvReceiver(house.grpc, part)
    house.info = msgspec.structs.replace(house.info, receivers=there)
    assert await auto.receivers(house.grpc) == there
    await auto.close()
    auto = house.auto()
    auto._describe = lambda address: house.describe(address) if address == house.grpc else ask_worker(address)
    house.info = msgspec.structs.replace(house.info, receivers=(there[0], KvReceiver("127.0.0.1:1", part)))
    for _ in range(2):
        assert await auto.receivers(house.grpc) == ()
    assert caplog.text.count("KV for the ranks at 127.0.0.1:1 goes to their worker's own host") == 1
    await auto.close()


async def test_no_handoff_waits_while_a_host_of_ranks_that_was_not_reached_is_asked_again(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.kv.transport.auto.AGAIN_S", (0.0, 0.0))
    auto, part = house.auto(), (Extent(0, 8, 0, 1),)
    far, answers = house.grpc.replace("127.0.0.1", "localhost"), asyncio.Event()
    there = KvReceiver(house.grpc, part), KvReceiver(far, part)
    house.info = msgspec.structs.replace(house.info, receivers=there)
    asked = 0

    async def describe(address: str) -> WorkerInfo:
        nonlocal asked
        if address == far:
            asked += 1
            if asked == 1:
                raise WorkerLost("nobody answers", "decode_address")
            await answers.wait()
        return await house.describe(address)

    auto._describe = describe
    for _ in range(3):
        assert await asyncio.wait_for(auto.receivers(house.grpc), 30) == ()
    assert asked == 2
    answers.set()
    await auto._routes[far]
    assert await auto.receivers(house.grpc) == there
    await auto.close()


async def test_a_host_of_ranks_is_measured_again_once_its_worker_was_started_anew(house: House) -> None:
    auto, part = house.auto(), (Extent(0, 8, 0, 1),)
    far = house.grpc.replace("127.0.0.1", "localhost")
    assert far != house.grpc
    there = KvReceiver(house.grpc, part), KvReceiver(far, part)
    house.info = msgspec.structs.replace(house.info, receivers=there)
    asked = []

    async def describe(address: str) -> WorkerInfo:
        asked.append(address)
        return await house.describe(address)

    auto._describe = describe
    for _ in range(2):
        assert await auto.receivers(house.grpc) == there
    assert asked == [house.grpc, far]
    house.info = msgspec.structs.replace(house.info, incarnation="another")
    auto.expect(house.grpc, "another")  # as before each handoff
    assert await auto.receivers(house.grpc) == there
    assert asked == [house.grpc, far] * 2
    await auto.close()


async def test_what_a_worker_said_before_it_was_started_anew_is_forgotten_while_it_is_measured(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    auto, measured = house.auto(), asyncio.Event()
    weigh = auto._weigh

    async def slowly(address: str, info: WorkerInfo) -> object:
        await measured.wait()
        return await weigh(address, info)

    monkeypatch.setattr(auto, "_weigh", slowly)
    assert (await auto.layout(house.grpc)) == house.info.layout
    auto.expect(house.grpc, "i")
    assert await auto.receivers(house.grpc) == ()
    assert house.described == 1
    there = KvReceiver(house.grpc, (Extent(0, 8, 0, 1),))
    house.info = msgspec.structs.replace(house.info, incarnation="another", receivers=(there,))
    auto.expect(house.grpc, "another")
    assert await auto.receivers(house.grpc) == (there,)
    measured.set()
    await auto.meet(house.grpc, "another")
    assert house.described == 2
    await auto.close()


@pytest.mark.parametrize("closes", [False, True])
async def test_what_is_measured_of_a_process_that_is_gone_tells_and_opens_nothing(
    house: House, monkeypatch: pytest.MonkeyPatch, closes: bool
) -> None:
    auto, weighed, may_end = house.auto(), asyncio.Event(), asyncio.Event()
    weigh = auto._weigh

    async def slowly(address: str, info: WorkerInfo) -> object:
        found = await weigh(address, info)
        if info.incarnation == "i":
            weighed.set()
            await may_end.wait()
        return found

    monkeypatch.setattr(auto, "_weigh", slowly)
    first = asyncio.ensure_future(auto.connect(house.grpc))
    await weighed.wait()
    (old,) = auto._routes.values()
    house.info = msgspec.structs.replace(house.info, worker_id="decode-1", incarnation="another")
    auto.expect(house.grpc, "another")
    if closes:
        await auto.close()
        assert old.done(), "no preflight goes on"
        assert not house.links
        assert not auto._transports
        with pytest.raises(asyncio.CancelledError):
            await first
        return
    await auto.meet(house.grpc, "another")
    may_end.set()
    stream = await first
    await probe(stream, house)
    await stream.close()
    assert [link.peer for link, _ in house.links] == ["decode-1"], "whoever waited got the new process's"
    assert auto.peer(house.grpc) == "decode-1"
    await auto.close()


async def test_an_unforeseen_failure_at_a_host_of_ranks_is_not_remembered(house: House) -> None:
    auto, part, failures = house.auto(), (Extent(0, 8, 0, 1),), [ValueError("a bug of ours")]
    far = house.grpc.replace("127.0.0.1", "localhost")
    there = KvReceiver(house.grpc, part), KvReceiver(far, part)
    house.info = msgspec.structs.replace(house.info, receivers=there)

    async def describe(address: str) -> WorkerInfo:
        if address == far and failures:
            raise failures.pop()
        return await house.describe(address)

    auto._describe = describe
    with pytest.raises(ValueError, match="a bug of ours"):
        await auto.receivers(house.grpc)
    assert await auto.receivers(house.grpc) == there
    await auto.close()


async def test_of_hosts_without_end_the_first_ones_alone_are_asked(house: House) -> None:
    auto, part = house.auto(), (Extent(0, 8, 0, 1),)
    described = list[str]()

    async def describe(address: str) -> WorkerInfo:
        described.append(address)
        return await house.describe(house.grpc)

    auto._describe = describe
    house.info = msgspec.structs.replace(
        house.info, receivers=tuple(KvReceiver(f"127.0.0.1:{at}", part) for at in range(1, 300))
    )
    assert len(await auto.receivers(house.grpc)) == 299, "whoever sends refuses them by name"
    assert len(described) <= MOST_RECEIVERS
    await auto.close()
