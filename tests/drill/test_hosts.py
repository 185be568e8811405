"""Workers whose ranks are on two hosts: each host sends and receives its own part of every page."""

from __future__ import annotations

import re
from collections import Counter

import msgspec
import pytest

from baton.decode_worker.io.host_intake import HostIntake
from baton.drill.draw import draw
from baton.drill.language.oracle import Sight
from baton.drill.parts.far_host import SimulatedHost
from baton.drill.run import Verdict, play
from baton.drill.scenario import FAR, PEER, Fault, Scenario, Size
from baton.engine.backends.ranks.host_pages import HostPages
from tests.thorough import later

QUIET = Size(workers=2, requests=10, kinds=(), hosted=0.0, floats=0.0, selected=0.0, paged=0.0, flooded=0.0)


def on_hosts(counts: tuple[int, ...], *faults: Fault, seed: int = 0) -> Scenario:
    plain = {"controller": False, "local_max": 0, "placed": False, "scales": (), "lease_ttl_s": 8.0}
    drawn = msgspec.structs.replace(draw(seed, QUIET), host_counts=counts, sight=Sight(divided=True), **plain)
    return msgspec.structs.replace(drawn, faults=faults)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts what becomes of divided leases and pages, by the method that is called."""
    counts: Counter[str] = Counter()
    for kind, name in ((HostIntake, "_whole"), (HostPages, "landed"), (SimulatedHost, "start")):
        original = getattr(kind, name)

        def counted(self: object, *args: object, name: str = name, original: object = original) -> object:
            counts[name] += 1
            return original(self, *args)  # type: ignore[operator]

        monkeypatch.setattr(kind, name, counted)
    return counts


def test_each_host_gets_its_part_of_every_page(seen: Counter[str]) -> None:
    verdict = held(on_hosts((2,)))
    assert verdict.answered
    assert seen["start"]
    assert seen["landed"]
    assert not seen["_whole"], "nobody was unreachable"


@pytest.mark.parametrize("hosts", [(1, 2), later((2, 1))])
def test_whole_pages_come_to_the_lead_of_two_hosts_from_one(hosts: tuple[int, ...]) -> None:
    assert held(on_hosts(hosts)).answered


@pytest.mark.thorough
def test_the_lead_gets_everything_while_its_other_host_is_out_of_reach(seen: Counter[str]) -> None:
    cuts = (
        Fault("cut", 0.0, f"prefill-{i}{to}", f"decode-{j}{FAR}", 20.0)
        for i in (0, 1)
        for j in (0, 1)
        for to in ("", FAR)
    )
    verdict = held(on_hosts((2,), *cuts))
    assert verdict.answered
    assert seen["_whole"]


def test_a_worker_ends_with_another_host_of_its_ranks() -> None:
    gone = on_hosts((2,), Fault("host_dies", 2.0, "decode-0"), Fault("break", 4.0, "prefill-0", "prefill-0" + FAR))
    verdict = held(gone, keep_story=True)
    assert verdict.answered
    assert any("decode-0" in line and "ended" in line for line in verdict.lines), verdict.lines


def test_many_seeds_draw_faults_at_the_other_hosts_of_workers_that_are_at_a_request() -> None:
    drawn = [draw(seed, Size(hosted=1.0, paged=0.0, floats=0.0, selected=0.0)) for seed in range(60)]
    ours = [fault for one in drawn if one.host_counts for fault in one.faults if fault.other.endswith(FAR)]
    assert {fault.kind for fault in ours} >= {"cut", "break", "half_open", "torn"}
    assert {fault.other for fault in ours if fault.aim} == {FAR, PEER + FAR}
    assert any(fault.kind == "host_dies" for one in drawn for fault in one.faults)


@pytest.mark.thorough
@pytest.mark.parametrize("to", [FAR, later(PEER + FAR)])
def test_a_cut_at_a_request_meets_its_workers_hosts(to: str) -> None:
    cut = Fault("cut", 0.0, "decode-0", to, 3.0, aim="receiving", request=0)
    verdict = held(on_hosts((2,), cut), keep_story=True)
    met = rf"cut {'prefill' if to != FAR else 'decode'}-\d{FAR}"
    assert any(re.search(met, line) for line in verdict.lines), verdict.lines


def held(scenario: Scenario, keep_story: bool = False) -> Verdict:
    verdict = play(scenario, keep_story)
    assert verdict.held, verdict.violations
    return verdict
