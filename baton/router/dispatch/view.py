"""The cluster as this router sees it: which workers can be reached, and what it has placed on them.

Knows nothing of how a way is chosen or of requests' contents. A worker counts while its link is up and it says
"ready"; Redis (the roster) brings new workers and their load; while Redis is silent, known workers stay.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from operator import is_

import msgspec

from baton.kv.layout.room import context_room, prompt_room
from baton.protos.errors import Draining
from baton.protos.measurements import WorkerLoad
from baton.protos.nouns import WorkerInfo
from baton.router.dispatch.revision import ClusterRevision
from baton.router.dispatch.throttle import Throttle
from baton.router.policies import Candidate, ClusterSnapshot, Option, RoutingDecision
from baton.router.request.request import ServedModel
from baton.router.request.weights import PinShare, weights_of
from baton.router.workers.link_table import DecodeLink, LinkTable, WorkerLink
from baton.router.workers.roster import RosterReader
from baton.tasks.lasting import count_failure

log = logging.getLogger("baton.router")

POLL_S = 0.1  # seconds between two looks at the roster and at the queue's deadlines
TIGHT_S = 2.0  # after a refusal a worker is asked one at a time: the queue's order holds, and few ask in vain
REMEMBER_MODEL_S = 300.0  # seconds after a model's last worker in which its name is still known
NO_LOAD = WorkerLoad()
AdapterWait = Callable[[WorkerLink, str], float | None]


def held_alone(link: WorkerLink, adapter_id: str) -> float | None:
    """Returns 0.0 if the worker holds the adapter or none is asked for, else None (adapters aren't loaded on
    demand).
    """
    return 0.0 if not adapter_id or link.holds(adapter_id) else None


class ViewSettings(msgspec.Struct, frozen=True):
    """Limits, in uncached prompt tokens, how much a worker is given ahead of time and how long a prompt a decode
    worker may prefill itself.
    """

    window_tokens: int = 4096
    local_max_tokens: int = 64


class _WorkerCounts:
    """Counts what this router has on one worker."""

    __slots__ = ("full_until", "pending_prompts", "pending_tokens", "sequences", "tight_until", "unanswered")

    def __init__(self) -> None:
        self.sequences = self.unanswered = self.pending_prompts = self.pending_tokens = 0
        self.full_until = self.tight_until = float("-inf")

    @property
    def is_idle(self) -> bool:
        """Returns whether this router has nothing there."""
        return not (self.sequences or self.unanswered or self.pending_prompts or self.pending_tokens)

    def is_full(self, now: float) -> bool:
        """Returns whether the worker refused a request just now; or lately, and has yet to answer the one that
        tries again.
        """
        return self.full_until > now or (self.tight_until > now and self.unanswered > 0)


class Reservation:
    """Holds a request's place on its workers, counted in the view until ``close``.

    ``infos`` are the workers' descriptions when it was placed, by worker id.
    """

    def __init__(
        self,
        view: ClusterView,
        decision: RoutingDecision,
        uncached: int,
        seated: bool,
        share: PinShare | None,
        infos: Mapping[str, WorkerInfo],
    ) -> None:
        self.decision, self.infos = decision, infos
        self.taken: Option = decision.taken
        self._share = share
        self._view, self._uncached = view, uncached
        self._reader: str | None = self.taken.reader
        self._seat: str | None = self.taken.decode if seated else None
        view.count(self._reader, requests=1, tokens=uncached)
        self._unanswered = seated
        if self._seat:
            view.count(self._seat, sequences=1, unanswered=1)

    def answered(self) -> None:
        """Notes that the decode worker granted or refused the lease. Idempotent."""
        if self._unanswered:
            self._unanswered = False
            self._view.count(self.taken.decode, unanswered=-1)
            self._view.changed()

    def mark_prefilled(self) -> None:
        """Notes that the prompt is prefilled, so that its worker has room for the next. Idempotent."""
        if self._reader is not None:
            self._view.count(self._reader, requests=-1, tokens=-self._uncached)
            if self._reader == self.taken.prefill:
                self._view.clear_full(self._reader)
            self._reader = None
            self._view.changed()

    def close(self) -> None:
        """Ends the placement and subtracts its counts. Idempotent."""
        self.mark_prefilled()
        self.answered()
        if self._seat is not None:
            self._view.count(self._seat, sequences=-1)
            self._view.clear_full(self._seat)
            self._seat = None
        if self._share is not None:
            self._share.close()

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ClusterView:
    """Joins the roster, the links and this router's own counts of what it has placed on workers.

    ``revision`` is shared with the links: snapshots are rebuilt when it has advanced. ``adapter_wait`` returns the
    seconds until a worker could have an adapter; None if it can't.
    """

    def __init__(
        self,
        roster: RosterReader,
        links: LinkTable,
        revision: ClusterRevision,
        clock: Callable[[], float],
        settings: ViewSettings = ViewSettings(),
        throttle: Throttle | None = None,
        adapter_wait: AdapterWait = held_alone,
    ) -> None:
        self._revision, self._throttle = revision, throttle or Throttle(clock)
        self._adapter_wait = adapter_wait
        self._roster, self._links, self._clock, self._settings = roster, links, clock, settings
        self._own: dict[str, _WorkerCounts] = {}
        self._rooms: dict[str, tuple[WorkerInfo, int]] = {}
        self._loads: dict[str, WorkerLoad] = {}
        self._models: dict[str, tuple[ServedModel, float]] = {}
        self._served_by: dict[str, tuple[list[WorkerInfo], ServedModel]] = {}  # and by which workers
        self._snapshots: dict[tuple[str, str], ClusterSnapshot] = {}
        self._snapshots_of = revision.number
        self._mixed: set[str] = set()  # models whose workers differ in what only one tokenizer could serve
        self._turn = 0

    async def run(self) -> None:
        """Until cancelled, reads the worker roster every 0.1 s and has the queue drop requests that are overdue."""
        while True:
            try:
                self.refresh()
                self.changed()
            except Exception:  # a router that no longer looks would never hear of a worker that came back
                log.exception("the roster's news could not be taken")
                count_failure("cluster view")
            await asyncio.sleep(POLL_S)

    def refresh(self) -> None:
        """Takes the roster's current workers and loads, and moves requests away from draining decode workers."""
        seen = self._roster.snapshot()
        self._links.sync({worker_id: entry.info for worker_id, entry in seen.items()})
        self._loads = {worker_id: entry.load for worker_id, entry in seen.items()}
        self._empty_the_leaving()
        now = self._clock()
        for model_id in {link.info.model_id: None for link in self._links}:
            self._models[model_id] = (self._served(model_id), now)
        self._models = {k: (m, at) for k, (m, at) in self._models.items() if now - at < REMEMBER_MODEL_S}
        self._served_by = {k: by for k, by in self._served_by.items() if k in self._models}
        linked = {link.info.worker_id for link in self._links}
        self._own = {k: own for k, own in self._own.items() if k in linked or not own.is_idle}
        self._rooms = {k: room for k, room in self._rooms.items() if k in linked}

    def _empty_the_leaving(self) -> None:
        """A decode worker that drains: its requests go on elsewhere, if there is somebody who can take them."""
        for link in self._links:
            if not isinstance(link, DecodeLink) or link.info.state != "draining":
                continue
            if any(k.up and _can_go_on(k.info, link.info) for k in self._links):
                link.move_away(Draining(f"{link.info.worker_id} is draining"))

    def changed(self) -> None:
        """Invalidates the snapshots and tells the queue that room may have appeared."""
        self._revision.advance()

    async def next_change(self, within_s: float) -> None:
        """Waits until workers or their room may have changed, ``within_s`` seconds at most."""
        await self._revision.changed(within_s)

    # ---- what is asked of it -------------------------------------------------------------------------

    def snapshot(self, model_id: str, adapter_id: str = "") -> ClusterSnapshot:
        """Returns the workers that can take a request of the model, and adapter if given, now.

        The same object until something changes.
        """
        if self._snapshots_of != self._revision.number:
            self._snapshots.clear()
            self._snapshots_of = self._revision.number
        known = self._snapshots.get((model_id, adapter_id))
        if known is None:
            known = self._snapshots[model_id, adapter_id] = self._look(model_id, adapter_id)
        return known

    def _look(self, model_id: str, adapter_id: str) -> ClusterSnapshot:
        serving = sorted((k for k in self._links if _serves(k, model_id)), key=lambda link: link.info.worker_id)
        waits = [(k, self._adapter_wait(k, adapter_id)) for k in serving]
        able = [(k.info.role, self._candidate(k, wait)) for k, wait in waits if wait is not None]
        return ClusterSnapshot(
            prefill=tuple(found for role, found in able if role == "prefill"),
            decode=tuple(found for role, found in able if role == "decode"),
            turn=self._turn,
            window_tokens=self._settings.window_tokens,
            local_max_tokens=self._settings.local_max_tokens,
        )

    def prompt_room(self, info: WorkerInfo) -> int:
        """Returns the most tokens of a prompt whose KV fits into the pages of the worker ``info`` describes."""
        known = self._rooms.get(info.worker_id)
        if known is None or known[0] is not info:
            known = self._rooms[info.worker_id] = (info, prompt_room(info.layout, info.pages))
        return known[1]

    def models(self) -> tuple[ServedModel, ...]:
        """Returns the models that are served, or were within REMEMBER_MODEL_S, sorted by id."""
        return tuple(self._models[k][0] for k in sorted(self._models))

    def ready(self, model_id: str = "") -> bool:
        """Returns whether a decode worker of the model, of any for "", can be reached and takes requests."""
        able = (k.info for k in self._links if k.up and k.info.role == "decode" and k.info.state == "ready")
        return any(model_id in ("", info.model_id) for info in able)

    def reachable(self, role: str) -> int:
        """Returns the number of workers of the role whose link is up."""
        return sum(k.up and k.info.role == role for k in self._links)

    def reachable_incarnations(self) -> dict[str, str]:
        """Returns the incarnation of each worker whose link is up, by worker id."""
        return {k.info.worker_id: k.info.incarnation for k in self._links if k.up}

    def reserve(
        self, decision: RoutingDecision, uncached: int, seated: bool = True, share: PinShare | None = None
    ) -> Reservation:
        """Counts a placement and returns its reservation, whose end closes ``share``, the hold on the call's
        weights.

        ``uncached`` is the number of prompt tokens to compute. ``seated`` False: the decode worker's sequence is
        counted already, because this is a second prefill.
        """
        self._turn += 1
        self._snapshots.clear()
        taken = decision.taken
        infos = self._links.infos({taken.prefill, taken.decode} - {""})
        return Reservation(self, decision, uncached, seated, share, infos)

    def full(self, worker_id: str, seconds: float) -> None:
        """Offers a worker no request for ``seconds``, because it refused one for want of room."""
        own, now = self._of(worker_id), self._clock()
        own.full_until, own.tight_until = now + seconds, now + TIGHT_S
        self._snapshots.clear()
        asyncio.get_running_loop().call_later(seconds, self.changed)

    def clear_full(self, worker_id: str) -> None:
        """Offers a worker requests again, because one ended there."""
        self._of(worker_id).full_until = float("-inf")
        self.changed()

    def count(
        self, worker_id: str, sequences: int = 0, requests: int = 0, tokens: int = 0, unanswered: int = 0
    ) -> None:
        """Adds to the counts of a worker; called by Reservation only."""
        own = self._of(worker_id)
        own.sequences += sequences
        own.unanswered += unanswered
        own.pending_prompts += requests
        own.pending_tokens += tokens

    def sequences(self, worker_id: str) -> int:
        """Returns the number of sequences that this router has on a worker."""
        return self._of(worker_id).sequences

    def busy(self, worker_id: str) -> tuple[int, int]:
        """Returns a worker's load over all routers: (prompt tokens waiting there, sequences running or waiting)."""
        load, own = self._loads.get(worker_id, NO_LOAD), self._of(worker_id)
        return max(load.waiting_tokens, own.pending_tokens), max(load.running + load.waiting, own.sequences)

    def local_counts(self) -> dict[str, tuple[int, int, int]]:
        """Returns, by worker id, this router's (sequences, requests not prefilled yet, their prompt tokens to
        compute); all-zero ones are left out.
        """
        counts = {k: (o.sequences, o.pending_prompts, o.pending_tokens) for k, o in self._own.items()}
        return {k: c for k, c in counts.items() if any(c)}

    def _served(self, model_id: str) -> ServedModel:
        """Returns what every worker of the name can keep, because a request may be placed on any of them; of pools
        the largest counts, as placing keeps what doesn't fit from the others.
        """
        infos = [link.info for link in self._links if link.info.model_id == model_id]
        known = self._served_by.get(model_id)
        if known is not None and len(known[0]) == len(infos) and all(map(is_, known[0], infos)):
            return known[1]  # what it takes long to find, ten times a second, of workers that rarely change
        found = self._summed_up(model_id, infos)
        self._served_by[model_id] = (infos, found)
        return found

    def _summed_up(self, model_id: str, infos: Sequence[WorkerInfo]) -> ServedModel:
        most = min(info.max_model_len for info in infos)
        pools = [context_room(info.layout, info.pages, most) for info in infos if info.role == "decode"]
        self._warn_of_tokenizers(model_id, {(info.vocab_size, info.eos_token_ids) for info in infos})
        return ServedModel(
            model_id,
            max(pools, default=most),
            min(info.vocab_size for info in infos),
            tuple(sorted({i for info in infos for i in info.eos_token_ids})),
            has_text=any(not info.device.startswith("paced:") for info in infos),
        )

    def _warn_of_tokenizers(self, model_id: str, seen: set[tuple[int, tuple[int, ...]]]) -> None:
        """Once for as long as it lasts: one name has one tokenizer and one template, which this router read."""
        if len(seen) > 1 and model_id not in self._mixed:
            log.warning(
                "workers of %r differ in vocabulary or end tokens (%s): weights may differ under one name, the "
                "tokenizer may not; serve the other checkpoint under a name of its own",
                model_id,
                "; ".join(f"{vocab} ids, ends {list(ends)}" for vocab, ends in sorted(seen)),
            )
        (self._mixed.add if len(seen) > 1 else self._mixed.discard)(model_id)

    def _of(self, worker_id: str) -> _WorkerCounts:
        return self._own.setdefault(worker_id, _WorkerCounts())

    def _candidate(self, link: WorkerLink, adapter_s: float) -> Candidate:
        own = self._of(link.info.worker_id)
        cap = self._throttle.cap(link.info.model_id, link.info.max_batch)
        crowded = own.sequences >= cap and link.info.role == "decode"
        return Candidate(
            info=link.info,
            load=self._loads.get(link.info.worker_id, NO_LOAD),
            sequences=own.sequences,
            pending_prompts=own.pending_prompts,
            pending_tokens=own.pending_tokens,
            full=crowded or own.is_full(self._clock()),
            adapter_s=adapter_s,
        )


def _can_go_on(other: WorkerInfo, leaving: WorkerInfo) -> bool:
    """Returns whether ``other`` takes the requests of ``leaving``."""
    same = (other.model_id, weights_of(other)) == (leaving.model_id, weights_of(leaving))
    return same and other.role == "decode" and other.state == "ready"


def _serves(link: WorkerLink, model_id: str) -> bool:
    return link.up and link.info.model_id == model_id and link.info.state == "ready"
