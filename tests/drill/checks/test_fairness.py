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


def test_a_tenant_of_twice_the_weight_may_get_twice_as_much_and_no_more() -> None:
    for order, unfair in (("aab" * (2 * SLACK), False), ("ab" * (3 * SLACK), True)):
        witness = FairnessWitness()
        for number, tenant in enumerate(order):
            weight = 2.0 if tenant == "a" else 1.0
            witness.came(number, Wait(0, tenant, 10, 0.0, 1.0, weight=weight))
        for number in range(len(order)):
            witness.ends(number, 1.5 + 0.1 * number, placed=True)
        assert bool(list(witness.unfair())) == unfair


def test_a_tenant_that_is_refused_and_asks_again_waits_as_well() -> None:
    for again_s, unfair in ((0.1, True), (1.0, False)):
        witness = FairnessWitness()
        for number in range(40):
            witness.came(number, Wait(0, "a", 10, 0.0, 1.0))
            witness.ends(number, 1.5 + 0.1 * number, placed=True)
        for number in range(int(6.0 / again_s)):
            asked = again_s * number
            witness.came(100 + number, Wait(0, "b", 10, asked, asked + 0.01))
            witness.ends(100 + number, asked, placed=False)
            witness.refused(100 + number)
        assert bool(list(witness.unfair())) == unfair
