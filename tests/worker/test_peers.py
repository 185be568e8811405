"""A prefill worker measures the ways to the decode workers that are here before a request waits for it."""

from __future__ import annotations

import msgspec

from baton.cluster.membership import WorkerEntry
from baton.kv.layout.page import layout_for
from baton.protos.errors import WorkerLost
from baton.protos.measurements import WorkerLoad
from baton.protos.nouns import WorkerInfo
from baton.worker.peers import AGAIN_S, Peers

LAYOUT = layout_for("float32", 1, 1, 64)
OURS = WorkerInfo("prefill-0", "i", "prefill", "here:1", "m", "f" * 64, LAYOUT, 64, 256, (), 4)


class House:
    """A roster, a transport that remembers whom it met, and a clock."""

    def __init__(self) -> None:
        self.here: dict[str, WorkerEntry] = {}
        self.met: list[tuple[str, str]] = []
        self.dead: set[str] = set()
        self.now = 0.0
        self.peers = Peers(OURS, self.look, self, lambda: self.now)

    def join(self, name: str, incarnation: str = "a", **changes: str) -> None:
        info = msgspec.structs.replace(
            OURS, worker_id=name, role="decode", address=f"{name}:1", incarnation=incarnation
        )
        self.here[name] = WorkerEntry(msgspec.structs.replace(info, **changes), WorkerLoad(), 0.0)

    async def look(self) -> dict[str, WorkerEntry]:
        return self.here

    async def meet(self, address: str, incarnation: str) -> None:
        self.met.append((address, incarnation))
        if address in self.dead:
            raise WorkerLost("nobody answers", "decode_address")


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
