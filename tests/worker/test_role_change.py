"""A worker that plays another role: the engine's loops hand over, the I/O process lets go, and wishes are kept."""

from __future__ import annotations

import asyncio
import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest
from redis.asyncio import Redis

from baton.cluster.roles import RoleTurns
from baton.decode_worker.engine.loop import DecodeLoop
from baton.engine.speculate.draft import Speculator
from baton.engine.speculate.prompt_lookup import PromptLookup
from baton.engine.steps.loop import StepLoop
from baton.kernels.abi.cores import LentCores
from baton.launch.redis_server import RedisServer
from baton.prefill_worker.engine.loop import PrefillLoop
from baton.protos import channel as ch
from baton.protos.errors import BatonError, Draining, InvalidRequest, Unavailable
from baton.protos.nouns import EngineRequest, KvLayout, Sampling, WorkerInfo, process_of
from baton.tasks.beside import beside
from baton.worker import drafts, engine_main, membership
from baton.worker.control import WorkerControl
from baton.worker.engine_main import build, successor
from baton.worker.membership import start_role
from baton.worker.server import RoleRuntime
from baton.worker.slots import SlotRecord
from baton.worker.spec import EngineSpec, StepSpec, WorkerSpec

PROMPT = tuple(range(2, 100))


class Wire:
    """The engine's end of a channel: what it says is kept, what it hears is given by hand."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def send_fd(self, fd: int) -> None:
        pass

    def poll(self, timeout_s: float) -> list[Any]:
        return []


def spec(role: str, **fields: Any) -> WorkerSpec:
    return WorkerSpec.of("s", role, "", device="paced:zero", pages=64, **fields)


def request(name: str, max_tokens: int = 4) -> EngineRequest:
    return EngineRequest(
        name, PROMPT, len(PROMPT), Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    )


def turns(loop: StepLoop, *messages: Any) -> list[Any]:
    """Returns what the loop says while it takes ``messages`` and computes all there is."""
    wire: Any = loop.channel
    before, busy = len(wire.sent), loop.turn(list(messages))
    while busy:
        busy = loop.turn([])
    return list(wire.sent[before:])


def kinds(said: list[Any]) -> list[str]:
    return [type(m).__name__ for m in said if not isinstance(m, (ch.Stats, ch.CacheChanged))]


def test_those_who_share_cores_hear_of_each_role_and_of_every_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    def lend(*joined: Any) -> LentCores:
        told.append(joined)
        return LentCores(told.append, lambda: told.append("rest"))

    monkeypatch.setattr(engine_main, "lend", lend)
    wire: Any = Wire()
    reader = build(spec("prefill", cores_page="/page", threads=2, all_cores=4), wire)
    turns(reader, ch.SetRole("decode"))
    writer = successor(StepSpec(), EngineSpec(), reader)
    assert told == [("/page", 2, 4), "prefill", "decode"]
    heard: list[list[Any]] = [[ch.Admit(1, request("a"), True, 30.0)], *([[]] * 10), [ch.Shutdown()]]
    wire.poll = lambda timeout_s: heard.pop(0)
    writer.run()
    steps = [m for m in wire.sent if isinstance(m, ch.Tokens)]
    assert len(steps) == 4
    assert told[3:] == ["rest"] * (12 - len(steps)), "it rests in each turn without a step"


def test_a_loop_hands_over_when_nothing_is_left_and_its_cache_is_the_successors() -> None:
    wire: Any = Wire()
    reader = build(spec("prefill"), wire)
    turns(reader, ch.Prefill(1, request("a"), 0, ()))
    turns(reader, ch.SetRole("decode"))
    assert not reader.empty, "its blocks may still be read"
    turns(reader, ch.SendClosed(1))
    assert reader.empty
    reader.run()  # comes back at once: there is a next role, and nothing is left
    writer = successor(StepSpec(), EngineSpec(), reader)
    assert isinstance(writer, DecodeLoop)
    assert writer.parts is reader.parts
    assert wire.sent[-1] == ch.RoleIs("decode")
    admitted = next(m for m in turns(writer, ch.Admit(2, request("b"), True, 0.0)) if isinstance(m, ch.Admitted))
    assert admitted.held_blocks == len(PROMPT) // 16
    assert writer.empty


def test_a_role_that_cannot_begin_leaves_the_engine_in_its_own_with_its_cache() -> None:
    wire: Any = Wire()
    reader = build(spec("prefill"), wire)
    turns(reader, ch.Prefill(1, request("a"), 0, ()))
    turns(reader, ch.SendClosed(1), ch.SetRole("decode"))
    again = successor(StepSpec(speculation="draft:nowhere"), EngineSpec(device="paced:zero"), reader)
    assert isinstance(again, PrefillLoop)
    said = wire.sent[-1]
    assert said.role == "prefill"
    assert "draft:nowhere" in said.error.message
    turns(again, ch.Prefill(2, request("b"), 0, ()))
    (done,) = [m for m in wire.sent if isinstance(m, ch.PrefillDone) and m.key == 2]
    assert done.cached_tokens == len(PROMPT) // 16 * 16


def test_what_drafts_beside_the_model_is_loaded_once_and_kept_over_the_roles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[PromptLookup] = []

    def load(*arguments: object) -> PromptLookup:
        made.append(PromptLookup())
        return made[-1]

    monkeypatch.setattr(drafts, "_of_a_model", load)
    steps, kept, wire = StepSpec(speculation="draft:x"), dict[str, Speculator](), Wire()
    loop = build(spec("prefill", speculation="draft:x"), wire, kept)  # type: ignore[arg-type]
    assert not made, "a prefill worker may never draft"
    for role in ("decode", "prefill", "decode"):
        turns(loop, ch.SetRole(role))
        loop = successor(steps, EngineSpec(), loop, kept)
        assert wire.sent[-1] == ch.RoleIs(role)
    assert isinstance(loop, DecodeLoop)
    assert loop.drafter is not None
    assert [*loop.drafter._speculators] == made
    assert len(made) == 1


def test_a_decode_loop_waits_for_its_answers_and_for_streams_that_may_write() -> None:
    wire: Any = Wire()
    writer = build(spec("decode"), wire)
    turns(writer, ch.Admit(1, request("a"), False, 30.0))
    turns(writer, ch.ReceiveOpened(1, 1), ch.SetRole("prefill"))
    assert kinds(turns(writer, ch.Admit(2, request("b"), False, 30.0))) == ["Refused"]
    turns(writer, ch.Cancel(1, "it changes its role"))
    assert not writer.empty, "a stream may still write its pages"
    turns(writer, ch.ReceiveClosed(1, 1))
    assert writer.empty
    assert isinstance(successor(StepSpec(), EngineSpec(), writer), PrefillLoop)
    assert writer.pool.snapshot_counts().leased == 0


def test_shutdown_counts_more_than_a_change_of_role() -> None:
    loop = build(spec("decode"), Wire())  # type: ignore[arg-type]
    turns(loop, ch.SetRole("prefill"), ch.Shutdown())
    assert (loop.leaving, loop.next_role) == (True, "")


def test_a_share_that_is_open_outlives_the_role() -> None:
    wire: Any = Wire()
    reader = build(spec("prefill"), wire)
    turns(reader, ch.Prefill(1, request("a"), 0, ()))
    turns(reader, ch.SendClosed(1))
    hashes = reader.pool.findable()
    turns(reader, ch.Pin(-2, hashes[:1]), ch.SetRole("decode"))
    writer = successor(StepSpec(), EngineSpec(), reader)
    assert writer.pool.snapshot_counts().leased == 1
    turns(writer, ch.Unpin(-2))
    assert writer.pool.snapshot_counts().leased == 0


async def ready(said: Any) -> Any:
    return said


class Service:
    """A role's service that counts."""

    finished = 0

    def __init__(self, active: int = 2) -> None:
        self.active = active
        self.heard: list[str] = []

    def take(self, message: Any) -> None:
        pass

    def lost(self, error: BatonError) -> None:
        pass

    def send_away(self, error: BatonError) -> int:
        self.heard.append(error.label)
        return self.active

    def cancel_all(self, reason: str) -> int:
        gone, self.active = self.active, 0
        self.heard.append(f"cancelled {gone}")
        return gone

    def hang_up(self) -> None:
        self.heard.append("hung up")


