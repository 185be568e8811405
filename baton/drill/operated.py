"""Makes a drawn scenario one in which somebody keeps prefixes, cancels batch jobs, needs API keys, adds and
removes workers, or asks them for roles that they can't begin.

Knows nothing of what is usual. Each draws from randomness of its own, so that the rest of a scenario stays.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

from baton.drill.scenario import Batch, ClientKey, PrefixPin, Request, ScaleChange, Scenario
from baton.drill.specials import tokens_of

MOST_PINNED = 300  # tokens of a prefix


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
