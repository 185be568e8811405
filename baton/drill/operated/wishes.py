"""Makes a drawn scenario one in which somebody keeps prefixes, cancels batch jobs, needs API keys, or adds, removes
and drains workers.

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
STAYS_S = (0.5, 3.0)  # seconds for which a worker that was drained is left alone


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
    changing = "role" in kinds and scenario.may_change_roles
    if changing:  # the last worker of a role keeps it
        scenario = msgspec.structs.replace(scenario, **{role: max(2, getattr(scenario, role))})
    rolled = [f"{role}-{i}" for i in range(scenario.prefill if role == "prefill" else scenario.decode)]
    slots = rolled if rng.random() < 0.5 else [rng.choice(rolled) for _ in range(rng.choice((1, 1, 2, 3)))]
    faults = list(scenario.faults)
    for at, slot in zip(sorted(rng.uniform(0.0, span) for _ in slots), slots, strict=True):
        seconds = rng.choice((0.0, rng.uniform(0.0, 0.5), rng.uniform(0.5, 5.0)))
        drain = Fault("drain", at, slot, seconds=seconds, factor=rng.choice((1.0, 1.0, TWICE, HANGS_UP)))
        faults.append(_while_busy(rng, drain, scenario) if rng.random() < 0.5 else drain)
        if changing:
            nearly = max(0.0, at + rng.uniform(-0.3, 0.3))
            turn = Fault("role", nearly, slot, seconds=rng.uniform(0.0, 1.0), asks=rng.randrange(scenario.routers))
            if rng.random() < 0.4:
                faults[-1:] = _as_it_changes(faults[-1], turn)
    faults.sort(key=lambda fault: fault.at)
    return msgspec.structs.replace(scenario, faults=tuple(faults))


def _as_it_changes(drain: Fault, turn: Fault) -> list[Fault]:
    """Returns ``turn`` and ``drain``, which in most cases comes as its worker begins to change its role, and
    leaves it alone for a while then.
    """
    rng = random.Random(f"as it changes {turn.at}")
    if rng.random() < 0.3:
        return [drain, turn]
    after = rng.choice((0.0, rng.uniform(0.0, 0.1)))
    stays = rng.uniform(*STAYS_S)
    at_once = {"at": turn.at, "target": turn.target, "aim": "changing", "after": after, "stays": stays}
    return [turn, msgspec.structs.replace(drain, **at_once)]


def _while_busy(rng: random.Random, fault: Fault, scenario: Scenario) -> Fault:
    """Returns ``fault`` at the worker that is at a request, one that goes on for long rather than another."""
    drawn = [rng.choice(scenario.requests) for _ in range(3)]
    one = max(drawn, key=lambda r: (not r.cancels, r.sampling.max_tokens))
    aim, after = rng.choice((*PHASES, "writing")), rng.choice((0.0, rng.uniform(0.0, 0.5)))
    return msgspec.structs.replace(fault, at=one.at, aim=aim, request=one.number, after=after)