def control(service: Service, sent: list[Any]) -> WorkerControl:
    layout = KvLayout("bfloat16", (), 1024, "bfloat16")
    info = WorkerInfo("w-3", "one", "decode", "a:1", "m", "f", layout, 100, 100, (), 8)
    return WorkerControl(info, sent.append, service)


@pytest.mark.parametrize(("beats", "wants", "wish"), [(True, True, "d"), (True, False, "p"), (False, True, "p")])
async def test_a_change_of_role_that_is_not_announced_leaves_no_wish(beats: bool, wants: bool, wish: str) -> None:
    wished = ["p"]

    async def want(slot: str, role: str, turn: str = "") -> bool:
        wished.extend([role] if wants else [])
        return wants

    member: Any = SimpleNamespace(beat=lambda: ready(beats))
    announcer = membership.RoleAnnouncer(member, SimpleNamespace(want=want))  # type: ignore[arg-type]
    told = await announcer.announce(control(Service(), []).info, "d")
    assert (told, wished[-1]) == (wish == "d", wish)


@pytest.mark.parametrize("refused", [True, False], ids=["a refused role", "an answer that is lost"])
async def test_a_wish_is_withdrawn_once_redis_is_back(redis: Redis, server: RedisServer, refused: bool) -> None:
    """A restart would begin in the role that the worker refused, or that the operator was told it won't take."""
    info, wishes = control(Service(), []).info, membership.RoleWishes(redis, "ns")
    member: Any = SimpleNamespace(beat=lambda: ready(not refused))
    announcer = membership.RoleAnnouncer(member, wishes)
    assert server.pid is not None
    assert await wishes.want("w-3", "prefill")
    os.kill(server.pid, signal.SIGSTOP)
    try:
        assert not await announcer.announce(info, "decode" if refused else "prefill")
    finally:
        os.kill(server.pid, signal.SIGCONT)
    async with beside(announcer.run, "wishes"), asyncio.timeout(30):
        while await wishes.of("w-3") != "decode":
            await asyncio.sleep(0.01)


