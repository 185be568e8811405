"""The witness of queues reports refusals without a reason, and queues that hold more than they may."""

from __future__ import annotations

import msgspec
import pytest

from baton.drill.checks.queues import FULL, QueueWitness
from baton.drill.draw import draw
from baton.drill.overload import bytes_of
from baton.drill.scenario import Batch, Request, Scenario, Tenant
from baton.protos.nouns import Sampling

WAY_S = 0.01
QUOTA = "rate_limit_exceeded"


def scenario(**fields: object) -> Scenario:
    fields = {"tenants": (Tenant("flood"), Tenant("rare")), "max_queue": 2, "requests_per_min": 0} | fields
    return msgspec.structs.replace(draw(0), batches=(), models=2, short_tokens=50, **fields)


def request(number: int, **fields: object) -> Request:
    asks = Sampling(temperature=0.0, max_tokens=10)
    return msgspec.structs.replace(Request(number, 0.0, (1,) * 40, asks, tenant="flood"), **fields)


def witness(own: Scenario) -> tuple[QueueWitness, list[str]]:
    said: list[str] = []
    return QueueWitness(own, WAY_S, said.append), said


def full_of(found: QueueWitness, *, count: int = 2, **fields: object) -> None:
    for number in range(count):
        found.asked(request(number, **fields), 0.0)


def refuse(found: QueueWitness, asked: Request, code: str = FULL, at: float = 1.0, advised: bool = True) -> None:
    found.asked(asked, at)
    found.refused(asked, code, at, advised, at_once=True)


def test_a_full_queue_refuses_rightly_and_one_with_room_does_not() -> None:
    found, said = witness(scenario())
    full_of(found)
    refuse(found, request(7))
    assert not [*found.unjust()]
    found.ends(0, 2.0, placed=True)
    refuse(found, request(8), at=2.1)
    assert "1 of 2 places" in next(found.unjust())
    assert found.count() == 2
    assert not said


def test_less_urgent_requests_pass_a_waiting_one_at_most_as_often_as_the_queue_looks_ahead() -> None:
    found, said = witness(scenario(max_queue=100))
    found.asked(request(0), 0.0)
    for number in range(1, 12):
        found.asked(request(number, priority=1 if number < 10 else 0), 0.0)
    for number in range(1, 9):
        found.ends(number, 1.0, placed=True)
    assert not [*found.unjust()], "eight may be tried past a head without room"
    found.ends(11, 1.1, placed=True)
    assert not [*found.unjust()], "one of the same priority may go first"
    found.ends(9, 1.2, placed=True)
    found.ends(0, 2.0, placed=True)
    assert next(found.unjust()) == "request 0: 9 less urgent ones were placed while it waited"
    assert not said


@pytest.mark.parametrize("other", [{"model": 1}, {"router": 1}, {"prompt": (1,) * 60}], ids=str)
def test_the_full_queue_of_another_model_class_or_router_is_no_reason(other: dict[str, object]) -> None:
    found, _ = witness(scenario())
    full_of(found, **other)
    refuse(found, request(7))
    assert "0 of 2 places" in next(found.unjust())


def test_a_request_that_is_refused_is_told_when_to_come_again() -> None:
    found, said = witness(scenario())
    full_of(found)
    refuse(found, request(7), advised=False)
    assert "not told when to come again" in said[0]


def test_lines_of_a_batch_job_fill_no_queue() -> None:
    own = msgspec.structs.replace(scenario(), batches=(Batch(0.0, ((1, 2),) * 20, 10),))
    found, _ = witness(own)
    full_of(found, count=1)
    refuse(found, request(7))
    assert "1 of 2 places" in next(found.unjust())


def test_bytes_of_those_in_flight_are_a_reason_and_so_are_those_of_lines() -> None:
    size = bytes_of(request(0))
    for most, lines, founded in ((3 * size, 0, True), (4 * size, 0, False), (4 * size, 20, True)):
        job = Batch(0.0, ((1, 2),) * lines, 10)
        found, _ = witness(msgspec.structs.replace(scenario(max_inflight_bytes=most, max_queue=9), batches=(job,)))
        full_of(found, count=3)
        refuse(found, request(7))
        assert (not [*found.unjust()]) == founded


def test_requests_that_hold_more_bytes_than_they_may_are_seen() -> None:
    size = bytes_of(request(0))
    for most, seen in ((2 * size, True), (3 * size, False)):
        found, _ = witness(scenario(max_inflight_bytes=most, max_queue=9))
        full_of(found, count=3)
        assert [f"hold {3 * size} bytes where they may hold {most}" in said for said in found.unjust()] == [
            True
        ] * seen


def test_more_that_wait_than_there_are_places_are_seen() -> None:
    found, _ = witness(scenario())
    full_of(found, count=3)
    assert "3 requests wait where 2 may" in next(found.unjust())


def test_an_idle_tenant_is_not_refused_for_a_flood() -> None:
    found, _ = witness(scenario(max_queue=20))
    full_of(found, count=20)
    refuse(found, request(30, tenant="flood"))
    assert not [*found.unjust()]
    refuse(found, request(31, tenant="rare"), at=1.1)
    assert "request 31: refused, while tenant flood waits" in next(found.unjust())


def test_a_deadline_that_has_not_passed_ends_nothing() -> None:
    found, _ = witness(scenario())
    for number, after in ((1, 0.5), (2, 3.0)):
        asked = request(number, deadline_after=after)
        found.asked(asked, 0.0)
        found.refused(asked, "deadline_exceeded", 1.0, advised=True)
    assert [*found.unjust()] == ["request 2: its deadline has not passed"]


def test_a_rate_is_used_up_by_what_was_answered_and_not_by_what_was_refused() -> None:
    for code, unjust in (("complete", 0), (FULL, 1)):
        found, _ = witness(scenario(requests_per_min=2))
        full_of(found, tenant="rare")  # so that the queue is full
        for number in (10, 11):
            asked = request(number, over_http="whole", key=0)
            found.asked(asked, 1.0)
            found.refused(asked, code, 1.005, advised=True)
        refuse(found, request(12, over_http="whole", key=0), QUOTA, at=3.0)
        assert len([*found.unjust()]) == unjust


def test_an_idle_tenant_is_not_late_for_what_waits_behind_it() -> None:
    found, _ = witness(scenario(max_queue=100))
    for number in range(60):  # of which one is placed each 10 ms
        found.asked(request(number), 0.0)
        if number < 40:
            found.ends(number, 0.6 + 0.01 * number, placed=True)
            found.writes(number, 0.61 + 0.01 * number)
    for number, tenant in ((70, "flood"), (71, "rare")):
        refuse(found, request(number, tenant=tenant, slo_ttft_s=0.5))
    assert [said.partition(",")[0] for said in found.unjust()] == ["request 71: refused as late"]
