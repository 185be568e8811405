"""The witness of fair shares reports a tenant that waited while another was served beyond its share."""

from __future__ import annotations

from baton.drill.checks.fairness import SLACK, FairnessWitness, Wait


def told(order: str, placed_at: float, each: float) -> list[str]:
    """Says what is unfair where requests of tenants a and b come at once, and are placed in ``order``.

    They count as waiting from second 1 on; ``each`` is the time between two placements.
    """
    witness = FairnessWitness()
    for number, tenant in enumerate(order):
        witness.came(number, Wait(0, tenant, 10, 0.0, 1.0))
    for number in range(len(order)):
        witness.ends(number, placed_at + each * number, placed=True)
    return list(witness.unfair())


def test_a_tenant_that_is_placed_after_all_of_another_is_treated_unfairly() -> None:
    assert told("a" * (SLACK + 2) + "b", 1.5, 0.1)
    assert not told("ab" * (SLACK + 2), 1.5, 0.1)


def test_requests_that_found_room_on_arrival_waited_for_nobody() -> None:
    assert not told("a" * (SLACK + 2) + "b", 0.5, 0.001)


def test_a_tenant_that_others_passed_on_arrival_may_catch_up_and_no_further() -> None:
    passed = "a" * (2 * SLACK)
    for caught_up, unfair in (("b" * (2 * SLACK), False), ("b" * (4 * SLACK), True)):
        witness = FairnessWitness()
        order = passed + caught_up + "a"
        for number, tenant in enumerate(order):
            witness.came(number, Wait(0, tenant, 10, 0.0, 1.0))
        for number in range(len(order)):
            witness.ends(number, (0.5 if number < len(passed) else 1.5) + 0.001 * number, placed=True)
        assert bool(list(witness.unfair())) == unfair
