"""A worker's membership: joined, fed with load and cache changes, left. Off when there is no Redis.

Knows nothing of engines or servers.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

from baton.cluster.membership import Member, connect
from baton.deploy.worker_report import WorkerReport
from baton.deploy.worker_spec import WorkerSpec


async def join(spec: WorkerSpec, worker: Any, report: WorkerReport, stack: AsyncExitStack) -> Member | None:
    """Become a member until ``stack`` closes; None without a Redis URL."""
    if not spec.redis_url:
        return None
    redis = connect(spec.redis_url)
    stack.push_async_callback(redis.aclose)
    member = Member(redis, spec.namespace, worker.control.info, spec.lease_s, spec.beat_s)
    worker.blocks.announce_to(member.publish)
    member.load = report.load()
    await stack.enter_async_context(member)
    feeding = asyncio.create_task(_feed(member, worker, report, spec.beat_s / 2), name="load")
    stack.callback(feeding.cancel)
    return member


async def _feed(member: Member, worker: Any, report: WorkerReport, every_s: float) -> None:
    while True:
        member.info, member.load = worker.control.info, report.load()
        report.tiers(worker.blocks.tiers())
        await asyncio.sleep(every_s)
