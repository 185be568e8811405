"""Adapters loaded, unloaded and replaced under load while workers are killed: every answer equals its oracle.

Workers speak gRPC, hold few adapters, and answer by the content that they loaded. A seed draws what is done in
which order; ``BATON_SOAK_STORMS`` seeds run as a soak. A request may fail where its content is gone for good: it
was replaced, and the workers that held it died.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter

import msgspec
import pytest

from baton.cluster.adapters import AdapterEntry
from baton.protos.errors import AdapterTaken, AdapterUnknown, NoWorker, WeightsGone
from baton.router.adapters import registry
from baton.router.dispatch.adapters import keeper as adapter_keeper
from tests.router.fake_services import answer_of
from tests.router.fake_workers import PATIENT, Cluster, cluster, collect, until
from tests.thorough import first_now

NAMES = ("sql", "style", "code", "law")
REQUESTS, ACTS, KILLS = 40, 14, 2
SOAK = int(os.environ.get("BATON_SOAK_STORMS", "100"))
SETTINGS = msgspec.structs.replace(PATIENT, max_attempts=6, full_wait_s=0.02)


class Storm:
    """Runs one seed; ``told`` counts the outcomes of requests and acts.

    Operator, killer and requests draw from generators of their own, so that how long each takes changes no draw.
    """

    def __init__(self, c: Cluster, seed: int) -> None:
        self.c, self.told = c, Counter[str]()
        self.rng, self.killer, self.asking = (random.Random(f"{who} {seed}") for who in ("acts", "kills", "asks"))
        self.wrong: list[str] = []
        self.versions: Counter[str] = Counter()

    def write(self, name: str) -> str:
        """Writes a fresh content of ``name`` to every worker's disk, mostly to a new folder; returns its path."""
        self.versions[name] += self.rng.random() < 0.7 or not self.versions[name]
        path, digest = f"{name}/{self.versions[name]}", f"{self.rng.randrange(1 << 64):016x}"
        for worker in (*self.c.p, *self.c.d):
            worker.files[path] = digest
        return path

    def is_gone(self, adapter: str) -> bool:
        """Returns whether no worker could read that content any more."""
        entry = self.c.core.adapters.registry.of_id(adapter)
        return entry is None or self.c.d[0].files[entry.path] != entry.digest

    async def run(self) -> None:
        await self.act("load")
        async with asyncio.TaskGroup() as scope:
            for at in range(REQUESTS):
                scope.create_task(self.request(at, self.asking.random() * 0.4))
            scope.create_task(self.operate())
            scope.create_task(self.kill())

    async def operate(self) -> None:
        for _ in range(ACTS):
            await asyncio.sleep(self.rng.random() * 0.05)
            await self.act(self.rng.choice(("load", "load", "replace", "replace", "unload")))

    async def act(self, what: str) -> None:
        name, control = self.rng.choice(NAMES), self.c.core.adapters
        try:
            if what == "unload":
                await control.remove(name)
            else:
                fresh = what == "replace" or not self.versions[name]
                path = self.write(name) if fresh else f"{name}/{self.versions[name]}"
                entry = AdapterEntry(name, "m", path, pinned=self.rng.random() < 0.2)
                await control.add(entry, what == "replace")
            self.told[what] += 1
        except (AdapterTaken, AdapterUnknown, NoWorker) as error:
            self.told[error.label] += 1

    async def kill(self) -> None:
        for _ in range(KILLS):
            await asyncio.sleep(self.killer.uniform(0.05, 0.2))
            worker = self.killer.choice((*self.c.p, *self.c.d))
            await worker.die()
            self.told["kill"] += 1
            await asyncio.sleep(self.killer.uniform(0.0, 0.1))
            worker.adapters.clear()
            number = int(worker.info.incarnation.rpartition("-")[2]) + 1
            name = f"{worker.info.worker_id}-{number}"
            worker.info = msgspec.structs.replace(worker.info, incarnation=name, adapters=())
            await worker.start()
            for p in self.c.p:
                p.decodes = {d.info.address: d for d in self.c.d}
            self.c.roster.join(worker)

    async def request(self, at: int, after_s: float) -> None:
        await asyncio.sleep(after_s)
        served = [entry.adapter_id for entry in self.c.core.adapters.registry.served().values()]
        adapter = self.asking.choice(["", *served])
        prompt = [self.asking.randrange(1000) for _ in range(self.asking.choice((3, 40, 90)))]
        [stream] = self.c.open(prompt, 12, adapter_id=adapter, request_id=f"r{at}")
        try:
            answer = await collect(stream)
        except (WeightsGone, NoWorker) as error:
            answer = stream.emitted
            self.told[error.label] += 1
            if not self.is_gone(adapter):
                self.wrong.append(f"{adapter} could be read: {error}")
        else:
            self.told["answered"] += 1
        right = answer_of(prompt, 12, adapter=adapter)
        if answer != right[: len(answer)]:
            self.wrong.append(f"{adapter}: {answer} instead of {right}")


async def storm(seed: int) -> Counter[str]:
    def prepare(c: Cluster) -> None:
        for worker in (*c.p, *c.d):
            worker.most_adapters, worker.pace_s = 3, 0.004

    async with cluster(2, 3, policy="cost", settings=SETTINGS, prepare=prepare) as c:
        one = Storm(c, seed)
        await one.run()
        await until(lambda: not c.core.adapters.registry.retired(), what=lambda: "retired contents stay")
        await c.idle()
    assert not one.wrong
    assert one.told["answered"] + one.told["weights_gone"] + one.told["no_worker"] >= REQUESTS
    return one.told


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(registry, "RETIRED_S", 0.05)
    monkeypatch.setattr(adapter_keeper, "LOOK_S", 0.01)


@pytest.mark.parametrize("seed", first_now(range(3)))
async def test_every_answer_equals_its_oracle_while_adapters_come_and_go_and_workers_die(seed):
    told = await storm(seed)
    assert told["answered"] > REQUESTS // 2
    assert told["replace"]
    assert told["kill"] == KILLS


@pytest.mark.soak
@pytest.mark.timeout(3600)
async def test_many_storms_give_no_wrong_answer():
    told = Counter[str]()
    for seed in range(100, 100 + SOAK):
        told += await storm(seed)
    print(f"{SOAK} seeds: {dict(told)}", flush=True)
