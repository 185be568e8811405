"""The controller's asking for workers, over a real Redis: what is placed, what became of it, whose word counts."""

from pathlib import Path

import msgspec
import pytest
from redis.asyncio import Redis

from baton.cluster.config import load_config
from baton.cluster.membership import WorkerEntry
from baton.cluster.roles import RoleWishes
from baton.cluster.scale import ScaleRequest, ask, read
from baton.controller.replica_decision import ReplicaDecision
from baton.controller.replicas import ReplicaControl
from baton.protos.measurements import WorkerLoad
from baton.protos.nouns import KvLayout, WorkerInfo

INFO = WorkerInfo("w", "w-1", "prefill", "", "m", "", KvLayout("float32", (), 64, "float32"), 64, 64, (), 8)
ADD = ReplicaDecision("add", 2, 1, "it is full", (2, 1))


@pytest.fixture
def control(redis: Redis, tmp_path: Path) -> ReplicaControl:
    config = load_config(
        flags={"controller": {"most_workers": 4}, "cluster": {"start_timeout_s": 60.0}}, search=tmp_path
    )
    found = ReplicaControl(redis, config)
    found.lead(0.0)
    return found


def members(**roles: str) -> dict[str, WorkerEntry]:
    """Returns workers by slot: ``prefill_0="prefill"`` plays that role, ``decode_0="draining"`` is in that
    state.
    """
    found = {}
    for name, role in roles.items():
        slot = name.replace("_", "-")
        state = role if role == "draining" else "ready"
        role = role if role in ("prefill", "decode") else "decode"
        found[slot] = WorkerEntry(
            msgspec.structs.replace(INFO, worker_id=slot, role=role, state=state), WorkerLoad(), 0.0
        )
    return found


HERE = members(prefill_0="prefill", decode_0="decode")


async def test_where_nobody_asked_the_config_says_what_there_is(control: ReplicaControl) -> None:
    placed, news = await control.placed(1.0, HERE)
    assert (placed.prefill, placed.decode, placed.last_prefill, placed.last_decode) == (1, 1, "prefill", "decode")
    assert (placed.awaited, news) == ((), None)


async def test_what_is_asked_for_is_awaited_and_then_told_with_its_time(
    control: ReplicaControl, redis: Redis
) -> None:
    await control.placed(1.0, HERE)
    await RoleWishes(redis, "baton").want("prefill-1", "decode")  # a slot of that name was turned once
    change = await control.ask(2.0, (1, 1), ADD)
    assert (change.kind, change.workers, change.after) == ("add", ("prefill-1",), (2, 1))
    assert await read(redis, "baton") == ScaleRequest(2, 1, 1, "controller")
    assert await RoleWishes(redis, "baton").of("prefill-1") == "prefill"
    waiting, nothing = await control.placed(7.0, HERE)
    assert (waiting.awaited, nothing) == (("prefill-1",), None)
    placed, news = await control.placed(12.0, HERE | members(prefill_1="prefill"))
    assert news is not None
    assert (news.kind, news.seconds, placed.awaited) == ("add", 10.0, ())
    assert control.history.start_s == 10.0
    assert (await control.placed(13.0, HERE | members(prefill_1="prefill")))[1] is None


async def test_what_does_not_come_is_taken_back_and_said(control: ReplicaControl, redis: Redis) -> None:
    await control.placed(1.0, HERE)
    await control.ask(2.0, (1, 1), ADD)
    placed, news = await control.placed(63.0, HERE)
    assert news is not None
    assert news.kind == "failed"
    assert "prefill-1 not here after 61 s" in news.reason
    assert (placed.prefill, placed.awaited) == (1, ())
    assert await read(redis, "baton") == ScaleRequest(1, 1, 2, "controller")
    assert control.history.failed_at == 63.0


