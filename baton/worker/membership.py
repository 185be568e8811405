"""A worker's membership of the cluster: joining, updates of load and cache, leaving. Off without Redis.

Knows nothing of engines or servers.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from functools import partial

from redis.asyncio import Redis
from redis.exceptions import RedisError

from baton.cluster.membership import Membership, connect, end_task
from baton.cluster.roles import RoleWishes
from baton.cluster.roster_news import RosterNews
from baton.engine.backends.ranks.hosts.layout import places_of_ranks
from baton.protos.channel import EngineReady
from baton.protos.nouns import WorkerInfo, of_this_build
from baton.protos.rpc import heed_cancel
from baton.tasks.lasting import lasting
from baton.worker.figures.report import WorkerReport
from baton.worker.peers import Peers
from baton.worker.server import RoleRuntime
from baton.worker.slots import SlotRecord
from baton.worker.spec import WorkerSpec

WITHDRAW_EVERY_S = 0.5  # seconds between two tries to withdraw a wished role


async def start_role(spec: WorkerSpec, record: SlotRecord | None) -> str:
    """Returns the role to start in: the one last wanted for this slot in Redis, else the recorded one, else the
    planned one.
    """
    recorded = record.role if record is not None and record.role else spec.role
    if not spec.member.redis_url:
        return recorded
    redis = connect(spec.member.redis_url)
    try:
        return await RoleWishes(redis, spec.member.namespace).of(spec.slot) or recorded
    except (RedisError, OSError):
        return recorded
    finally:
        await redis.aclose()


def describe(spec: WorkerSpec, ready: EngineReady, incarnation: str) -> WorkerInfo:
    """Returns the worker's description, without its addresses."""
    widths = spec.engine.widths
    info = WorkerInfo(
        worker_id=spec.slot,
        incarnation=incarnation,
        role=spec.role,
        address="",
        model_id=spec.engine.model_id,
        fingerprint=ready.fingerprint,
        layout=ready.layout,
        max_model_len=ready.max_model_len,
        vocab_size=ready.vocab_size,
        eos_token_ids=ready.eos_token_ids,
        pages=ready.pages,
        max_batch=ready.max_batch,
        device=spec.engine.device,
        adapters=ready.adapters,
        widths={field: getattr(widths, field) for field in widths.several},
        rank_hosts=places_of_ranks(widths.count, spec.engine.rank_hosts),
        takes_extents=True,
        bridges_windows=True,
    )
    return of_this_build(info)


async def join(
    spec: WorkerSpec, worker: RoleRuntime, report: WorkerReport, stack: AsyncExitStack, held: tuple[bytes, ...] = ()
) -> Membership | None:
    """Connects to Redis and makes the worker a member until ``stack`` closes; returns None if no Redis is
    configured.

    ``held`` are hashes of blocks that are cached already.
    """
    own = spec.member
    if not own.redis_url:
        return None
    redis = connect(own.redis_url)
    stack.push_async_callback(redis.aclose)
    return await enter(redis, spec, worker, report, stack, held)


async def enter(
    redis: Redis,
    spec: WorkerSpec,
    worker: RoleRuntime,
    report: WorkerReport,
    stack: AsyncExitStack,
    held: tuple[bytes, ...] = (),
) -> Membership:
    """Makes the worker a member in ``redis`` until ``stack`` closes; ``held`` are hashes of blocks that are cached
    already.
    """
    own = spec.member
    clock, wall_clock = worker.environment.clock, worker.environment.wall_clock
    member = Membership(redis, own.namespace, worker.control.info, own.lease_s, own.beat_s, wall_clock)
    member.publish(held, ())
    worker.blocks.announce_to(member.publish)
    announcer = RoleAnnouncer(member, RoleWishes(redis, own.namespace))
    worker.control.announce = announcer.announce
    member.load = report.load()
    member.look = partial(_look, member, worker, report)
    await stack.enter_async_context(member)
    stack.push_async_callback(end_task, lasting(announcer.run, "withdrawn wishes"))
    if spec.role == "prefill":
        peers = Peers(
            member.info,
            RosterNews(redis, own.namespace, clock).refresh,
            worker.transport,
            clock,
            report.transfers.met,
            report.transfers.present,
        )
        stack.push_async_callback(end_task, lasting(peers.run, "peers"))
    return member


class RoleAnnouncer:
    """Tells Redis of a worker's changes of role, by ``member``'s heartbeat and ``wishes``.

    A wish that Redis may hold although the change came to nothing is withdrawn, as soon as Redis answers again: a
    restarted worker would begin in a role that it refused, or that whoever asked for it was told it won't take.
    """

    def __init__(self, member: Membership, wishes: RoleWishes) -> None:
        self._member, self._wishes = member, wishes
        self._turn, self._owes = asyncio.Lock(), asyncio.Event()
        self._owed = "", ""  # slot and role that Redis is yet to be told

    async def announce(self, info: WorkerInfo, role: str, turn: str = "") -> bool:
        """Announces that the worker drains, to come back in ``role``, or that it stays in its own; returns False if
        Redis is away, or ``turn`` over in which a router asked for it ("": in none). What can be taken back comes
        first.
        """
        async with self._turn:
            self._owes.clear()
            self._member.info = info
            sent, told = False, False
            try:
                if await self._member.beat():
                    sent = True
                    told = await self._wishes.want(info.worker_id, role, turn)
            finally:
                if not told and (sent or role == info.role):  # a wish may be there although its answer is missing
                    self._owed = info.worker_id, info.role
                    self._owes.set()
            return told

    async def run(self) -> None:
        """Withdraws what Redis wasn't told, until cancelled."""
        while True:
            await self._owes.wait()
            async with self._turn:
                if self._owes.is_set() and await self._wishes.want(*self._owed):
                    self._owes.clear()
            heed_cancel()
            await asyncio.sleep(WITHDRAW_EVERY_S)


def _look(member: Membership, worker: RoleRuntime, report: WorkerReport) -> None:
    """Takes what a heartbeat is to say, and shows what belongs to it."""
    member.info, member.load = worker.control.info, report.load()
    report.tiers(worker.blocks.tiers())
    report.metrics.redis_away.set(float(not member.connected))
