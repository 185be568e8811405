"""Role changes of running workers, one by one or to a ratio, as an operator or the controller wants.

Knows nothing of why, of REST or of Redis. A worker changes itself (worker/host.py); this module asks it to and
waits: a change is over when this router has a link to the worker in its new role.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from math import gcd
from typing import Protocol

import msgspec

from baton.protos.errors import (
    BatonError,
    DeadlineExceeded,
    ErrorInfo,
    InvalidRequest,
    NoWorker,
    Unavailable,
    WorkerUnknown,
    from_info,
)
from baton.protos.nouns import WorkerInfo
from baton.router.dispatch.view import ClusterView
from baton.router.workers.link import WorkerLink
from baton.router.workers.link_table import LinkTable

ROLES = ("prefill", "decode")
GRACE_S = 1.0  # seconds that prompts a worker reads may still take, by default
AWAY_S = 30.0  # seconds without any sign of a worker that changes, after which its change is given up
# Seconds that a change may take however much is seen of its worker. It is longer than a worker gives its own engine
# to load a draft model (``worker.host.LOAD_S``), because after that it ends itself.
LONGEST_S = 330.0
SETTLE_S = 1.0  # seconds that a change waits for links to workers that another router has just changed
LOOK_S = 0.05  # seconds between two looks whether a worker serves its new role
ONE_BY_ONE = re.compile(r"(\d{1,4}):(\d{1,4})")


class ExclusiveTurn(Protocol):
    """A router's turn to change roles, whose ``name`` workers ask for before they begin another one."""

    name: str

    def require(self) -> None:
        """Raises Unavailable where another router may have changed roles meanwhile."""


class AnyTime:
    """The turn of a router that has no others beside it."""

    name = ""

    def require(self) -> None:
        """Passes, because nobody else changes roles."""


class RoleChange(msgspec.Struct, frozen=True):
    """Describes one worker's change of role; ``seconds`` is the time from the decision until it could be given work
    in the new role.
    """

    worker: str
    before: str
    after: str
    seconds: float
    incarnation: str = ""


class PendingChange(msgspec.Struct, frozen=True):
    """Describes a change of role that isn't over: how many ``seconds`` it has taken, and what it waits for."""

    worker: str
    before: str
    after: str
    seconds: float
    waits_for: str


