"""Draws operators who ask for workers' roles: at several routers at once, of workers that are held, by REST, or of
workers that can't begin another one.

Knows nothing of what is usual. Each draws from randomness of its own, so that the rest of a scenario stays.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

from baton.drill.scenario import REDIS, Fault, FaultKind, Phase, Scenario

TURN_S = 6.0  # seconds in which operators ask for roles at most routers at once
# Seconds for which a router stands still within its turn, and an engine that is to change its role.
STANDS_S, STUCK_S = ((0.5, 4.0), (5.0, 9.0), (5.0, 9.0)), (4.0, 8.0)
KEPT_S = (5.0, 12.0)  # seconds for which a partition keeps what a router asks a worker
HELD_S = (2.0, 8.0)  # seconds for which a worker is held whose role is asked for
OVER_REST = 0.5  # share of the scenarios with such operators in which they ask by REST


def with_kept_roles(scenario: Scenario, share: float) -> Scenario:
    """Returns ``scenario``, in ``share`` of those whose workers' roles change with some that keep theirs."""
    rng = random.Random(f"kept roles {scenario.seed}")
    changes = scenario.controller or any(fault.kind in ("role", "ratio") for fault in scenario.faults)
    if rng.random() >= share or not changes:
        return scenario
    return msgspec.structs.replace(
        scenario, keep_roles=tuple(slot for slot in _workers(*scenario.slots) if rng.random() < 0.6)
    )


def with_turns(scenario: Scenario, span: float, kinds: Sequence[FaultKind], share: float) -> Scenario:
    """Returns ``scenario``, in ``share`` of those with faults with two or three routers, of which operators ask for
    roles at once. In half of them nothing else goes wrong; in some, one of these routers dies, stands still or
    loses Redis while it has its turn.
    """
    rng = random.Random(f"turns {scenario.seed}")
    asked: list[FaultKind] = [kind for kind in ("role", "role", "ratio") if kind in kinds]
    if rng.random() >= share or not (asked and scenario.faults and scenario.may_change_roles):
        return scenario
    routers = rng.choice((2, 2, 3))
    workers = _workers(scenario.prefill, scenario.decode)
    calm = rng.random() < 0.5
    faults = [] if calm else list(scenario.faults)
    for _ in range(rng.choice((1, 1, 2))):
        at = rng.uniform(0.0, span)
        for _ in range(rng.choice((2, 2, 3))):
            turn = Fault(rng.choice(asked), at + rng.uniform(0.0, rng.choice((0.01, 0.5))), rng.choice(workers))
            turn = msgspec.structs.replace(turn, seconds=rng.uniform(0.0, 2.0), asks=rng.randrange(routers))
            faults.append(turn)
        faults += _in_a_turn(rng, faults[-1], kinds, scenario)
    requests = tuple(
        r if r.session else msgspec.structs.replace(r, router=rng.randrange(routers)) for r in scenario.requests
    )
    turned = msgspec.structs.replace(scenario, routers=routers, requests=requests)
    return _over_rest(_with_faults(turned, faults, calm), calm)


def _in_a_turn(rng: random.Random, turn: Fault, kinds: Sequence[FaultKind], scenario: Scenario) -> list[Fault]:
    """Draws what goes wrong while a router changes roles as in ``turn``, if anything does."""
    at, router = turn.at + rng.uniform(0.0, 1.5), f"router-{turn.asks}"
    drawn = (
        Fault("router_dies", at, router, seconds=rng.uniform(0.0, 2.0)),
        Fault("redis_restarts", at, turn.target, seconds=rng.uniform(0.05, 2.0)),
        Fault("redis_stalls", at, turn.target, seconds=rng.uniform(0.05, TURN_S)),
        Fault("cut", at, router, REDIS, seconds=rng.uniform(0.5, 2 * TURN_S)),
        Fault("cut", max(0.0, turn.at - rng.uniform(0.0, 0.2)), router, turn.target, seconds=rng.uniform(*KEPT_S)),
        *(_stands(rng, turn, scenario) for _ in range(3)),  # which nothing else draws
        Fault("stuck", turn.at, turn.target, seconds=rng.uniform(*STUCK_S), aim="changing"),
    )
    possible = [fault for fault in drawn if fault.kind in kinds]
    return [rng.choice(possible)] if possible and rng.random() < 0.7 else []


def _stands(rng: random.Random, turn: Fault, scenario: Scenario) -> Fault:
    """Draws that the router of ``turn`` stands still once it has its turn, in most cases as it looks who has which
    role, and for longer than the turn lasts without it.
    """
    aim: Phase = rng.choice(("turning", "counting", "counting"))
    after = rng.choice((0.0, rng.uniform(0.0, 1.0))) if aim == "turning" else rng.uniform(0.0, scenario.delay_s)
    seconds = rng.uniform(*rng.choice(STANDS_S))
    return Fault("stands", turn.at, f"router-{turn.asks}", seconds=seconds, aim=aim, after=after)


def with_held(scenario: Scenario, span: float, kinds: Sequence[FaultKind], share: float) -> Scenario:
    """Returns ``scenario``, in ``share`` of those with faults with operators who ask for the roles of workers that
    are held meanwhile. In half of them nothing else goes wrong.
    """
    rng = random.Random(f"held {scenario.seed}")
    if rng.random() >= share or not {"role", "hold"} <= set(kinds):
        return scenario
    if not (scenario.faults and scenario.may_change_roles):
        return scenario
    calm = rng.random() < 0.5
    faults = [] if calm else list(scenario.faults)
    role = rng.choice(("prefill", "decode"))
    scenario = msgspec.structs.replace(scenario, **{role: max(2, getattr(scenario, role))})  # one of them stays
    workers = [slot for slot in _workers(scenario.prefill, scenario.decode) if slot.startswith(role)]
    for _ in range(rng.choice((1, 1, 2))):
        slot, at, seconds = rng.choice(workers), rng.uniform(0.0, span), rng.uniform(*HELD_S)
        asks = rng.randrange(scenario.routers)
        faults.append(Fault("hold", at, slot, seconds=seconds, asks=rng.randrange(scenario.routers)))
        faults.append(Fault("role", at + rng.uniform(0.0, 1.5), slot, seconds=rng.uniform(0.0, 1.0), asks=asks))
    return _over_rest(_with_faults(scenario, faults, calm), calm)


def _over_rest(scenario: Scenario, calm: bool) -> Scenario:
    """Returns ``scenario``, in OVER_REST of them with operators who ask by REST. Beside these a controller may
    change roles in ``calm`` scenarios as well, until they pin a ratio.
    """
    rng = random.Random(f"over rest {scenario.seed}")
    if rng.random() >= OVER_REST:
        return scenario
    asked = ("role", "ratio", "hold")
    faults = tuple(
        msgspec.structs.replace(fault, over_rest=fault.kind in asked or fault.over_rest)
        for fault in scenario.faults
    )
    controlled = scenario.controller or (calm and scenario.models == 1 and rng.random() < 0.5)
    return msgspec.structs.replace(scenario, faults=faults, controller=controlled)


def _with_faults(scenario: Scenario, faults: list[Fault], calm: bool) -> Scenario:
    without = {"controller": False} if calm else {}
    return msgspec.structs.replace(scenario, faults=tuple(sorted(faults, key=lambda f: f.at)), **without)


def _workers(prefill: int, decode: int) -> list[str]:
    return [f"prefill-{i}" for i in range(prefill)] + [f"decode-{i}" for i in range(decode)]
