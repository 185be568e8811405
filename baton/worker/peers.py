"""Measures a prefill worker's transports to the decode workers in advance of requests.

Knows nothing of handoffs or of how a transport is chosen. Membership is a hint: a decode worker that isn't listed
is measured by the first handoff to it. One at a time, so that a cluster that starts doesn't measure its own
preflights.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Protocol

from baton.protos.errors import BatonError
from baton.protos.nouns import WorkerInfo
from baton.protos.rpc import heed_cancel
from baton.tasks.lasting import count_failure

log = logging.getLogger("baton.kv")

LOOK_S = 2.0  # seconds between two looks at who is a member: a first handoff rarely comes sooner
AGAIN_S = 60.0  # seconds until a way that failed is measured again; the first handoff to it tries anyway

ReadRoster = Callable[[], Awaitable[Mapping[str, WorkerInfo]]]
Met = Callable[[str, str, BatonError | None], None]  # told of each attempt: worker id, incarnation, what failed


class PeerProber(Protocol):
    """Measures the transports to a worker."""

    async def meet(self, address: str, incarnation: str) -> None:
        """Measures the transports to ``incarnation`` at ``address`` if that is due. Raises BatonError."""


class Peers:
    """Measures the transports from prefill worker ``ours`` to the decode workers that are members; ``met`` is told
    how each attempt ended, ``present`` the ids of those that are members at each look.
    """

    def __init__(
        self,
        ours: WorkerInfo,
        roster: ReadRoster,
        prober: PeerProber,
        clock: Callable[[], float],
        met: Met = lambda worker_id, incarnation, error: None,
        present: Callable[[Collection[str]], None] = lambda ids: None,
    ) -> None:
        self._ours, self._roster, self._prober, self._clock, self._met = ours, roster, prober, clock, met
        self._present = present
        self._not_before: dict[tuple[str, str], float] = {}

    async def run(self) -> None:
        """Calls ``meet_all`` every LOOK_S seconds until cancelled."""
        while True:
            try:
                await self.meet_all()
            except Exception:  # requests measure for themselves
                log.exception("the decode workers could not be looked at")
                count_failure("peers")
            heed_cancel()
            await asyncio.sleep(LOOK_S)

    async def meet_all(self) -> None:
        """Measures the transports to each ready decode worker of the same weights that is a member now."""
        members = tuple((await self._roster()).values())
        self._present({info.worker_id for info in members if info.role == "decode"})
        for info in members:
            await self._meet(info)

    async def _meet(self, info: WorkerInfo) -> None:
        key, now = (info.address, info.incarnation), self._clock()
        if not self._may_send_to(info) or self._not_before.get(key, now) > now:
            return
        try:
            await self._prober.meet(*key)
        except BatonError as error:
            self._met(info.worker_id, info.incarnation, error)
            log.info("the way to %s is not known yet: %s", info.worker_id, error.message)
            self._not_before = {k: at for k, at in self._not_before.items() if at > now} | {key: now + AGAIN_S}
        else:
            self._met(info.worker_id, info.incarnation, None)

    def _may_send_to(self, info: WorkerInfo) -> bool:
        same = (info.model_id, info.fingerprint) == (self._ours.model_id, self._ours.fingerprint)
        return info.role == "decode" and info.state == "ready" and same