class RoleControl:
    """Changes workers' roles while they run; ``look`` reads the cluster's membership at once.

    ``alone`` keeps other routers from changing roles while it is entered; None: there are no others.
    """

    def __init__(
        self,
        links: LinkTable,
        view: ClusterView,
        clock: Callable[[], float],
        look: Callable[[], Awaitable[object]],
        alone: Callable[[], AbstractAsyncContextManager[ExclusiveTurn]] | None = None,
    ) -> None:
        self._links, self._view, self._clock, self._look = links, view, clock, look
        self._turn, self._alone = asyncio.Lock(), alone
        self._changing: dict[str, tuple[str, str, float]] = {}  # by worker: its role, the next one, since when

    def workers(self) -> tuple[WorkerInfo, ...]:
        """Returns the workers that can be reached, sorted by id."""
        return tuple(sorted((k.info for k in self._links if k.up), key=lambda info: info.worker_id))

    def ratio(self) -> tuple[int, int]:
        """Returns the numbers of (prefill, decode) workers that can be reached."""
        return self._view.reachable("prefill"), self._view.reachable("decode")

    def usable(self) -> tuple[int, int]:
        """Returns the numbers of (prefill, decode) workers that can be given work: reachable and in state
        "ready".
        """
        roles = [info.role for info in self.workers() if info.state == "ready"]
        return roles.count("prefill"), roles.count("decode")

    def changing(self) -> list[PendingChange]:
        """Returns the changes that this router waits for, by worker."""
        now, here = self._clock(), {info.worker_id for info in self.workers()}
        return [
            PendingChange(worker, before, after, now - since, self._waits_for(worker, worker in here))
            for worker, (before, after, since) in sorted(self._changing.items())
        ]

    def _waits_for(self, worker_id: str, is_here: bool) -> str:
        if not is_here:
            return "the worker can't be reached: it begins its new role, or was ended and starts again"
        _, running = self._view.busy(worker_id)
        if running:
            return f"{running} of its requests are still to end or to go elsewhere"
        return "its engine takes the role; where it speculates it may load a draft model"

    async def set_role(
        self, worker_id: str, role: str, grace_s: float = GRACE_S, force: bool = False
    ) -> RoleChange:
        """Changes one worker's role and waits until it serves in it. Raises as ``move``."""
        return (await self.move([worker_id], role, grace_s, force))[0]

    async def move(
        self,
        worker_ids: Sequence[str],
        role: str,
        grace_s: float = GRACE_S,
        force: bool = False,
        counted: tuple[int, int] | None = None,
        wanted: Callable[[], Awaitable[None]] | None = None,
    ) -> list[RoleChange]:
        """Changes several workers' roles at once and waits until all serve in it; running prefills get ``grace_s``
        seconds. ``wanted`` raises what keeps the change from being made, once no other router changes roles.

        Raises WorkerUnknown, NoWorker, DeadlineExceeded, the error of a worker that can't begin the role,
        InvalidRequest (unless ``force``, each role that workers leave must keep a ready worker of the same model),
        and Unavailable, also if the usable (prefill, decode) workers aren't as many as the caller ``counted``, or
        this router stood still, so that another may have changed roles since.
        """
        if role not in ROLES:
            raise InvalidRequest(f"role {role!r}: a worker is one of {', '.join(ROLES)}", "role")
        async with self._turn, self._undisturbed() as turn:
            if counted is not None and self.usable() != counted:
                raise Unavailable("workers' roles have changed since they were counted", retry_after_s=1.0)
            if wanted is not None:
                await wanted()
            return await self._move(worker_ids, role, grace_s, force, turn)

    async def _move(
        self, worker_ids: Sequence[str], role: str, grace_s: float, force: bool, turn: ExclusiveTurn
    ) -> list[RoleChange]:
        links = [self._link(name) for name in worker_ids]
        if not force:
            self._require_others([link.info for link in links if link.info.role != role])
        changes = (self._set_role(link, role, grace_s, turn) for link in links)
        ended = await asyncio.gather(*changes, return_exceptions=True)  # none goes on behind our back
        for failure in ended:
            if isinstance(failure, BaseException):
                raise failure
        return [change for change in ended if isinstance(change, RoleChange)]

    async def set_ratio(
        self, prefill: int, decode: int, grace_s: float = GRACE_S, force: bool = False
    ) -> list[RoleChange]:
        """Changes roles until there are ``prefill`` and ``decode`` workers, and returns the changes.

        Raises InvalidRequest naming the ratios that could be formed, and as ``move``.
        """
        async with self._turn, self._undisturbed() as turn:  # counts when nobody else changes any
            now = self.ratio()
            if prefill + decode != sum(now) or decode < 1 or prefill < 0:
                raise cannot_form(f"{prefill}:{decode}", sum(now))
            role, count = ("decode", now[0] - prefill) if prefill < now[0] else ("prefill", prefill - now[0])
            leaving = self.least_busy(role, count)
            if len(leaving) < count:
                text = f"only {len(leaving)} of the {count} workers to change are ready now"
                raise NoWorker(text, retry_after_s=2.0)
            return await self._move(leaving, role, grace_s, force, turn)

    def least_busy(self, become: str, count: int) -> list[str]:
        """Returns the ids of up to ``count`` ready workers to change to role ``become``, the least loaded first and
        one of each model last.
        """
        leaving = "prefill" if become == "decode" else "decode"
        able = [info for info in self.workers() if info.role == leaving and info.state == "ready"]
        able.sort(key=lambda info: (self._view.busy(info.worker_id), info.worker_id))
        last_of_model = {info.model_id: info.worker_id for info in able}
        able.sort(key=lambda info: info.worker_id == last_of_model[info.model_id])
        return [info.worker_id for info in able[:count]]

    @asynccontextmanager
    async def _undisturbed(self) -> AsyncIterator[ExclusiveTurn]:
        """Keeps other routers from changing roles while entered: each could count on the other's worker to stay."""
        async with self._alone() if self._alone is not None else nullcontext(AnyTime()) as turn:
            if self._alone is not None:
                await self._look_until_connected()
            yield turn

    async def _look_until_connected(self) -> None:
        """Takes what the router before has changed. Workers in a new role are connected to within milliseconds, and
        would count as gone until then; one that is gone is waited for SETTLE_S in vain.
        """
        until = self._clock() + SETTLE_S
        await self._look()
        while self._clock() < until and not all(link.up for link in self._links):
            await asyncio.sleep(LOOK_S)
            await self._look()

    # ---- one change ----------------------------------------------------------------------------------

    async def _set_role(self, link: WorkerLink, role: str, grace_s: float, turn: ExclusiveTurn) -> RoleChange:
        since, worker_id, before = self._clock(), link.info.worker_id, link.info.role
        if role == before:
            return RoleChange(worker_id, before, role, 0.0, link.info.incarnation)
        former = link.info.incarnation
        turn.require()  # what was counted may be long ago, if this process stood still
        self._changing[worker_id] = before, role, since
        try:
            asked = await link.set_role(role, grace_s, turn.name)
            incarnation = await self._until_served(worker_id, role, (former, asked), since + grace_s)
        finally:
            self._changing.pop(worker_id, None)
        return RoleChange(worker_id, before, role, self._clock() - since, incarnation)

    def _link(self, worker_id: str) -> WorkerLink:
        found = next((k for k in self._links if k.info.worker_id == worker_id), None)
        if found is None:
            names = ", ".join(info.worker_id for info in self.workers()) or "none"
            raise WorkerUnknown(f"no worker {worker_id!r} here; there is {names}", "worker")
        if not found.up:
            raise NoWorker(f"{worker_id} can't be reached now", retry_after_s=1.0)
        return found

    def _require_others(self, leaving: Sequence[WorkerInfo]) -> None:
        """Raises InvalidRequest where a model would keep no ready worker of the role that ``leaving`` give up."""
        names = {info.worker_id for info in leaving}
        for one in leaving:
            of_model = [i for i in self.workers() if i.model_id == one.model_id and i.state == "ready"]
            staying = [i for i in of_model if i.worker_id not in names]
            if not any(i.role == one.role for i in staying):
                raise _would_leave_none(one, len(staying) + sum(i.model_id == one.model_id for i in leaving))

    async def _until_served(self, worker_id: str, role: str, lives: tuple[str, str], seen: float) -> str:
        """Waits until the worker serves ``role``, and returns the incarnation in which it does.

        ``lives`` are the incarnation that it left and the one that it said it would have. It has another one where
        it was ended on its way and started again, which is as good, and where it couldn't begin the role. Whether
        an operator holds it or drains it makes no difference. It is waited for as long as it is a member in the
        life that it leaves, because it ends itself where its engine doesn't get to the next one; and AWAY_S from
        when it was last ``seen`` so.
        """
        most = seen + LONGEST_S
        while True:
            await self._look()
            for link in [k for k in self._links if k.info.worker_id == worker_id]:
                info = link.info
                if info.incarnation == lives[0]:
                    seen = max(seen, self._clock())
                if link.up and info.role == role and info.incarnation != lives[0]:
                    return info.incarnation
                if link.up and info.role_error is not None and info.incarnation not in lives:
                    raise _refused(info, info.role_error)
            if self._clock() > min(most, seen + AWAY_S):
                raise DeadlineExceeded(self._given_up(worker_id, role, self._clock() > most))
            await asyncio.sleep(LOOK_S)

    def _given_up(self, worker_id: str, role: str, is_there: bool) -> str:
        text = f"{worker_id} did not become a {role} worker"
        if is_there:
            return f"{text} within {LONGEST_S:g} s, and hasn't left its former role; its log says what it does"
        return f"{text}: it left, and has not come back as one for {AWAY_S:g} s; its log says why. It may yet do so"


