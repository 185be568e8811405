"""Role changes at their seams: several at once end together, and too few ready workers are told."""

import asyncio
import time

import msgspec
import pytest
from redis.asyncio import Redis

from baton.cluster.membership import connect
from baton.cluster.roles import RoleTurns
from baton.cluster.store.lease import NamedLease
from baton.protos.errors import ConfigError, ErrorInfo, InvalidRequest, NoWorker, Unavailable
from baton.protos.nouns import WorkerInfo
from baton.router.dispatch.role_control import RoleControl
from tests.router.fake_services import info


class Link:
    """A worker's link that changes after ``after_s``, or fails; ``comes_back`` is what its worker is then."""

    def __init__(self, is_now: WorkerInfo, after_s: float = 0.0, fails: bool = False, **comes_back: object) -> None:
        self.info, self.up = is_now, True
        self._after_s, self._fails, self._comes_back = after_s, fails, comes_back

    async def set_role(self, role: str, grace_s: float, turn: str) -> str:
        await asyncio.sleep(self._after_s)
        if self._fails:
            raise Unavailable("it would not")
        asked = f"{self.info.incarnation}.1"
        self.info = msgspec.structs.replace(self.info, **{"role": role, "incarnation": asked} | self._comes_back)
        return asked


class View:
    def __init__(self, links: list[Link]) -> None:
        self._links = links

    def reachable(self, role: str) -> int:
        return sum(k.up and k.info.role == role for k in self._links)

    def busy(self, worker_id: str) -> tuple[int, int]:
        return 0, 0


def worker(number: int, state: str = "ready", role: str = "decode", model: str = "m") -> WorkerInfo:
    return info(f"{role}-{number}", role, incarnation=f"{role}{number}", state=state, model_id=model)


def cluster(*roles: str, model: str = "m") -> list[Link]:
    return [Link(worker(i, role=role, model=model)) for i, role in enumerate(roles)]


def played(links: list[Link]) -> list[str]:
    return [k.info.role for k in links]


def control(links: list[Link], turns: RoleTurns | None = None) -> RoleControl:
    async def look() -> None:
        return None

    return RoleControl(links, View(links), time.monotonic, look, turns.turn if turns else None)


async def test_when_one_of_several_changes_fails_the_others_are_over_too_before_it_is_told():
    links = [Link(worker(0)), Link(worker(1), fails=True), Link(worker(2), after_s=0.2)]
    with pytest.raises(Unavailable, match="it would not"):
        await control(links).move(["decode-1", "decode-2"], "prefill", 0.0)
    assert [k.info.role for k in links] == ["decode", "decode", "prefill"]


async def test_a_worker_that_cannot_begin_the_role_says_why_at_once():
    why = ErrorInfo("ConfigError", "speculation: no draft model at /d", "speculation")
    link = Link(worker(0), role="decode", incarnation="decode0.2", role_error=why)
    links = [link, Link(worker(1))]
    with pytest.raises(ConfigError, match="decode-0 stays a decode worker: speculation: no draft model at /d"):
        await asyncio.wait_for(control(links).set_role("decode-0", "prefill", 0.0), 10)
    link._comes_back = {"role_error": None}  # it can, the second time: what it said of the first counts no more
    assert (await control(links).set_role("decode-0", "prefill", 0.0)).after == "prefill"


async def test_a_worker_that_was_ended_on_its_way_and_started_again_in_the_role_has_changed():
    links = [Link(worker(0), incarnation="another process"), Link(worker(1))]
    change = await asyncio.wait_for(control(links).set_role("decode-0", "prefill", 0.0), 10)
    assert (change.after, change.incarnation) == ("prefill", "another process")


async def test_a_ratio_that_too_few_ready_workers_could_form_changes_none():
    links = [Link(worker(0)), Link(worker(1)), Link(worker(2, "draining"))]
    links[0].info = msgspec.structs.replace(links[0].info, state="draining")
    with pytest.raises(NoWorker, match="only 1 of the 2"):
        await control(links).set_ratio(2, 1)
    assert {k.info.role for k in links} == {"decode"}


@pytest.mark.parametrize(("last", "other"), [("prefill", "decode"), ("decode", "prefill")])
async def test_the_last_worker_of_a_role_keeps_it_unless_it_is_forced_and_there_is_a_way_back(last, other):
    links = cluster(last, other)
    with pytest.raises(InvalidRequest, match=f"{last}-0 is the last ready {last} worker") as refused:
        await control(links).set_role(f"{last}-0", other, 0.0)
    said = refused.value.message  # what would be left, and the remedy
    assert all(text in said for text in (f"{last}=0", f"{other}=2", "Make another worker", "--force")), said
    assert played(links) == [last, other]
    await control(links).set_role(f"{last}-0", other, 0.0, force=True)
    assert played(links) == [other, other]
    await control(links).set_ratio(1, 1)
    assert sorted(played(links)) == ["decode", "prefill"]


