"""Tests who is said to be unable to hand KV over, why, how often, and what operators see of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import httpx
import msgspec
import pytest
from rich.console import Console

from baton.cluster.config import BatonConfig
from baton.cluster.membership import Membership, PolledRoster, WorkerEntry, connect
from baton.console.cluster.workers import obstacles_table, show_workers
from baton.console.setup.doctor import services
from baton.kv.layout.bridge import can_ship, obstacles_between
from baton.kv.layout.page import layout_for
from baton.kv.layout.tables import by_window
from baton.protos.measurements import KvPair, WorkerLoad
from baton.protos.nouns import LayerGroup, WorkerInfo
from baton.router.observe.handovers import HandoverWatch, Obstacle, obstacles
from tests.e2e.fleet import Fleet, wait_for

LAYOUT = layout_for("float32", 1, 1, 64)
OTHER = msgspec.structs.replace(LAYOUT, fidelity="another")


def entry(name: str, load: WorkerLoad = WorkerLoad(), **changes: object) -> WorkerEntry:
    role = name.partition("-")[0]
    info = WorkerInfo(name, "i", role, "here:1", "m", "f" * 64, LAYOUT, 64, 256, (), 4)
    return WorkerEntry(msgspec.structs.replace(info, **changes), load, 0.0)


def of(*entries: WorkerEntry) -> list[tuple[str, str, str]]:
    return [(o.sender, o.receiver, o.cause) for o in obstacles(entries)]


def test_workers_that_fit_have_no_obstacle_nor_have_those_of_one_role_or_of_other_models() -> None:
    assert of(entry("prefill-0"), entry("decode-0")) == []
    assert of(entry("decode-0"), entry("decode-1", fingerprint="0" * 64)) == []
    assert of(entry("prefill-0"), entry("decode-0", model_id="n", fingerprint="0" * 64)) == []
    assert of(entry("prefill-0"), entry("decode-0", layout=OTHER, state="draining")) == []


def test_layouts_that_cannot_be_brought_together_are_named_by_pair_with_the_reason() -> None:
    found = obstacles([entry("prefill-0"), entry("decode-0"), entry("decode-1", layout=OTHER)])
    assert [(o.sender, o.receiver, o.cause) for o in found] == [("prefill-0", "decode-1", "layout")]
    assert "another" in found[0].why
    assert "kv_cache_dtype" in found[0].remedy
    assert str(found[0]).startswith("prefill-0 can't hand over to decode-1: ")


@pytest.mark.parametrize("own", ["prefill-0", "decode-0"])
def test_pages_by_window_beside_pages_of_all_layers_are_no_obstacle_where_the_prefill_worker_converts(
    own: str,
) -> None:
    whole = layout_for(
        "float32", (LayerGroup("full", ("k", "v"), 1, 1, 8), LayerGroup("window", ("k", "v"), 3, 1, 8, 32))
    )
    divided = by_window(whole)
    assert can_ship(whole, divided) == (not obstacles_between(whole, divided))

    def pair(converts: bool) -> list[WorkerEntry]:
        layouts = {name: divided if name == own else whole for name in ("prefill-0", "decode-0")}
        return [entry(name, layout=layout, bridges_windows=converts) for name, layout in layouts.items()]

    assert of(*pair(True)) == []
    assert of(*pair(False)) == [("prefill-0", "decode-0", "layout")]


def test_weights_that_a_partner_has_are_an_upgrade_and_those_that_none_has_an_obstacle() -> None:
    new = "0" * 64
    both = [entry("prefill-0"), entry("decode-0"), entry("decode-1", fingerprint=new)]
    assert of(*both) == [("", "decode-1", "weights")]
    assert of(*both, entry("prefill-1", fingerprint=new)) == []
    assert of(entry("prefill-0"), entry("decode-0", fingerprint=new)) == [
        ("", "decode-0", "weights"),
        ("prefill-0", "", "weights"),
    ]


def test_a_pair_whose_handoffs_fail_is_named_with_the_last_error() -> None:
    load = WorkerLoad(kv_pairs=(KvPair("decode-0", 0, 3, why="nobody answers"), KvPair("decode-9", why="gone")))
    found = obstacles([entry("prefill-0", load), entry("decode-0")])
    assert found == [Obstacle("prefill-0", "decode-0", "failing", "nobody answers")]


def test_many_pairs_are_counted_up_to_a_bound() -> None:
    many = [
        entry(f"{role}-{i}", layout=at) for role, at in (("prefill", LAYOUT), ("decode", OTHER)) for i in range(40)
    ]
    assert len(obstacles(many)) == 64


class House:
    def __init__(self, *entries: WorkerEntry) -> None:
        self.entries = entries

    def snapshot(self) -> dict[str, WorkerEntry]:
        return {e.info.worker_id: e for e in self.entries}


def test_what_lasts_is_warned_of_once_and_again_after_it_was_gone(caplog: pytest.LogCaptureFixture) -> None:
    bad = House(entry("prefill-0"), entry("decode-0", layout=OTHER))
    watch = HandoverWatch(bad)
    with caplog.at_level(logging.WARNING, "baton.router"):
        watch.look()
        assert watch.counts == {"weights": 0, "layout": 1, "failing": 0}
        assert caplog.messages == [], "it may be passing"
        for _ in range(3):
            watch.look()
        assert len(caplog.messages) == 1
        assert "prefill-0 can't hand over to decode-0" in caplog.messages[0]
        assert "kv_cache_dtype" in caplog.messages[0]
        entries, bad.entries = bad.entries, ()
        watch.look()
        assert sum(watch.counts.values()) == 0
        bad.entries = entries
        watch.look()
        watch.look()
    assert len(caplog.messages) == 2


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with Fleet(prefill=1, decode=1, worker={"device": "paced:zero"}) as up:
        yield up


@pytest.mark.thorough  # the others here show each place by itself
async def test_a_decode_worker_of_another_fidelity_shows_everywhere(
    fleet: Fleet, capsys: pytest.CaptureFixture[str]
) -> None:
    url, namespace = fleet.config.redis.url, fleet.config.cluster.namespace
    redis = connect(url)
    try:
        there = (await PolledRoster(redis, namespace).refresh())["decode-0"].info
        layout = msgspec.structs.replace(there.layout, fidelity="another")
        odd = msgspec.structs.replace(there, worker_id="decode-7", address="127.0.0.1:1", layout=layout)
        async with Membership(redis, namespace, odd):

            def shown() -> list[dict]:
                return httpx.get(f"{fleet.url}/v1/cluster", timeout=60).json()["obstacles"]

            found = await asyncio.to_thread(wait_for, shown)
            assert [(o["sender"], o["receiver"], o["cause"]) for o in found] == [
                ("prefill-0", "decode-7", "layout")
            ]
            assert found[0]["remedy"]
            line = 'baton_router_handover_obstacles{cause="layout"} 1.0'
            metrics = f"{fleet.url}/metrics"
            await asyncio.to_thread(wait_for, lambda: line in httpx.get(metrics, timeout=60).text)
            await asyncio.to_thread(show_workers, url, namespace)
            assert "can't hand over" in capsys.readouterr().out
            config = BatonConfig.model_validate({"redis": {"url": url}, "cluster": {"namespace": namespace}})
            [finding] = await asyncio.to_thread(services.handovers, config)
            assert (finding.state, "decode-7" in finding.what, bool(finding.remedy)) == ("warn", True, True)
            await asyncio.to_thread(
                wait_for, lambda: "prefill-0 can't hand over to decode-7" in fleet.log("router", 9000)
            )
    finally:
        await redis.aclose()


def test_the_table_says_what_to_do() -> None:
    found = obstacles_table({e.info.worker_id: e for e in (entry("prefill-0"), entry("decode-0", layout=OTHER))})
    assert found is not None
    out = StringIO()
    Console(file=out, width=300).print(found)
    assert "kv_cache_dtype" in out.getvalue()
    assert obstacles_table({}) is None


def test_doctor_leaves_it_out_where_no_cluster_runs(tmp_path: Path) -> None:
    config = BatonConfig.model_validate({"redis": {"url": "redis://127.0.0.1:1/0"}})
    assert [f.state for f in services.handovers(config)] == ["skip"]
