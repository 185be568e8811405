"""A small paced cluster with keys, for the operator's surface and its page: real processes, one for all tests."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from baton.bench.router.cluster import BenchCluster

CLASSES = [
    # So long that a busy machine keeps them: where one can't be kept, requests are turned away.
    {"name": "short", "max_tokens": 256, "slo_ttft_s": 600.0, "slo_tpot_s": 60.0},
    {"name": "long", "max_tokens": 0, "slo_ttft_s": 1e-4},
]


class Watched:
    """The cluster and who may look at it."""

    def __init__(self, cluster: BenchCluster, admin: str, tenant: str) -> None:
        self.cluster, self.url, self.admin, self.tenant = cluster, cluster.url, admin, tenant
        self.http = httpx.Client(base_url=cluster.url, timeout=60, headers=bearer(admin))

    def ask(self, tokens: int = 60, output: int = 6, **more: object) -> httpx.Response:
        prompt = [random.randrange(10, 30000) for _ in range(tokens)]
        body = {"model": self.cluster.model, "prompt": prompt, "max_tokens": output, "ignore_eos": True} | more
        return self.http.post("/v1/completions", json=body)

    def hold(self, worker: str, how: str) -> httpx.Response:
        return self.http.post(f"/v1/workers/{worker}/hold", json={"hold": how})

    def worker(self, worker: str) -> dict:
        return next(w for w in self.snapshot()["workers"] if w["id"] == worker)

    def context_class(self, name: str) -> dict:
        return next(c for c in self.snapshot()["classes"] if c["name"] == name)

    def snapshot(self) -> dict:
        return self.http.get("/v1/cluster").json()

    @contextmanager
    def load(self, per_second: float, tokens: int = 80, output: int = 20) -> Iterator[list[int]]:
        """Requests while the block runs; the statuses of those that ended."""
        stop, statuses = threading.Event(), []

        async def run() -> None:
            async with httpx.AsyncClient(base_url=self.url, timeout=120, headers=bearer(self.admin)) as client:
                asked = set()
                while not stop.is_set():
                    prompt = [random.randrange(10, 30000) for _ in range(tokens)]
                    body = {"model": self.cluster.model, "prompt": prompt, "max_tokens": output, "ignore_eos": True}
                    asked.add(asyncio.create_task(client.post("/v1/completions", json=body)))
                    await asyncio.sleep(1 / per_second)
                statuses.extend([r.status_code for r in await asyncio.gather(*asked)])

        thread = threading.Thread(target=lambda: asyncio.run(run()))
        thread.start()
        try:
            yield statuses
        finally:
            stop.set()
            thread.join()


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def until(holds, seconds: float = 60.0):
    """Waits until ``holds`` returns something true, and returns it."""
    deadline = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < deadline, "it did not come to be"
        time.sleep(0.1)
    return found