async def test_a_ratio_without_prefill_workers_is_formed_by_force_alone():
    links = cluster("prefill", "decode")
    with pytest.raises(InvalidRequest, match="last ready prefill worker"):
        await control(links).set_ratio(0, 2)
    await control(links).set_ratio(0, 2, force=True)
    assert played(links) == ["decode", "decode"]
    assert await control(links).set_ratio(0, 2) == []  # as it is: nothing moves, nothing to refuse


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_each_model_keeps_a_worker_of_the_role_that_others_give_up(role):
    other = {"prefill": "decode", "decode": "prefill"}[role]
    links = [*cluster(role, role, other), Link(worker(7, role=role, model="n"))]
    with pytest.raises(InvalidRequest, match=f"{role}-7 .* of 'n'"):
        await control(links).set_role(f"{role}-7", other, 0.0)
    with pytest.raises(InvalidRequest, match="of 'm'"):
        await control(links).move([f"{role}-0", f"{role}-1"], other, 0.0)
    links[1].info = msgspec.structs.replace(links[1].info, state="draining")
    with pytest.raises(InvalidRequest, match="last ready"):
        await control(links).set_role(f"{role}-0", other, 0.0)


async def test_whose_model_has_another_leaves_before_the_least_busy_whose_has_not():
    links = [Link(worker(0, role="prefill", model="n")), *cluster("prefill", "prefill")[1:], *cluster("decode")]
    links += [Link(worker(2, role="prefill"))]
    assert control(links).least_busy("decode", 1) == ["prefill-1"]


async def test_two_routers_at_once_never_turn_the_last_worker_of_a_role(redis: Redis):
    """Each could count on the other's worker to stay, and no request would be answered."""
    links = [Link(worker(0), after_s=0.1), Link(worker(1), after_s=0.1), *cluster("prefill")]
    routers = [control(links, RoleTurns(redis, "t", name)) for name in ("one", "two")]
    asked = [router.set_role(f"decode-{n}", "prefill", 0.0) for n, router in enumerate(routers)]
    ends = await asyncio.gather(*asked, return_exceptions=True)
    assert sorted(type(end).__name__ for end in ends) == ["InvalidRequest", "RoleChange"]
    assert sorted(played(links)) == ["decode", "prefill", "prefill"]
    assert (await routers[1].set_role("decode-0", "prefill", 0.0, force=True)).after == "prefill"


async def test_a_router_that_stood_still_as_it_counted_roles_changes_none(redis: Redis):
    """Another may have had its turn, and have turned the worker that it counts on to stay."""
    links, turns = cluster("decode", "decode", "prefill"), RoleTurns(redis, "t", "one")
    turns._lease = NamedLease(redis, "t", "roles", "one", 0.1)

    async def look() -> None:
        time.sleep(0.15)  # the whole process stands still

    stands = RoleControl(links, View(links), time.monotonic, look, turns.turn)
    with pytest.raises(Unavailable, match="another may have changed roles"):
        await stands.set_role("decode-0", "prefill", 0.0)
    assert played(links) == ["decode", "decode", "prefill"]
    assert stands.changing() == []


@pytest.mark.parametrize("routers", [1, 2])
async def test_of_two_ratios_at_once_the_later_one_counts_what_the_earlier_has_changed(redis: Redis, routers: int):
    """Counted before it waited for its turn, its one worker would be one that has changed already."""
    links = [Link(worker(n), after_s=0.05) for n in range(3)] + cluster("prefill")
    controls = [control(links, RoleTurns(redis, "t", f"r-{n}")) for n in range(routers)]
    earlier = asyncio.create_task(controls[0].set_ratio(3, 1))
    await asyncio.sleep(0.02)
    await controls[-1].set_ratio(2, 2)
    assert len(await earlier) == 2
    assert sorted(played(links)) == ["decode", "decode", "prefill", "prefill"]


async def test_a_change_decided_on_other_counts_than_there_are_now_is_not_made():
    links = cluster("decode", "decode", "decode", "prefill")
    with pytest.raises(Unavailable, match="changed since they were counted"):
        await control(links).move(["decode-0"], "prefill", 0.0, counted=(0, 4))
    assert played(links).count("decode") == 3
    await control(links).move(["decode-0"], "prefill", 0.0, counted=(1, 3))
    assert played(links).count("decode") == 2


async def test_a_change_that_nobody_wants_any_more_once_it_has_its_turn_is_not_made():
    links = cluster("decode", "decode")

    async def wanted() -> None:
        raise Unavailable("an operator has pinned the ratio")

    with pytest.raises(Unavailable, match="has pinned"):
        await control(links).move(["decode-0"], "prefill", 0.0, wanted=wanted)
    assert played(links) == ["decode", "decode"]


async def test_a_worker_that_another_router_has_just_changed_is_counted_once_it_is_connected(redis: Redis):
    links = cluster("decode", "decode", "prefill")
    links[0].up = False
    asyncio.get_running_loop().call_later(0.1, setattr, links[0], "up", True)
    await control(links, RoleTurns(redis, "t", "one")).set_ratio(2, 1)
    assert played(links).count("prefill") == 2


@pytest.mark.parametrize("state", ["standby", "draining"])
async def test_a_worker_that_is_held_or_drained_has_changed_once_it_is_there_in_its_role(state):
    links = [Link(worker(0), state=state), Link(worker(1))]
    change = await asyncio.wait_for(control(links).set_role("decode-0", "prefill", 0.0), 10)
    assert (change.after, change.incarnation) == ("prefill", "decode0.1")


async def test_roles_are_not_changed_while_routers_cannot_agree_on_them():
    links, gone = cluster("decode", "decode"), connect("unix:///nowhere/redis.sock")
    with pytest.raises(Unavailable, match="Redis is away"):
        await control(links, RoleTurns(gone, "t", "one")).set_role("decode-0", "prefill", 0.0)
    await gone.aclose()
