"""The controller at a look, over a real Redis: what it waits for, what it counts, what it shows of itself."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from redis.asyncio import Redis

from baton.cluster.advice import Advice, AdviceStore, RatioPin
from baton.cluster.config import load_config
from baton.cluster.membership import WorkerEntry
from baton.cluster.metering.telemetry import RouterMetrics
from baton.cluster.store.lease import NamedLease
from baton.cluster.traffic import ClassTraffic, TrafficSlice, TrafficStore
from baton.controller import loop
from baton.controller.loop import CHANGE_S, Controller
from baton.controller.metrics import ControlMetrics
from baton.controller.replicas import ReplicaControl
from baton.protos.measurements import StepCurve, WorkerLoad
from baton.protos.nouns import KvLayout, WorkerInfo
from baton.router.dispatch.role_control import RoleChange

CURVE = StepCurve(0.03, 4e-4, 0.0, 1.25e-3, 0.0)
INFO = WorkerInfo("w", "w-1", "prefill", "", "m", "", KvLayout("float32", (), 64, "float32"), 64, 64, (), 8)


class Cluster:
    """Members and roles of a cluster that is told what it looks like; ``moved`` is what was asked of it."""

    def __init__(self, **roles: str) -> None:
        self.roles, self.states, self.moved = roles, dict.fromkeys(roles, "ready"), []

    def snapshot(self) -> dict[str, WorkerEntry]:
        load = WorkerLoad(step_curve=CURVE)
        return {
            slot: WorkerEntry(
                msgspec.structs.replace(INFO, worker_id=slot, role=role, state=self.states[slot], max_batch=8),
                load, 0.0,
            )
            for slot, role in self.roles.items()
        }  # fmt: skip

    def least_busy(self, become: str, count: int) -> list[str]:
        return sorted(slot for slot, role in self.roles.items() if role != become)[:count]

    async def move(
        self,
        names: list[str],
        role: str,
        grace_s: float,
        counted: tuple[int, int] | None = None,
        wanted: Callable[[], Awaitable[None]] | None = None,
    ) -> list[RoleChange]:
        assert counted == self.usable()
        if wanted is not None:
            await wanted()
        self.roles |= dict.fromkeys(names, role)
        return [RoleChange(name, "", role, 0.1) for name in names]

    def usable(self) -> tuple[int, int]:
        ready = [role for slot, role in self.roles.items() if self.states[slot] == "ready"]
        return ready.count("prefill"), ready.count("decode")


class At:
    """A clock that is set."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def controller(redis: Redis, cluster: Cluster, clock: At, folder: Path, registry: CollectorRegistry) -> Controller:
    config = load_config(flags={"controller": {"mode": "auto", "dial_s": 0.0}}, search=folder)
    metrics = ControlMetrics(RouterMetrics(registry), clock)
    return Controller(
        config, cluster, cluster, TrafficStore(redis, "baton"), AdviceStore(redis, "baton"),
        NamedLease(redis, "baton", "controller", "r", 15.0), ReplicaControl(redis, config), metrics, clock,
    )  # type: ignore[arg-type] # fmt: skip


async def test_a_worker_that_is_held_is_not_waited_for_for_ever_nor_counted(redis: Redis, tmp_path: Path) -> None:
    cluster, clock = Cluster(a="prefill", b="decode", c="decode"), At(1000.0)
    looked = controller(redis, cluster, clock, tmp_path, CollectorRegistry())
    assert (await looked.look()).reason == "no traffic"
    cluster.states["c"] = "draining"
    clock.now += 5
    changing = await looked.look()
    assert (changing.reason, changing.decode) == ("a change is under way", 1)
    clock.now += CHANGE_S + 5
    assert (await looked.look()).reason == "no traffic"
    cluster.states["c"] = "ready"
    clock.now += 5
    assert (await looked.look()).decode == 2


async def test_its_figures_are_shown_while_it_leads_and_its_age_grows(redis: Redis, tmp_path: Path) -> None:
    registry, clock = CollectorRegistry(), At(1000.0)
    looked = controller(redis, Cluster(a="prefill", b="decode"), clock, tmp_path, registry)
    await looked.look()
    clock.now += 42
    text = generate_latest(registry).decode()
    assert 'baton_controller_decision_age_seconds{mode="auto"} 42.0' in text
    assert 'baton_controller_decisions_total{kind="hold"} 1.0' in text
    looked._metrics.left()
    assert "baton_controller_decision_age_seconds{" not in generate_latest(registry).decode()


async def test_a_cluster_that_was_left_without_prefill_workers_gets_one_back(redis: Redis, tmp_path: Path) -> None:
    cluster, clock = Cluster(**{"prefill-0": "decode", "decode-0": "decode"}), At(1000.0)
    looked = controller(redis, cluster, clock, tmp_path, CollectorRegistry())
    await AdviceStore(redis, "baton").pin(RatioPin(0, 2))
    for clock.now in (1005.0, 1010.0, 1015.0):
        await looked.look()
    assert cluster.usable() == (0, 2)  # an operator's word holds
    await AdviceStore(redis, "baton").pin(None)
    for clock.now in (1020.0, 1025.0):
        await looked.look()
    assert cluster.usable() == (1, 1)
    assert "no prefill worker is left" in (await AdviceStore(redis, "baton").timeline())[0].reason


