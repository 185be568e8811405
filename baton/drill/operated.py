"""Makes a drawn scenario one in which somebody keeps prefixes, cancels batch jobs, needs API keys, adds, removes
and drains workers, or asks them for roles, at several routers at once or roles that they can't begin.

Knows nothing of what is usual. Each draws from randomness of its own, so that the rest of a scenario stays.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

from baton.drill.scenario import (
    APART,
    HANGS_UP,
    HOSTED,
    OPERATED,
    PHASES,
    REDIS,
    TWICE,
    Batch,
    ClientKey,
    Fault,
    FaultKind,
    PrefixPin,
    Request,
    ScaleChange,
    Scenario,
)
from baton.drill.specials import tokens_of

MOST_PINNED = 300  # tokens of a prefix
TURN_S = 6.0  # seconds in which operators ask for roles at most routers at once


def with_pins(scenario: Scenario, span: float, share: float) -> Scenario:
    """Returns ``scenario``, in ``share`` of them with clients who pin beginnings of prompts, and let them go."""
    rng = random.Random(f"pins {scenario.seed}")
    if rng.random() >= share:
        return scenario
    pins = [_pin(rng, scenario, span) for _ in range(rng.randint(1, 6))]
    return msgspec.structs.replace(scenario, pins=tuple(sorted(pins, key=lambda pin: pin.at)))


def _pin(rng: random.Random, scenario: Scenario, span: float) -> PrefixPin:
    like = rng.choice(scenario.requests)
    prompt = like.prompt if rng.random() < 0.7 else tokens_of(rng, rng.randint(16, 200))
    return PrefixPin(
        at=rng.uniform(0.0, span),
        prompt=prompt[: rng.randint(32, MOST_PINNED)],
        ttl_s=rng.choice((2.0, 15.0, 90.0)),
        workers=rng.choice((1, 1, 1, 2)),
        tenant=like.tenant,
        router=rng.randrange(scenario.routers),
        leaves_after=rng.uniform(0.0, rng.choice((0.05, 1.0))) if rng.random() < 0.3 else None,
        leaves_as_pinned=rng.random() < 0.7,
        unpin_after=rng.uniform(0.0, 5.0) if rng.random() < 0.3 else None,
        unpin_router=rng.randrange(scenario.routers),
    )


def with_keys(scenario: Scenario, span: float, share: float) -> Scenario:
    """Returns ``scenario``, in ``share`` of them with API keys, without which nobody is answered.

    Requests over HTTP and gRPC carry one. Some are revoked, some are for another model, and some clients have
    none, or one that nobody made.
    """
    rng = random.Random(f"keys {scenario.seed}")
    wired = any(request.over_http for request in scenario.requests)
    if rng.random() >= share or not wired or scenario.pins:  # whose blocks have the salt of the client's own
        return scenario
    keys = tuple(_key(rng, f"tenant-{index % 2}", span) for index in range(4))
    requests = tuple(
        _with_key(rng, request, keys) if request.over_http else request for request in scenario.requests
    )
    return msgspec.structs.replace(scenario, keys=keys, requests=requests)


def _key(rng: random.Random, tenant: str, span: float) -> ClientKey:
    kind = rng.random()
    return ClientKey(tenant, rng.uniform(0.0, span) if kind < 0.4 else None, bound_elsewhere=kind > 0.85)


def _with_key(rng: random.Random, request: Request, keys: Sequence[ClientKey]) -> Request:
    key = rng.choice((*range(len(keys)), *range(len(keys)), None, -1))
    tenant = "" if key is None or key < 0 else keys[key].tenant
    return msgspec.structs.replace(request, key=key, tenant=tenant)


def with_scales(scenario: Scenario, span: float, share: float) -> Scenario:
    """Returns ``scenario``, in ``share`` of them with a placer of which operators, or the controller, ask for other
    numbers of workers. It dies in some, or has no room for all.
    """
    rng = random.Random(f"scales {scenario.seed}")
    if rng.random() >= share:
        return scenario
    adds = scenario.controller and rng.random() < 0.7
    scales = [
        ScaleChange(
            rng.uniform(0.0, span), rng.randint(1, scenario.prefill + 1), rng.randint(1, scenario.decode + 1)
        )
        for _ in range(rng.choice((0, 1)) if adds else rng.randint(1, 4))
    ]
    workers = scenario.prefill + scenario.decode
    dies = [rng.uniform(0.0, span) for _ in range(rng.choice((0, 0, 1, 2)))]
    # An operator who turns roles while others remove workers may leave a role to nobody.
    faults = tuple(fault for fault in scenario.faults if fault.kind not in ("role", "ratio"))
    return msgspec.structs.replace(
        scenario,
        placed=True,
        scales=tuple(sorted(scales, key=lambda change: change.at)),
        placer_dies=tuple(sorted(dies)),
        room=workers + 1 if rng.random() < 0.2 else 0,
        most_workers=workers + 2 if adds else 0,
        faults=faults,
    )


def with_kept_roles(scenario: Scenario, share: float) -> Scenario:
    """Returns ``scenario``, in ``share`` of those whose workers' roles change with some that keep theirs."""
    rng = random.Random(f"kept roles {scenario.seed}")
    changes = scenario.controller or any(fault.kind in ("role", "ratio") for fault in scenario.faults)
    if rng.random() >= share or not changes:
        return scenario
    slots = [f"prefill-{i}" for i in range(scenario.slots[0])] + [f"decode-{i}" for i in range(scenario.slots[1])]
    return msgspec.structs.replace(scenario, keep_roles=tuple(slot for slot in slots if rng.random() < 0.6))


