"""One real, private Ray: placement, reports, a killed raylet, adoption by the next one."""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from baton.launch.ray.app import FIRST_S, PlacementSpec, RayPlacement, _no_room, quiet_environment
from baton.launch.ray.host import PlacementReport
from baton.launch.supervise import HostPlan, SlotStatus
from baton.process.processes import kill_session, session_members
from baton.protos.errors import ConfigError, StartupError
from baton.worker.slots import holders

pytest.importorskip("ray")


class RayHost:
    """The real process, its reports read as they come."""

    def __init__(self, spec: PlacementSpec, folder: Path) -> None:
        file = folder / "placement.json"
        file.write_bytes(msgspec.json.encode(spec))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "baton.launch.ray.host", "--spec", str(file)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    def until_ready(self, slots: int) -> dict[str, SlotStatus]:
        ready: dict[str, SlotStatus] = {}
        assert self.process.stdout is not None
        for line in self.process.stdout:
            report = msgspec.json.decode(line, type=PlacementReport)
            assert report.error is None, report.error
            if report.slot is not None and report.slot.state == "ready":
                ready[report.slot.slot] = report.slot
            if len(ready) == slots:
                break
        return ready


def name_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


@pytest.fixture
def ray_host(folder: Path, plan: Callable[..., HostPlan]) -> Iterator[Callable[[], RayHost]]:
    spec = PlacementSpec((plan("prefill-0"), plan("decode-0")), str(folder / "ray"))
    hosts: list[RayHost] = []

    def start() -> RayHost:
        hosts.append(RayHost(spec, folder))
        return hosts[-1]

    yield start
    for host in hosts:
        kill_session(host.process.pid)
        host.process.wait()


@pytest.mark.thorough  # `baton serve` shows it, too (tests/e2e/test_serve.py)
def test_a_killed_ray_leaves_hosts_that_the_next_ray_adopts_and_ends(
    folder: Path, ray_host: Callable[[], RayHost]
) -> None:
    first = ray_host()
    before = first.until_ready(2)
    assert set(before) == {"prefill-0", "decode-0"}
    raylet = next(pid for pid in session_members(first.process.pid) if name_of(pid) == "raylet")
    os.kill(raylet, signal.SIGKILL)
    assert first.process.wait(60) == 1, "whoever started it starts the next one"
    deadline = time.monotonic() + 60
    while any(name_of(pid).startswith("ray::Worker") for pid in session_members(first.process.pid)):
        assert time.monotonic() < deadline, "an actor that nobody can reach supervises a slot still"
        time.sleep(0.1)
    kill_session(first.process.pid)
    assert set(holders(folder)) == {"prefill-0", "decode-0"}, "serving goes on without Ray"

    second = ray_host()
    after = second.until_ready(2)
    assert {s: a.pid for s, a in after.items()} == {s: b.pid for s, b in before.items()}
    assert all(status.adopted for status in after.values())

    os.kill(after["decode-0"].pid, signal.SIGKILL)
    assert second.until_ready(1)["decode-0"].pid != after["decode-0"].pid, "Ray brings it back"

    second.process.communicate(timeout=60)  # closing stdin ends it
    assert holders(folder) == {}
    assert session_members(second.process.pid) == []


