"""A prefill worker measures the ways to the decode workers that are here before a request waits for it."""

from __future__ import annotations

import msgspec
from prometheus_client import CollectorRegistry

from baton.cluster.metering.telemetry import WorkerMetrics
from baton.cost.fit import TransferFit
from baton.kv.layout.page import layout_for
from baton.prefill_worker.io.handoff import HandoffReport
from baton.protos.errors import BatonError, Cancelled, Draining, LayoutMismatch, WorkerLost
from baton.protos.measurements import KvLink
from baton.protos.nouns import WorkerInfo
from baton.worker.figures.transfer import TransferFigures
from baton.worker.peers import AGAIN_S, Peers

LAYOUT = layout_for("float32", 1, 1, 64)
OURS = WorkerInfo("prefill-0", "i", "prefill", "here:1", "m", "f" * 64, LAYOUT, 64, 256, (), 4)


class House:
    """A roster, a transport that remembers whom it met, and a clock."""

    def __init__(self) -> None:
        self.here: dict[str, WorkerInfo] = {}
        self.met: list[tuple[str, str]] = []
        self.dead: set[str] = set()
        self.now = 0.0
        self.registry = CollectorRegistry()
        self.figures = TransferFigures(
            WorkerMetrics(self.registry, "prefill", "prefill-0", "m"), TransferFit(), lambda: self.now
        )
        self.peers = Peers(OURS, self.look, self, lambda: self.now, self.figures.met, self.figures.present)

    @property
    def obstacles(self) -> dict[str, str]:
        return {pair.peer: pair.why for pair in self.figures.pairs if pair.why}

    def fail(self, error: BatonError, began: float | None = None) -> None:
        """One handoff to decode-0 that failed now, a second after it began."""
        self.now += 1.0
        self.figures.failed("decode-0", error, self.now - 1.0 if began is None else began)

    def join(self, name: str, incarnation: str = "a", **changes: str) -> None:
        info = msgspec.structs.replace(
            OURS, worker_id=name, role="decode", address=f"{name}:1", incarnation=incarnation
        )
        self.here[name] = msgspec.structs.replace(info, **changes)

    async def look(self) -> dict[str, WorkerInfo]:
        return self.here

    async def meet(self, address: str, incarnation: str) -> None:
        self.met.append((address, incarnation))
        if address in self.dead:
            raise WorkerLost("nobody answers", "decode_address")


async def test_the_way_to_a_decode_worker_is_shown_while_it_is_there() -> None:
    def in_use(peer: str) -> float | None:
        labels = {"role": "prefill", "worker": "prefill-0", "model": "m", "peer": peer, "transport": "tcp"}
        return house.registry.get_sample_value("baton_kv_transport_info", labels)

    house = House()
    for name in ("decode-0", "decode-1"):
        house.join(name)
        house.figures.link(KvLink(name, "tcp", 1e9, 0.0), "")
        house.figures.completed(name, HandoffReport(1, 64, 0.0, 0.1, f"{name}:1"))
    for here in (("decode-0", "decode-1"), ("decode-0",), ("decode-0", "decode-1")):
        house.here = {name: info for name, info in house.here.items() if name in here}
        for name in here:
            house.join(name)
        await house.peers.meet_all()
        for found in (house.figures.links, house.figures.pairs):
            assert tuple(one.peer for one in found) == here
        assert [in_use(name) for name in ("decode-0", "decode-1")] == [1.0, float("decode-1" in here)]
    assert [pair.transfers for pair in house.figures.pairs] == [1, 1]


async def test_whoever_is_ready_to_take_our_models_kv_is_met() -> None:
    house = House()
    house.join("decode-0")
    house.join("draining", state="draining")
    house.join("another", model_id="other")
    house.join("other-weights", fingerprint="0" * 64)
    house.join("prefill-1", role="prefill")
    await house.peers.meet_all()
    assert house.met == [("decode-0:1", "a")]


async def test_one_that_does_not_answer_is_left_alone_for_a_while_and_tried_at_once_when_it_was_restarted() -> None:
    house = House()
    house.join("decode-0")
    house.join("decode-1")
    house.dead.add("decode-0:1")
    await house.peers.meet_all()
    assert house.met == [("decode-0:1", "a"), ("decode-1:1", "a")], "one failure keeps nobody else waiting"
    await house.peers.meet_all()
    assert house.met[2:] == [("decode-1:1", "a")]
    house.join("decode-0", incarnation="b")
    await house.peers.meet_all()
    assert house.met[3] == ("decode-0:1", "b")
    house.now += AGAIN_S
    house.met.clear()
    await house.peers.meet_all()
    assert house.met[0] == ("decode-0:1", "b")


async def test_one_that_cannot_be_reached_is_said_so_until_it_is() -> None:
    house = House()
    house.join("decode-0")
    house.dead.add("decode-0:1")
    await house.peers.meet_all()
    assert house.obstacles == {"decode-0": "nobody answers"}
    house.dead.clear()
    house.now += AGAIN_S
    await house.peers.meet_all()
    assert house.obstacles == {}


async def test_handoffs_that_fail_in_a_row_are_an_obstacle_until_one_arrives_or_the_worker_is_another() -> None:
    house = House()
    house.join("decode-0")
    await house.peers.meet_all()
    for error in (Cancelled("the client left"), Draining("it leaves"), LayoutMismatch("other pages", "layout")) * 2:
        house.fail(error)
    assert house.obstacles == {}, "two failures, and four that are nobody's fault"
    house.fail(LayoutMismatch("other pages", "layout"))
    assert house.obstacles == {"decode-0": "other pages"}
    await house.peers.meet_all()
    assert house.obstacles, "that it can be reached doesn't say that it takes anything"
    house.join("decode-0", incarnation="b")
    await house.peers.meet_all()
    assert house.obstacles == {}
    for _ in range(3):
        house.fail(WorkerLost("it hung up", "decode_address"))
    assert house.obstacles == {"decode-0": "it hung up"}
    house.figures.completed("decode-0", HandoffReport(1, 1, 0.0, 0.0, "decode-0:1"))
    assert house.obstacles == {}


async def test_handoffs_that_one_lost_connection_ends_together_are_one_failure_in_a_row() -> None:
    house = House()
    for lost in range(1, 4):
        began = house.now
        for _ in range(8):
            house.fail(WorkerLost("it hung up", "decode_address"), began)
        assert bool(house.obstacles) == (lost == 3)
    [pair] = house.figures.pairs
    assert pair.failures == 24