async def test_a_worker_that_does_not_go_is_said_and_not_started_again(
    control: ReplicaControl, redis: Redis
) -> None:
    both = HERE | members(prefill_1="prefill")
    await ask(redis, "baton", ScaleRequest(2, 1))
    await control.placed(1.0, both)
    await control.ask(2.0, (2, 1), ReplicaDecision("remove", 1, 1, "idle", (1, 1)))
    news = (await control.placed(70.0, both))[1]
    assert news is not None
    assert (news.kind, "prefill-1 not gone" in news.reason) == ("failed", True)
    asked = await read(redis, "baton")
    assert asked is not None
    assert (asked.prefill, asked.decode) == (1, 1)


async def test_an_operators_asking_is_heeded_and_ours_forgotten(control: ReplicaControl, redis: Redis) -> None:
    await control.placed(1.0, HERE)
    await control.ask(2.0, (1, 1), ADD)
    await ask(redis, "baton", ScaleRequest(1, 3))
    placed, news = await control.placed(5.0, HERE)
    assert (placed.prefill, placed.decode, placed.awaited) == (1, 3, ("decode-1", "decode-2"))
    assert news is None
    assert (control.history.by_operator, control.history.changed_at) == (True, 5.0)
    late, _ = await control.placed(500.0, HERE)
    assert late.awaited == (), "a worker that never comes is not waited for for ever"


async def test_the_last_slot_counts_by_the_role_that_it_plays(control: ReplicaControl) -> None:
    turned, _ = await control.placed(1.0, members(prefill_0="decode", decode_0="draining"))
    assert (turned.last_prefill, turned.last_decode) == ("decode", "")


async def test_workers_of_pools_are_not_ours_to_count(control: ReplicaControl) -> None:
    placed, _ = await control.placed(1.0, HERE | members(long_0="prefill"))
    assert placed.awaited == ()


async def test_a_new_leader_takes_back_what_an_earlier_one_asked_for_in_vain(
    control: ReplicaControl, redis: Redis
) -> None:
    """The earlier one died, or Redis was away for a moment: the slots would be asked for, and counted, for ever."""
    await control.placed(1.0, HERE)
    await control.ask(2.0, (1, 1), ADD)
    control.lead(40.0)
    placed, news = await control.placed(41.0, HERE)
    assert (placed.awaited, news) == (("prefill-1",), None)
    placed, news = await control.placed(102.0, HERE)
    assert news is not None
    assert (news.kind, "prefill-1 not here" in news.reason) == ("failed", True)
    assert (placed.prefill, placed.awaited) == (1, ())
    assert await read(redis, "baton") == ScaleRequest(1, 1, 2, "controller")


async def test_a_new_leader_keeps_what_has_come_and_what_an_operator_asked_for(
    control: ReplicaControl, redis: Redis
) -> None:
    await control.placed(1.0, HERE)
    await control.ask(2.0, (1, 1), ADD)
    control.lead(40.0)
    assert (await control.placed(41.0, HERE | members(prefill_1="prefill")))[1] is None
    assert (await control.placed(200.0, HERE))[1] is None, "it came; that it is away now is another matter"
    await ask(redis, "baton", ScaleRequest(3, 1))
    control.lead(240.0)
    for at in (241.0, 400.0):
        assert (await control.placed(at, HERE))[1] is None
    asked = await read(redis, "baton")
    assert asked is not None
    assert (asked.prefill, asked.by) == (3, "")


async def test_a_new_leader_of_a_cluster_that_is_still_coming_up_takes_nothing_back(
    control: ReplicaControl, redis: Redis
) -> None:
    await ask(redis, "baton", ScaleRequest(4, 4, by="controller"))
    control.lead(1.0)
    for at in (2.0, 100.0):
        assert (await control.placed(at, members(decode_0="decode")))[1] is None
    assert await read(redis, "baton") == ScaleRequest(4, 4, 1, "controller")


async def test_numbers_that_an_operator_asked_for_during_a_look_are_not_overwritten(
    control: ReplicaControl, redis: Redis
) -> None:
    await control.placed(1.0, HERE)
    await ask(redis, "baton", ScaleRequest(1, 3))
    change = await control.ask(2.0, (1, 1), ADD)
    assert (change.kind, "others asked" in change.reason) == ("hold", True)
    placed, _ = await control.placed(3.0, HERE)
    assert (placed.prefill, placed.decode, control.history.by_operator) == (1, 3, True)