def with_cancelled_jobs(scenario: Scenario, share: float) -> Scenario:
    """Returns ``scenario`` with ``share`` of its batch jobs cancelled, some of them twice."""
    rng = random.Random(f"cancelled jobs {scenario.seed}")

    def cancelled(batch: Batch) -> Batch:
        if rng.random() >= share:
            return batch
        times = [rng.uniform(0.0, rng.choice((1.0, 10.0))) for _ in range(rng.choice((1, 1, 2)))]
        return msgspec.structs.replace(batch, cancels=tuple(sorted(times)), router=rng.randrange(scenario.routers))

    return msgspec.structs.replace(scenario, batches=tuple(map(cancelled, scenario.batches)))


def with_drains(scenario: Scenario, span: float, kinds: Sequence[FaultKind], share: float) -> Scenario:
    """Returns ``scenario``, in ``share`` of those with faults with workers that operators drain and then tell to
    stop: single ones, or all of a role one after another. Some are drained twice, some are to change their role
    just then.
    """
    rng = random.Random(f"drains {scenario.seed}")
    alone = bool(kinds) and set(kinds) <= {*APART, *HOSTED, *OPERATED}
    drawn = alone or (bool(scenario.faults) and rng.random() < share)
    if "drain" not in kinds or not drawn:
        return scenario
    role = rng.choice(("prefill", "decode", "decode"))
    rolled = [f"{role}-{i}" for i in range(scenario.prefill if role == "prefill" else scenario.decode)]
    slots = rolled if rng.random() < 0.5 else [rng.choice(rolled) for _ in range(rng.choice((1, 1, 2, 3)))]
    faults = list(scenario.faults)
    for at, slot in zip(sorted(rng.uniform(0.0, span) for _ in slots), slots, strict=True):
        seconds = rng.choice((0.0, rng.uniform(0.0, 0.5), rng.uniform(0.5, 5.0)))
        drain = Fault("drain", at, slot, seconds=seconds, factor=rng.choice((1.0, 1.0, TWICE, HANGS_UP)))
        faults.append(_while_busy(rng, drain, scenario) if rng.random() < 0.5 else drain)
        if "role" in kinds and not scenario.placed and not any(kind.dtype for kind in scenario.page_kinds):
            nearly = max(0.0, at + rng.uniform(-0.3, 0.3))
            turn = Fault("role", nearly, slot, seconds=rng.uniform(0.0, 1.0), asks=rng.randrange(scenario.routers))
            faults += [turn] if rng.random() < 0.4 else []
    faults.sort(key=lambda fault: fault.at)
    return msgspec.structs.replace(scenario, faults=tuple(faults))


def _while_busy(rng: random.Random, fault: Fault, scenario: Scenario) -> Fault:
    """Returns ``fault`` at the worker that is at a request, one that goes on for long rather than another."""
    drawn = [rng.choice(scenario.requests) for _ in range(3)]
    one = max(drawn, key=lambda r: (not r.cancels, r.sampling.max_tokens))
    aim, after = rng.choice((*PHASES, "writing")), rng.choice((0.0, rng.uniform(0.0, 0.5)))
    return msgspec.structs.replace(fault, at=one.at, aim=aim, request=one.number, after=after)


def with_turns(scenario: Scenario, span: float, kinds: Sequence[FaultKind], share: float) -> Scenario:
    """Returns ``scenario``, in ``share`` of those with faults with two or three routers, of which operators ask for
    roles at once. In half of them nothing else goes wrong; in some, one of these routers dies or loses Redis while
    it has its turn.
    """
    rng = random.Random(f"turns {scenario.seed}")
    asked: list[FaultKind] = [kind for kind in ("role", "role", "ratio") if kind in kinds]
    floats = any(kind.dtype for kind in scenario.page_kinds)
    if rng.random() >= share or not asked or not scenario.faults or scenario.placed or floats:
        return scenario
    routers = rng.choice((2, 2, 3))
    workers = [f"prefill-{i}" for i in range(scenario.prefill)] + [f"decode-{i}" for i in range(scenario.decode)]
    calm = rng.random() < 0.5
    faults = [] if calm else list(scenario.faults)
    for _ in range(rng.choice((1, 1, 2))):
        at = rng.uniform(0.0, span)
        for _ in range(rng.choice((2, 2, 3))):
            turn = Fault(rng.choice(asked), at + rng.uniform(0.0, rng.choice((0.01, 0.5))), rng.choice(workers))
            turn = msgspec.structs.replace(turn, seconds=rng.uniform(0.0, 2.0), asks=rng.randrange(routers))
            faults.append(turn)
        faults += _in_a_turn(rng, faults[-1], kinds)
    faults.sort(key=lambda fault: fault.at)
    requests = tuple(
        r if r.session else msgspec.structs.replace(r, router=rng.randrange(routers)) for r in scenario.requests
    )
    without = {"controller": False} if calm else {}
    return msgspec.structs.replace(scenario, routers=routers, faults=tuple(faults), requests=requests, **without)


def _in_a_turn(rng: random.Random, turn: Fault, kinds: Sequence[FaultKind]) -> list[Fault]:
    """Draws what goes wrong while a router changes roles as in ``turn``; in most cases nothing."""
    at, router = turn.at + rng.uniform(0.0, 1.5), f"router-{turn.asks}"
    drawn = rng.choice(
        (
            Fault("router_dies", at, router, seconds=rng.uniform(0.0, 2.0)),
            Fault("redis_restarts", at, turn.target, seconds=rng.uniform(0.05, 2.0)),
            Fault("redis_stalls", at, turn.target, seconds=rng.uniform(0.05, TURN_S)),
            Fault("cut", at, router, REDIS, seconds=rng.uniform(0.5, 2 * TURN_S)),
        )
    )
    return [drawn] if rng.random() < 0.4 and drawn.kind in kinds else []