async def test_an_engine_that_cannot_be_heard_is_lost_and_its_worker_was_not_told_to_stop() -> None:
    async def unreadable() -> Any:
        yield ch.CacheIdle(())
        raise ValueError("no such message")

    heard: list[Any] = []
    runtime: Any = SimpleNamespace(
        _engine=SimpleNamespace(channel=unreadable()), _over=asyncio.Event(), _take=heard.append, next_role=""
    )
    await RoleRuntime.listen(runtime)
    assert (heard, runtime._over.is_set()) == ([ch.CacheIdle(())], True)


async def test_routers_are_told_before_requests_end_and_sessions_end_last() -> None:
    service, sent = Service(), []
    ctl = control(service, sent)
    incarnation = await ctl.set_role("prefill", 0.1)
    ask = await ctl.next_role_change()
    assert (ask.role, ask.incarnation, ctl.info.state) == ("prefill", incarnation, "draining")
    assert incarnation != "one"
    assert process_of(incarnation) == "one"
    await ctl.leave_role(ask)
    assert service.heard == ["draining", "cancelled 2", "cancelled 0", "hung up"]
    assert [type(m).__name__ for m in sent] == ["Drain"]


async def test_the_same_ask_again_has_the_same_answer_and_another_one_waits() -> None:
    ctl = control(Service(), [])
    assert await ctl.set_role("decode", 1.0) == "one"  # what it is already
    first = await ctl.set_role("prefill", 1.0)
    assert await ctl.set_role("prefill", 1.0) == first
    with pytest.raises(Draining, match="becoming a prefill"):
        await ctl.set_role("decode", 1.0)


