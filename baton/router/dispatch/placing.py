"""Placement of one choice: narrows the cluster's snapshot to usable workers, asks the policy, reserves the place.

Knows nothing of queues, connections or attempts: dispatch waits for a turn and calls what ``attempt`` returned.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

import msgspec

from baton.protos.errors import ContextTooLong, NoWorker, Unavailable, WeightsGone
from baton.router.dispatch.affinity import SessionHomes
from baton.router.dispatch.choice_run import ChoiceRun
from baton.router.dispatch.ticket import NoneAble
from baton.router.dispatch.view import ClusterView, Reservation
from baton.router.policies import ClusterSnapshot, Option, Policy, RoutingRequest, fits
from baton.router.policies.adjustments.adapter_loads import with_adapter_loads
from baton.router.policies.adjustments.prefix_fetch import uncached, with_fetch
from baton.router.policies.adjustments.session_affinity import choose_with_session
from baton.router.request.request import ChoiceSummary, RouterRequest
from baton.router.request.weights import weights_of


class HintSource(Protocol):
    """Knows which workers seem to hold a prompt's blocks; ``router.dispatch.prefix_hints.PrefixHints`` implements
    it.
    """

    def hits(
        self, snapshot: ClusterSnapshot, request: RouterRequest, tokens: tuple[int, ...], summary: ChoiceSummary
    ) -> Awaitable[Mapping[str, int]]:
        """Returns the number of leading blocks held, by worker id.

        The prompt's hash chain may be stored in ``summary``.
        """


NO_SECOND = "no prefill worker is left for the request's second try"
LastWords = Callable[[str, str], str]


class Placer:
    """Asks the policy where a choice can go, and reserves its place there.

    ``worker_wait_s``: seconds for which there may be no decode worker at all. ``is_readable`` tells whether a
    worker that lacks an adapter could load it. ``last_words`` gives, for a role and a model, which worker left last
    and why, or "".
    """

    def __init__(
        self,
        view: ClusterView,
        hints: HintSource,
        policy: Policy,
        clock: Callable[[], float],
        worker_wait_s: float,
        sessions: SessionHomes | None = None,
        is_readable: Callable[[str], bool] = lambda adapter_id: True,
        last_words: LastWords = lambda role, model_id: "",
    ) -> None:
        self._is_readable, self._last_words = is_readable, last_words
        self._view, self._hints, self._policy = view, hints, with_adapter_loads(policy)
        self._sessions = SessionHomes() if sessions is None else sessions
        self._clock, self._worker_wait_s = clock, worker_wait_s

    async def attempt(self, run: ChoiceRun, lease_on: str = "") -> Callable[[], Reservation | None]:
        """Returns a function that tries to place ``run``, to be called at its turn; with ``lease_on``, only a
        prefill worker is sought for that decode worker.

        The function returns None if no worker has room now, and raises NoneAble, NoWorker, WeightsGone and
        ContextTooLong.
        """
        snapshot = self._kin(run)
        hits = await self._hints.hits(snapshot, run.request, run.progress.tokens, run.summary)
        routing = _routing_request(run, hits)
        return lambda: self._choose(run, routing, lease_on)

    async def pause(self, run: ChoiceRun, lease_on: str = "") -> None:
        """Waits before a worker that just failed ``run`` is asked again: 0.1 s, then twice as long each time,
        at most 1 s. It ends at once when somebody else could take the choice (with ``lease_on``: could prefill for
        that decode worker).
        """
        until = self._clock() + run.retries.take_pause()
        while (left := until - self._clock()) > 0 and not self._unfailed(run, lease_on):
            await self._view.next_change(left)

    def _unfailed(self, run: ChoiceRun, lease_on: str) -> bool:
        """Returns whether there is a way on which no worker failed the choice. A prefill worker's room doesn't
        matter: it is waited for in the queue.
        """
        snapshot, avoids = self._kin(run), run.retries.avoids
        if lease_on:
            to = [d for d in snapshot.decode if d.id == lease_on]
            if not to:
                return True  # the queue's turn tells what that means
        else:
            to = [d for d in snapshot.decode if not avoids(d.info) and not d.full]
        for d in to:
            able = [p.info for p in snapshot.prefill if fits(p, d, _tokens(run))]
            if not able or not all(map(avoids, able)):
                return True
        return False

    def elsewhere(self, run: ChoiceRun, taken: Option) -> bool:
        """Returns whether the choice had better leave ``taken``'s decode worker, to which its prefill worker can't
        ship: no other prefill worker could take over, and another decode worker has room.
        """
        if self.others(run, taken):
            return False
        free = [d for d in self._kin(run).decode if not d.full and not run.retries.avoids(d.info)]
        return any(d.id != taken.decode for d in free)

    def others(self, run: ChoiceRun, taken: Option) -> bool:
        """Returns whether another prefill worker than ``taken``'s could prefill the choice for the same decode
        worker.
        """
        snapshot = self._kin(run)
        idle = [
            p for p in snapshot.prefill if p.id != taken.prefill and not run.retries.avoids(p.info) and not p.full
        ]
        return any(fits(p, d, _tokens(run)) for d in snapshot.decode if d.id == taken.decode for p in idle)

    def _choose(self, run: ChoiceRun, routing: RoutingRequest, lease_on: str) -> Reservation | None:
        snapshot = self._narrow(run, self._kin(run), lease_on)
        if not snapshot.decode:
            self._bear_absence(run)
            raise NoneAble
        run.retries.present()
        self._require_pages(snapshot, routing, len(run.stream.emitted))
        if run.retries.any_avoided:
            failed = frozenset(k.id for k in (*snapshot.prefill, *snapshot.decode) if run.retries.avoids(k.info))
            routing = msgspec.structs.replace(routing, avoid=failed)
        decision = choose_with_session(self._policy, snapshot, self._with_session(run, snapshot, routing))
        if decision is None:
            return None
        if lease_on and decision.taken.way != "prefill":
            raise NoWorker(NO_SECOND)
        decision = with_fetch(snapshot, routing, decision)
        writer = next(d for d in snapshot.decode if d.id == decision.taken.decode)
        share = None if lease_on else run.request.pin.hold(weights_of(writer.info))  # the lease's placement has one
        return self._view.reserve(decision, uncached(routing, decision.taken), seated=not lease_on, share=share)

    def _kin(self, run: ChoiceRun) -> ClusterSnapshot:
        """The cluster without decode workers of other weights than the call's; prefill workers have to fit one."""
        snapshot, pin = self._view.snapshot(run.request.model_id, run.request.context.adapter_id), run.request.pin
        if all(pin.allows(d.info) for d in snapshot.decode):
            return snapshot
        return msgspec.structs.replace(snapshot, decode=tuple(d for d in snapshot.decode if pin.allows(d.info)))

    def _with_session(self, run: ChoiceRun, snapshot: ClusterSnapshot, routing: RoutingRequest) -> RoutingRequest:
        """``routing`` with the worker that should have this turn, by what is known at this moment."""
        if not run.request.context.session:
            return routing
        home = self._sessions.home(run.request, [d.id for d in snapshot.decode])
        return msgspec.structs.replace(routing, session_worker=home)

    def _narrow(self, run: ChoiceRun, snapshot: ClusterSnapshot, lease_on: str) -> ClusterSnapshot:
        """A leased request stays on its decode worker; a further choice follows the first one's blocks."""
        replace = msgspec.structs.replace
        if lease_on:
            held = tuple(replace(d, sequences=0, full=False) for d in snapshot.decode if d.id == lease_on)
            if held and not any(fits(p, held[0], _tokens(run)) for p in snapshot.prefill):
                raise NoWorker(NO_SECOND)
            return replace(snapshot, decode=held, local_max_tokens=-1)
        if run.choice > 0:
            home = tuple(d for d in snapshot.decode if d.id == run.home.result() and not run.retries.avoids(d.info))
            return replace(snapshot, decode=home, prefill=()) if home else snapshot
        return snapshot

    def _require_pages(self, snapshot: ClusterSnapshot, routing: RoutingRequest, emitted: int) -> None:
        most = max([self._view.prompt_room(d.info) for d in snapshot.decode])
        if routing.tokens <= most:
            return
        prompt = routing.tokens - emitted
        said, remedy, field = f"the prompt has {prompt} tokens", f"shorten it by at least {prompt - most}", "prompt"
        if emitted:
            said = f"the prompt's {prompt} tokens and the answer's first {emitted} are too many"
            remedy, field = "lower max_tokens", "max_tokens"
        text = f"{said}: the largest pool of KV pages holds {most} tokens; {remedy}, or raise worker.pages"
        raise ContextTooLong(text, field)

    def _bear_absence(self, run: ChoiceRun) -> None:
        if run.retries.absent_for(self._clock()) > self._worker_wait_s:
            raise self._absence(run)

    def _absence(self, run: ChoiceRun) -> Unavailable:
        """Returns the error that says what is missing: any decode worker, or one of the weights that the answer
        began on.
        """
        request, pin = run.request, run.request.pin
        if pin.fixed and self._view.snapshot(request.model_id, request.context.adapter_id).decode:
            return WeightsGone(
                f"the answer began on weights {pin.weights}, which no decode worker of {request.model_id!r} runs "
                "any more; send the request again, and it is answered from its beginning by those that are served",
                retry_after_s=1.0,
            )
        adapter = request.context.adapter_id
        if adapter and not self._is_readable(adapter):
            text = f"adapter {adapter} was unloaded or replaced, and no worker that is left holds it"
            return WeightsGone(f"{text}; send the request again", retry_after_s=1.0)
        able = f" that has adapter {adapter} or could load it" if adapter else ""
        message = f"no decode worker of {request.model_id!r}{able} can be reached"
        gone = self._last_words("decode", request.model_id)
        return NoWorker(f"{message}; {gone + '; ' if gone else ''}is one starting?", retry_after_s=1.0)


def _tokens(run: ChoiceRun) -> int:
    """Returns the number of tokens that the choice's next attempt reads: the prompt's, and those emitted so far."""
    return len(run.request.token_ids) + len(run.stream.emitted)


def _routing_request(run: ChoiceRun, hits: Mapping[str, int]) -> RoutingRequest:
    """Returns the request as a policy sees it: what is left to read and to write, and of its SLOs."""
    request, emitted = run.request, len(run.stream.emitted)
    return RoutingRequest(
        _tokens(run),
        max(1, request.sampling.max_tokens - emitted),
        hits,
        slo_ttft_s=run.progress.ttft_left(),
        slo_tpot_s=request.context.slo_tpot_s,
    )