def test_ray_listens_on_loopback_with_a_token_of_its_own(plan: Callable[..., HostPlan]) -> None:
    private = quiet_environment(PlacementSpec((plan(),), "/x"))
    assert private["RAY_AUTH_MODE"] == "token"
    assert private["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"
    assert private["RAY_worker_niceness"] == "0", "workers have the priority of any other process"
    joined = quiet_environment(PlacementSpec((plan(),), "/x", address="10.0.0.1:6379"))
    assert "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER" not in joined


@pytest.mark.thorough  # `baton scale` writes it: tests/e2e/test_serve.py
def test_a_line_on_stdin_takes_a_slot_away_and_brings_another(
    folder: Path, plan: Callable[..., HostPlan], ray_host: Callable[[], RayHost]
) -> None:
    host = ray_host()
    before = host.until_ready(2)
    assert host.process.stdin is not None
    wanted = [plan("prefill-0"), plan("prefill-1")]
    host.process.stdin.write(b"rubbish\n" + msgspec.json.encode(wanted) + b"\n")
    host.process.stdin.flush()
    seen: dict[str, str] = {}
    assert host.process.stdout is not None
    while seen.get("prefill-1") != "ready" or seen.get("decode-0") != "ended":
        report = msgspec.json.decode(host.process.stdout.readline(), type=PlacementReport)
        assert report.error is None, report.error
        if report.slot is not None:
            seen[report.slot.slot] = report.slot.state
    assert set(holders(folder)) == {"prefill-0", "prefill-1"}
    assert holders(folder)["prefill-0"] == before["prefill-0"].pid, "who stays is not touched"
    host.process.communicate(timeout=60)


def test_who_finds_no_room_is_told_what_no_node_offers() -> None:
    plain = HostPlan("decode-1", "decode", "", "/slots", "/log")
    gang = msgspec.structs.replace(
        plain, slot="tp-0", resources={"baton_tp": 1, "GPU": 2}, gang=4, labels={"accelerator": "h200"}
    )
    said = str(_no_room([plain, gang], gpus=False))
    assert "decode-1: 1 baton_decode; tp-0: 8 GPU, 4 baton_tp all on one node labelled accelerator=h200" in said
    assert """--resources '{"baton_decode": 1}'""" in said
    ranks = msgspec.structs.replace(plain, cards=2)
    assert "decode-1: 1 baton_decode, 2 GPUs, one per rank" in str(_no_room([ranks], gpus=True))
    said = str(_no_room([plain, gang], gpus=True))
    assert "decode-1: 1 baton_decode, a GPU or its share of one; tp-0: 8 GPU, 4 baton_tp all" in said


class Silence:
    """Stands for the seats of actors that answer when the test says so."""

    answered = False

    def where(self) -> dict[str, str]:
        return {"prefill-0": "node"}

    def statuses(self) -> tuple[dict[str, SlotStatus], bool]:
        return {}, self.answered


def test_actors_that_a_busy_machine_has_not_started_yet_are_waited_for_longer_than_silent_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("baton.launch.ray.app._import_ray", lambda spec: types.SimpleNamespace())
    now, seats = [100.0], Silence()
    spec = PlacementSpec((), "/x")
    placement = RayPlacement(spec, clock=lambda: now[0])
    placement._seats = seats  # type: ignore[assignment]
    placement.statuses()
    now[0] += FIRST_S - 1
    placement.statuses()
    seats.answered = True
    placement.statuses()
    seats.answered = False
    placement.statuses()
    now[0] += spec.lost_s + 1
    with pytest.raises(StartupError, match="none of its actors did for 5 s"):
        placement.statuses()


def test_a_ray_that_times_out_as_it_starts_is_told_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: object) -> None:
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr("baton.launch.ray.app._import_ray", lambda spec: types.SimpleNamespace(init=init))
    with pytest.raises(
        StartupError, match=r"can't start Ray: The current node timed out during startup. On a busy"
    ):
        RayPlacement(PlacementSpec((), "/x")).connect()
    with pytest.raises(StartupError, match=r"can't join Ray at 10.0.0.1:6379: .* RAY_AUTH_MODE"):
        RayPlacement(PlacementSpec((), "/x", address="10.0.0.1:6379")).connect()


def test_a_slot_without_room_is_an_error_of_a_start_and_waits_where_the_cluster_ran_before(
    plan: Callable[..., HostPlan],
) -> None:
    """The second process would end after a while, and each that follows: nobody would keep the others in place."""
    for must_fit in (True, False):
        now = itertools.count(0.0, 30.0)
        placement = RayPlacement(
            PlacementSpec((plan("decode-0"),), "/x", "10.0.0.1:6379", must_fit=must_fit),
            clock=lambda now=now: next(now),
        )
        placement._seats = types.SimpleNamespace(
            want=lambda plans: None, tend=lambda: None, unseated=lambda: [plan("decode-0")], patient=False
        )
        with pytest.raises(ConfigError, match="no room") if must_fit else contextlib.nullcontext():
            placement.place()
        assert placement._seats.patient is not must_fit