def _refused(info: WorkerInfo, why: ErrorInfo) -> BatonError:
    """Returns the error, of the type that the worker named, that it has its former role again, and why."""
    text = f"{info.worker_id} stays a {info.role} worker: {why.message}"
    return from_info(msgspec.structs.replace(why, message=text))


def _would_leave_none(one: WorkerInfo, workers: int) -> InvalidRequest:
    """The error: ``workers`` of the model would be left, none of them in the role of ``one``."""
    left = {role: 0 if role == one.role else workers for role in ROLES}
    then = "no request could be answered"
    if one.role == "prefill":
        then = "decode workers would read every prompt themselves"
    return InvalidRequest(
        f"{one.worker_id} is the last ready {one.role} worker of {one.model_id!r}: prefill={left['prefill']} "
        f"decode={left['decode']} would be left, and {then}. Make another worker a {one.role} worker first, "
        'or force it (--force, or "force": true)',
        "role",
    )


def parse_ratio(text: str, workers: int) -> tuple[int, int]:
    """Parses a ratio such as "3:1" for a cluster of ``workers``; returns the numbers of (prefill, decode) workers.

    The two numbers add up to ``workers`` or to a divisor of it. Raises InvalidRequest.
    """
    match = ONE_BY_ONE.fullmatch(text.strip())
    if match is None:
        raise InvalidRequest(f"ratio {text!r}: write PREFILL:DECODE as in 3:1, or auto", "ratio")
    prefill, decode = int(match[1]), int(match[2])
    parts = prefill + decode
    if decode == 0 or parts == 0 or workers % parts:
        raise cannot_form(text, workers)
    return prefill * workers // parts, decode * workers // parts


def cannot_form(text: str, workers: int) -> InvalidRequest:
    """Returns the InvalidRequest for a ratio that ``workers`` workers can't form; it lists those that they can."""
    formable = ", ".join(_reduced(p, workers - p) for p in range(1, workers))
    return InvalidRequest(
        f"{workers} workers can't form {text}; they can form {formable or 'nothing'} (prefill:decode)", "ratio"
    )


def _reduced(prefill: int, decode: int) -> str:
    by = gcd(prefill, decode)
    return f"{prefill // by}:{decode // by}"