@pytest.mark.parametrize(("role", "grace", "field"), [("both", 1.0, "role"), ("prefill", -1.0, "grace_seconds")])
async def test_nonsense_is_refused_by_field(role: str, grace: float, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await control(Service(), []).set_role(role, grace)
    assert caught.value.param == field


async def test_a_role_that_was_asked_for_in_a_turn_that_is_over_is_not_begun(redis: Redis) -> None:
    """Plays a call that was on its way for long: obeying it would undo what another router has counted on since."""
    turns, ctl = RoleTurns(redis, "ns", "router"), control(Service(), [])
    member: Any = SimpleNamespace(beat=lambda: ready(True))
    ctl.announce = membership.RoleAnnouncer(member, membership.RoleWishes(redis, "ns")).announce
    async with turns.turn() as former:
        pass
    with pytest.raises(Unavailable, match="turn is over"):
        await ctl.set_role("prefill", 1.0, former.name)
    async with turns.turn() as present:
        with pytest.raises(Unavailable, match="turn is over"):
            await ctl.set_role("prefill", 1.0, former.name)
        assert ctl.info.state == "ready"
        assert await ctl.set_role("prefill", 1.0, present.name)


async def test_nothing_changes_when_routers_can_not_be_told() -> None:
    ctl = control(Service(), [])

    async def deaf(info: WorkerInfo, role: str, turn: str) -> bool:
        return False

    ctl.announce = deaf
    with pytest.raises(Unavailable, match="Redis is away"):
        await ctl.set_role("prefill", 1.0)
    assert ctl.info.state == "ready"
    ctl.announce = None
    assert await ctl.set_role("prefill", 1.0)


@pytest.mark.parametrize("heard", [True, False])
async def test_a_change_of_role_whose_asker_is_gone_is_made_or_taken_back(heard: bool) -> None:
    ctl, asked, go_on = control(Service(), []), asyncio.Event(), asyncio.Event()

    async def announce(info, role: str, turn: str) -> bool:
        asked.set()
        await go_on.wait()
        return heard

    ctl.announce = announce
    call = asyncio.create_task(ctl.set_role("prefill", 1.0))
    await asked.wait()
    for _ in range(2):
        call.cancel()
        await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await call
    if heard:
        assert (await asyncio.wait_for(ctl.next_role_change(), 20)).role == "prefill"
    else:
        assert ctl.info.state == "ready"
        ctl.announce = None
        assert await ctl.set_role("prefill", 1.0)


async def test_a_worker_that_leaves_while_a_change_of_role_is_taken_back_stays_draining() -> None:
    service = Service()
    ctl, asked, go_on = control(service, []), asyncio.Event(), asyncio.Event()

    async def announce(info, role: str, turn: str) -> bool:
        asked.set()
        await go_on.wait()
        return False

    ctl.announce = announce
    call = asyncio.create_task(ctl.set_role("prefill", 1.0))
    await asked.wait()
    await ctl.drain(0.0)
    go_on.set()
    with pytest.raises(Unavailable):
        await call
    assert ctl.info.state == "draining"


async def test_a_worker_comes_back_as_what_it_was_last() -> None:
    planned = spec("prefill")
    assert await start_role(planned, None) == "prefill"
    assert await start_role(planned, SlotRecord("s", 1, role="decode")) == "decode"
    away = spec("prefill", redis_url="unix:///nowhere/redis.sock")
    assert await start_role(away, SlotRecord("s", 1, role="decode")) == "decode"
