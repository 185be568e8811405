"""Tests what the witness of an engine's messages calls wrong."""

from __future__ import annotations

import msgspec

from baton.drill.checks.queues import QueueWitness
from baton.drill.checks.watch import Answers, EngineWitness, Witnesses
from baton.drill.draw import draw
from baton.drill.scenario import Batch
from baton.protos import channel as ch
from baton.protos.nouns import EngineRequest, Sampling
from baton.router.api.batch.lane import LOWEST_PRIORITY


def witnessed(answers: Answers, said: list[str], weights: str) -> EngineWitness:
    found = EngineWitness(
        "d", {}, 2.0, 3.0, Witnesses(said.append, answers, {}, QueueWitness(draw(0), 0.1, said.append))
    )
    found.weights = weights
    return found


def admitted(request_id: str, emitted: int) -> ch.Admit:
    return ch.Admit(1, EngineRequest(request_id, (1, 2, *range(emitted)), 2, Sampling(), 0), True, 2.0)


def test_a_batch_line_may_begin_on_other_weights_than_another_line_but_not_go_on_there() -> None:
    answers: Answers = {}
    said: list[str] = []
    old, new = witnessed(answers, said, "old"), witnessed(answers, said, "new")
    old.told(admitted("aa:0:1", 0), 0.0, 0.0)
    new.told(admitted("bb:0:1", 0), 0.0, 0.0)
    new.told(admitted("bb:0:2", 3), 0.0, 0.0)
    assert not said
    new.told(admitted("aa:0:2", 3), 0.0, 0.0)
    assert said == ["request aa choice 0 goes on at d, which has other weights or KV"]


def test_a_batch_line_that_is_as_urgent_as_a_request_is_reported() -> None:
    said: list[str] = []
    own = msgspec.structs.replace(draw(0), batches=(Batch(0.0, ((1, 2),), 1),), pins=())
    queues = QueueWitness(own, 0.1, said.append)
    found = EngineWitness("d", {}, 2.0, 3.0, Witnesses(said.append, {}, {}, queues))
    line = EngineRequest("aa:0:1", (1, 2), 2, Sampling(), 0, priority=LOWEST_PRIORITY)
    found.told(ch.Admit(1, line, True, 2.0), 0.0, 0.0)
    assert not said
    found.told(ch.Admit(2, msgspec.structs.replace(line, request_id="bb:0:1", priority=0), True, 2.0), 0.0, 0.0)
    assert said == ["a line of a batch job at d: asked with priority 0"]