@pytest.mark.parametrize("says", ["pinned", "advise"])
async def test_what_an_operator_says_while_the_controller_looks_is_heeded(
    redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str
) -> None:
    """Plays an operator who speaks once the controller has read what operators want. Pinning the present ratio
    changes no numbers of workers, so that only the operator's word can stop the change.
    """
    cluster, clock = Cluster(**{"prefill-0": "decode", "decode-0": "decode"}), At(1000.0)
    looked, store = controller(redis, cluster, clock, tmp_path, CollectorRegistry()), AdviceStore(redis, "baton")
    recent, looks = looked._traffic.recent, iter(range(10))

    async def read(since: float) -> object:
        if next(looks) == 1:
            await (store.pin(RatioPin(0, 2)) if says == "pinned" else store.set_mode(says))
        return await recent(since)

    monkeypatch.setattr(looked._traffic, "recent", read)
    for clock.now in (1005.0, 1010.0):
        await looked.look()
    assert cluster.usable() == (0, 2)
    assert "an operator has meanwhile" in (await store.timeline())[0].reason


async def test_a_cluster_that_is_yet_to_come_up_is_no_news_and_one_that_has_gone_is(
    redis: Redis, tmp_path: Path
) -> None:
    cluster, clock = Cluster(), At(1000.0)
    looked, store = controller(redis, cluster, clock, tmp_path, CollectorRegistry()), AdviceStore(redis, "baton")
    await looked.look()
    assert not await store.timeline()
    cluster.roles, cluster.states = {"a": "prefill", "b": "decode"}, {"a": "ready", "b": "ready"}
    await looked.look()
    cluster.roles = {}
    await looked.look()
    assert [change.reason.partition(":")[0] for change in await store.timeline()] == [
        "0 workers can be given work",
        "no traffic",
    ]


async def test_a_look_that_outlasted_the_lead_changes_nothing(
    redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis may answer late, or the process have stood still: another router may lead by now."""
    monkeypatch.setattr(loop, "JUMP_S", 1e9)
    cluster, clock = Cluster(), At(1000.0)
    cluster.roles = {"prefill-0": "decode", "b": "decode", "c": "decode"}
    cluster.states = dict.fromkeys(cluster.roles, "ready")
    looked = controller(redis, cluster, clock, tmp_path, CollectorRegistry())
    looked._lease = NamedLease(redis, "baton", "controller", "r", 0.2)
    put = looked._store.put

    async def late(advice: Advice) -> bool:
        await asyncio.sleep(0.3)
        return await put(advice)

    looked._store.put = late  # type: ignore[assignment]
    for _ in range(4):
        clock.now += 30
        await looked._turn()
    assert set(cluster.roles.values()) == {"decode"}
    looked._store.put = put  # type: ignore[method-assign]
    for _ in range(4):
        clock.now += 30
        await looked._turn()
    assert "prefill" in cluster.roles.values()


@pytest.mark.parametrize("by", [-3600.0, 3600.0])
async def test_a_clock_that_was_set_starts_a_cool_down_and_no_more(
    redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: float
) -> None:
    cluster, clock = Cluster(a="prefill", b="decode"), At(1000.0)
    looked = controller(redis, cluster, clock, tmp_path, CollectorRegistry())
    began: list[float] = []
    monkeypatch.setattr(looked._replicas, "lead", began.append)
    await looked._turn()
    clock.now += 1.0
    await looked._turn()
    clock.now += by
    await looked._turn()
    await looked._turn()
    assert began == [1000.0, 1001.0 + by]
    assert looked._history.changed_at == 1001.0 + by


async def test_traffic_of_a_clock_that_was_set_back_counts_no_more(redis: Redis, tmp_path: Path) -> None:
    """Requests that waited then would wait for as long as it was set back by."""
    cluster, clock, registry = Cluster(a="prefill", b="decode"), At(1000.0), CollectorRegistry()
    looked, traffic = controller(redis, cluster, clock, tmp_path, registry), TrafficStore(redis, "baton")
    await traffic.push(
        TrafficSlice("r", 4600.0, 1.0, {"short": ClassTraffic(arrived=9, arrived_tokens=900)}, 90, 9000)
    )
    assert (await looked.look()).reason == "no traffic"


async def test_a_leader_stays_the_leader_while_a_change_takes_longer_than_its_lease(
    redis: Redis, tmp_path: Path
) -> None:
    cluster, clock = Cluster(**{"prefill-0": "decode", "decode-0": "decode"}), At(1000.0)
    looked = controller(redis, cluster, clock, tmp_path, CollectorRegistry())
    looked._lease = NamedLease(redis, "baton", "controller", "r", 2.0)
    looked._config = looked._config.model_copy(update={"interval_s": 0.05})
    other, move, lost = NamedLease(redis, "baton", "controller", "other", 2.0), cluster.move, []

    async def slowly(*asked: object, counted: object, **further: object) -> list[RoleChange]:
        for _ in range(25):
            await asyncio.sleep(0.1)
            lost.append(await other.hold())
        return await move(*asked, counted=counted)

    cluster.move = slowly
    assert await looked._lease.hold()
    for clock.now in (1005.0, 1010.0, 1015.0):
        await looked.look()
    assert cluster.usable() == (1, 1)
    assert lost
    assert not any(lost)
