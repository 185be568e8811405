"""Where one choice can go now: the snapshot narrowed to what it may use, the policy asked, the place reserved.

Knows nothing of queues, connections or attempts: ``dispatch`` waits for a turn and calls what ``attempt`` gave it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

import msgspec

from baton.protos.errors import ContextTooLong, NoWorker
from baton.router.choice import ChoiceRun
from baton.router.policies import Ask, ClusterSnapshot, Policy, fits
from baton.router.policies._fetch import uncached, with_fetch
from baton.router.policies._session import choose_with_session
from baton.router.request import RouterRequest, Summary
from baton.router.sessions import Sessions
from baton.router.view import ClusterView, Reservation


class Hints(Protocol):
    """Who seems to hold how much of a prompt; router.hints.PrefixHints is the real one."""

    def hits(
        self, snapshot: ClusterSnapshot, request: RouterRequest, tokens: tuple[int, ...], summary: Summary
    ) -> Awaitable[Mapping[str, int]]:
        """worker id -> leading blocks. What others want of the prompt's blocks is left in ``summary``."""


class Placer:
    """Asks the policy. ``worker_wait_s``: how long nobody at all may be there."""

    def __init__(
        self,
        view: ClusterView,
        hints: Hints,
        policy: Policy,
        clock: Callable[[], float],
        worker_wait_s: float,
        sessions: Sessions | None = None,
    ) -> None:
        self._view, self._hints, self._policy = view, hints, policy
        self._sessions = sessions or Sessions()
        self._clock, self._worker_wait_s = clock, worker_wait_s

    async def attempt(self, run: ChoiceRun, lease_on: str = "") -> Callable[[], Reservation | None]:
        """One try to place ``run``, to be made at its turn; it keeps its decode worker ``lease_on`` if it has one.

        The try gives None when nobody has room now, and raises NoWorker and ContextTooLong.
        """
        snapshot = self._view.snapshot(run.request.model_id, run.request.adapter_id)
        ask = run.ask(await self._hints.hits(snapshot, run.request, run.tokens, run.summary))
        return lambda: self._choose(run, ask, lease_on)

    def others(self, run: ChoiceRun, prefill_id: str) -> bool:
        """Whether another prefill worker could read it."""
        snapshot = self._view.snapshot(run.request.model_id, run.request.adapter_id)
        return any(p.id != prefill_id and p.id not in run.avoid and not p.full for p in snapshot.prefill)

    def _choose(self, run: ChoiceRun, ask: Ask, lease_on: str) -> Reservation | None:
        snapshot = self._narrow(run, self._view.snapshot(run.request.model_id, run.request.adapter_id), lease_on)
        if not snapshot.decode:
            self._bear_absence(run)
            return None
        run.nobody_since = None
        _require_pages(snapshot, ask)
        decision = choose_with_session(self._policy, snapshot, self._with_session(run, snapshot, ask))
        if decision is None:
            return None
        decision = with_fetch(snapshot, ask, decision)
        return self._view.reserve(decision, uncached(ask, decision.taken), seated=not lease_on)

    def _with_session(self, run: ChoiceRun, snapshot: ClusterSnapshot, ask: Ask) -> Ask:
        """``ask`` with the worker that should have this turn, by what is known at this moment."""
        if not run.request.session:
            return ask
        home = self._sessions.home(run.request, [d.id for d in snapshot.decode])
        return msgspec.structs.replace(ask, session_worker=home)

    def _narrow(self, run: ChoiceRun, snapshot: ClusterSnapshot, lease_on: str) -> ClusterSnapshot:
        """A leased request stays on its decode worker; a further choice follows the first one's blocks."""
        replace = msgspec.structs.replace
        if lease_on:
            held = tuple(replace(d, sequences=0, full=False) for d in snapshot.decode if d.id == lease_on)
            if held and not any(fits(p, held[0]) for p in snapshot.prefill):
                raise NoWorker("no prefill worker is left for the request's second try")
            return replace(snapshot, decode=held, local_max_tokens=-1)
        if run.choice > 0:
            home = tuple(d for d in snapshot.decode if d.id == run.home.result() and d.id not in run.avoid)
            return replace(snapshot, decode=home, prefill=()) if home else snapshot
        return snapshot

    def _bear_absence(self, run: ChoiceRun) -> None:
        now = self._clock()
        if run.nobody_since is None:
            run.nobody_since = now
        if now - run.nobody_since > self._worker_wait_s:
            raise NoWorker(
                f"no decode worker of {run.request.model_id!r} can be reached; is one starting?", retry_after_s=1.0
            )


def _require_pages(snapshot: ClusterSnapshot, ask: Ask) -> None:
    most = max(d.info.pages for d in snapshot.decode)
    if ask.blocks > most:
        raise ContextTooLong(
            f"{ask.tokens} tokens need {ask.blocks} KV pages; the largest pool has {most}: shorten the prompt",
            "prompt",
        )
