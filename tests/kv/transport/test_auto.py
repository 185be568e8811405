"""The choice of a transport per pair: the best that works, measured, never changed in silence."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import stat
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from baton.kv import transport as transports
from baton.kv.memory.host_pages import PageMemory
from baton.kv.transport import shm, tcp
from baton.kv.transport.auto import AGAIN_S, AutoTransport
from baton.kv.wire import preflight
from baton.kv.wire.preflight import LinkSpeed
from baton.kv.wire.verdict import pick
from baton.protos.errors import ConfigError, HandoffRefused, WorkerLost
from baton.protos.nouns import WorkerInfo
from tests.kv.transport.auto_house import House, house, probe, used
from tests.kv.transport.test_handoffs import until

__all__ = ["house"]


async def test_one_host_uses_shared_memory_and_two_use_tcp(house: House) -> None:
    for host, expected in (("here", "shm"), ("there", "tcp"), ("", "tcp")):
        auto = house.auto(host=host)
        assert await used(house, auto) == expected
        link, reason = house.links[-1]
        assert (link.peer, link.fallback, reason) == ("decode-0", "", "")
        assert link.bytes_per_s > 1e5
        assert 0 < link.fixed_s < 30
        await auto.close()
    assert not house.intake.refusals
    assert not house.told, "a preflight is no handoff"


async def test_a_worker_that_was_met_is_not_measured_again_by_its_first_stream_unless_it_was_restarted(
    house: House,
) -> None:
    auto = house.auto()
    for _ in range(2):
        await auto.meet(house.grpc, house.info.incarnation)
    assert len(house.links) == house.described == 1
    assert await used(house, auto) == "shm"
    assert len(house.links) == house.described == 1
    house.info = msgspec.structs.replace(house.info, incarnation="another")
    await auto.meet(house.grpc, "another")
    assert len(house.links) == house.described == 2
    await auto.close()


async def test_a_pair_is_measured_once_for_many_streams_at_once(house: House) -> None:
    auto = house.auto()
    streams = await asyncio.gather(*(auto.connect(house.grpc) for _ in range(8)))
    for stream in streams:
        await probe(stream, house)
        await stream.close()
    assert house.described == len(house.links) == 1
    await auto.close()


async def test_a_way_that_does_not_work_is_left_aloud(house: House, caplog: pytest.LogCaptureFixture) -> None:
    house.servers["shm"].close()
    auto = house.auto()
    assert await used(house, auto) == "tcp"
    link, reason = house.links[-1]
    assert reason == "failed"
    assert link.fallback.startswith("shm failed: nobody answers at")
    assert "KV to decode-0 goes by tcp" in caplog.text
    await auto.close()


async def test_a_way_that_is_not_offered_is_missed_aloud(house: House) -> None:
    house.addresses.clear()
    auto = house.auto()
    assert await used(house, auto) == "grpc"
    assert house.links[-1] == (house.links[-1][0], "not_offered")
    assert house.links[-1][0].fallback == "shm not offered"
    await auto.close()


async def test_a_transport_that_is_set_is_used_or_the_handoff_fails(house: House) -> None:
    for wanted in ("grpc", "tcp", "shm"):
        auto = house.auto(wanted)
        assert await used(house, auto) == wanted
        await auto.close()
    del house.addresses["tcp"]
    auto = house.auto("tcp")
    with pytest.raises(HandoffRefused, match=r"decode-0 takes KV by grpc, shm, not by tcp.*worker\.kv_transport"):
        await auto.connect(house.grpc)
    await auto.close()
    house.servers["shm"].close()
    auto = house.auto("shm")
    with pytest.raises(WorkerLost, match="no way to ship KV to decode-0 works"):
        await auto.connect(house.grpc)
    await auto.close()


async def test_after_a_break_the_pair_is_checked_again(house: House) -> None:
    auto = house.auto()
    stream = await auto.connect(house.grpc)
    await probe(stream, house)
    house.servers["shm"].close()
    with pytest.raises(WorkerLost):
        await asyncio.wait_for(stream.receive(), 30)
    await stream.close()
    assert await used(house, auto) == "tcp"
    assert [link.transport for link, _ in house.links] == ["shm", "tcp"]
    await auto.close()


async def test_whose_connection_was_lost_is_known_by_name_also_if_nobody_can_be_reached(
    house: House,
) -> None:
    auto = house.auto()
    assert auto.peer(house.grpc) == ""
    stream = await auto.connect(house.grpc)
    await probe(stream, house)
    house.servers["shm"].close()
    with pytest.raises(WorkerLost):
        await asyncio.wait_for(stream.receive(), 30)
    assert house.grpc not in auto._routes
    assert auto.peer(house.grpc) == "decode-0"
    await stream.close()
    house.servers["tcp"].close()
    auto._wanted = "tcp"
    with pytest.raises(WorkerLost, match="no way to ship KV"):
        await auto.connect(house.grpc)
    assert auto.peer(house.grpc) == "decode-0"
    auto.expect(house.grpc, "another life")
    assert auto.peer(house.grpc) == "", "it hasn't said yet who it is"
    await auto.close()


async def test_a_way_that_broke_while_nobody_used_it_is_replaced_at_once(house: House) -> None:
    auto = house.auto()
    assert await used(house, auto) == "shm"
    house.servers["shm"].close()
    assert await used(house, auto) == "tcp"
    assert house.described == 2
    await auto.close()


async def test_another_worker_at_a_known_address_is_asked_anew(house: House) -> None:
    auto = house.auto()
    auto.expect(house.grpc, "i")
    assert await used(house, auto) == "shm"
    for known in ("i", ""):
        auto.expect(house.grpc, known)
        assert await used(house, auto) == "shm"
    assert house.described == 1
    house.info = msgspec.structs.replace(house.info, incarnation="j")
    auto.expect(house.grpc, "j")
    assert await used(house, auto) == "shm"
    assert house.described == 2
    await auto.close()


async def test_a_stream_that_we_close_ourselves_is_no_break(house: House) -> None:
    auto = house.auto()
    stream = await auto.connect(house.grpc)
    reading = asyncio.ensure_future(stream.receive())
    await asyncio.sleep(0.01)
    await stream.close()
    await asyncio.wait({reading})
    assert isinstance(reading.exception(), WorkerLost)
    assert await used(house, auto) == "shm"
    assert house.described == 1
    await auto.close()


class Noisy(AutoTransport):
    """Measures what ``says`` tells instead of the machine; counts the looks at its preferred way."""

    says: dict[str, float] = {}
    looks = 0

    async def _try(self, name: str, address: str, memory: PageMemory) -> LinkSpeed:
        await super()._try(name, address, memory)
        self.looks += name == "shm"
        return LinkSpeed(1e-4, self.says.get(name, 1e9))


@pytest.fixture
async def noisy(house: House, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Noisy]:
    monkeypatch.setattr("baton.kv.wire.verdict.MUCH_FASTER", 1.5)
    report = lambda link, reason: house.links.append((link, reason))  # noqa: E731
    made = Noisy(house.memory, lambda: house.now, "auto", report, house.describe, "here")
    made.says = {"shm": 1e6, "tcp": 1e9}
    yield made
    await made.close()


async def test_one_noisy_preflight_does_not_decide_for_ever(
    house: House, noisy: Noisy, caplog: pytest.LogCaptureFixture
) -> None:
    await noisy.meet(house.grpc, "i")
    assert [(link.transport, reason) for link, reason in house.links] == [("tcp", "slower")]
    noisy.says = {}
    await noisy.meet(house.grpc, "i")
    assert noisy.looks == 1, "not before its time"
    held = await noisy.connect(house.grpc)
    house.now += AGAIN_S[0]
    await noisy.meet(house.grpc, "i")
    assert noisy.looks == 3, "twice, to be sure"
    assert [(link.transport, reason) for link, reason in house.links[1:]] == [("shm", "")]
    assert "goes by shm from now on, no longer by tcp" in caplog.text
    await probe(held, house)
    await held.close()
    assert await used(house, noisy) == "shm"
    house.now += 10 * AGAIN_S[1]
    await noisy.meet(house.grpc, "i")
    assert noisy.looks == 3, "on the preferred way nothing is measured any more"


async def test_a_way_that_stays_slower_is_looked_at_ever_more_rarely_and_one_good_look_changes_nothing(
    house: House, noisy: Noisy, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at = []
    for second in range(0, 2000, 10):
        house.now = float(second)
        before = noisy.looks
        await noisy.meet(house.grpc, "i")
        if noisy.looks != before:
            looked_at.append(second)
    assert looked_at == [0, 30, 90, 210, 450, 930, 1890]
    assert [link.transport for link, _ in house.links] == ["tcp"], "and it is said once"

    async def once(name: str, address: str, memory: PageMemory, real: Any = noisy._try) -> LinkSpeed:
        got = await real(name, address, memory)
        noisy.says = {"shm": 1e6, "tcp": 1e9}
        return got

    monkeypatch.setattr(noisy, "_try", once)
    noisy.says, house.now = {}, house.now + 2 * AGAIN_S[1]
    await noisy.meet(house.grpc, "i")
    assert [link.transport for link, _ in house.links] == ["tcp"]


def test_the_order_of_preference_stands_unless_a_later_way_is_much_faster() -> None:
    order = ("shm", "tcp", "grpc")
    near = {"shm": LinkSpeed(0.001, 4e9), "tcp": LinkSpeed(0.001, 5e9), "grpc": LinkSpeed(0.002, 1e9)}
    assert pick(order, near) == "shm"
    assert pick(order, near | {"tcp": LinkSpeed(0.001, 9e9)}) == "tcp"
    assert pick(order, {"grpc": LinkSpeed(0.002, 1e9)}) == "grpc"


def test_an_unknown_transport_lists_the_routes() -> None:
    choices = ", ".join(name for name in transports.names() if name not in transports.IN_PROCESS)
    assert "shm" in choices
    with pytest.raises(ConfigError, match=f"'pigeon' is unknown; choose one of {choices}"):
        transports.check_name("pigeon")
    with pytest.raises(ConfigError, match="loopback"):
        transports.check_name("loopback")


async def test_a_receiver_that_never_answers_ends_the_preflight() -> None:
    silent = await asyncio.start_server(lambda reader, writer: asyncio.sleep(5), "127.0.0.1", 0)
    memory = preflight.probe_memory()
    address = f"127.0.0.1:{silent.sockets[0].getsockname()[1]}"
    transport = tcp.TcpTransport()
    with pytest.raises(WorkerLost, match="took longer"):
        await preflight.measure(transport, address, memory, time.perf_counter, timeout_s=0.2)
    await transport.close()
    silent.close()


async def test_a_machine_that_was_busy_at_first_makes_no_link_infinitely_fast(house: House) -> None:
    small, one, four, again = 3 * [0, 5e-3], [0, 3e-4, 0], 3 * [0, 8e-4], 3 * [0, 1e-4]
    ticks = itertools.accumulate([*small, *one, *four, *again])
    memory = preflight.probe_memory()
    transport = shm.ShmTransport(memory)
    found = await preflight.measure(transport, house.addresses["shm"], memory, lambda: next(ticks))
    await transport.close()
    assert found.fixed_s == pytest.approx(1e-4)
    assert found.bytes_per_s == pytest.approx(4 * 2**20 / 7e-4)


async def test_strangers_at_the_data_ports_get_nothing(house: House) -> None:
    host, port = house.addresses["tcp"].split(":")
    for noise in (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"BKVH" + bytes(40), b"\xff" * 100):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(noise)
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 30) == b""
        writer.close()
    assert not house.intake.refusals


async def test_only_our_own_user_may_reach_the_unix_socket(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    assert stat.S_IMODE(os.stat(house.addresses["shm"]).st_mode) == 0o600
    monkeypatch.setattr(shm, "same_user", lambda sock: False)
    transport = shm.ShmTransport(house.memory)
    with pytest.raises(WorkerLost, match="another user listens there"):
        await transport.connect(house.addresses["shm"])
    await transport.close()


async def test_memory_that_could_shrink_under_the_receiver_is_not_mapped(house: House) -> None:
    transport = shm.ShmTransport(house.memory)
    fd = os.memfd_create("not sealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 1 << 20)
    os.dup2(fd, transport._fd)
    with pytest.raises(WorkerLost):
        await preflight.measure(transport, house.addresses["shm"], preflight.probe_memory(), time.perf_counter)
    await transport.close()
    os.close(fd)


async def test_a_senders_memory_is_mapped_once_read_only_and_only_while_it_is_there(house: House) -> None:
    server = house.servers["shm"]
    assert isinstance(server, shm.ShmServer)
    transport = shm.ShmTransport(house.memory)
    streams = [await transport.connect(house.addresses["shm"]) for _ in range(3)]
    for stream in streams:
        await probe(stream, house)
    (mapping,) = server.mappings.values()
    assert mapping.view.readonly
    for stream in streams:
        await stream.close()
    await asyncio.sleep(0.05)
    assert list(server.mappings.values()) == [mapping], "the pair's anchor keeps it"
    await transport.close()
    await until(lambda: not server.mappings)


async def test_handoffs_that_fail_together_each_try_twice_and_no_more() -> None:
    asked = 0

    async def describe(address: str) -> WorkerInfo:
        nonlocal asked
        asked += 1
        await asyncio.sleep(0.001 * (asked % 3))
        raise WorkerLost("gone", "decode_address")

    auto = AutoTransport(PageMemory.create(1, 4096), time.perf_counter, describe=describe, host_id="x")
    found = await asyncio.gather(*(auto.connect("d:1") for _ in range(40)), return_exceptions=True)
    assert all(isinstance(error, WorkerLost) for error in found)
    assert asked <= 80
    await auto.close()


async def test_an_unforeseen_failure_is_not_the_choice_of_whoever_comes_next(house: House) -> None:
    answers = iter([OSError(24, "too many open files")])

    async def describe(address: str) -> WorkerInfo:
        for error in answers:
            raise error
        return await house.describe(address)

    auto = AutoTransport(house.memory, time.perf_counter, describe=describe, host_id="here")
    with pytest.raises(OSError, match="too many"):
        await auto.connect(house.grpc)
    await (await auto.connect(house.grpc)).close()
    await auto.close()


async def test_choices_of_workers_that_have_left_are_forgotten(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.kv.transport.auto.KEPT_ROUTES", 3)
    house.addresses = {"tcp": house.addresses["tcp"]}
    auto = house.auto("tcp")
    for port in range(6):
        await (await auto.connect(f"left:{port}")).close()
    assert list(auto._routes) == ["left:3", "left:4", "left:5"]
    await auto.close()


async def test_a_layout_is_known_before_any_way_is_measured(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    measure, measured = preflight.measure, asyncio.Event()

    async def later(*arguments: Any) -> LinkSpeed:
        await measured.wait()
        return await measure(*arguments)

    monkeypatch.setattr("baton.kv.wire.preflight.measure", later)
    auto = house.auto()
    connecting = asyncio.ensure_future(auto.connect(house.grpc))
    assert await asyncio.wait_for(auto.layout(house.grpc), 30) == house.info.layout
    assert not connecting.done()
    measured.set()
    await (await connecting).close()
    assert house.described == 1
    await auto.close()
