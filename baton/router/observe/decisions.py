"""Decision records: why each request was routed as it was, with every candidate, every cost term, and what was then
observed.

Knows nothing of how a policy chooses, nor of HTTP. This process's own requests are in a ring that is bounded in
entries and bytes; a shared store (Redis, with a TTL) lets any router answer for any other. When the store is slow
or away, records for it are dropped, and nothing else changes.

opened ──> Trail (live, written to by its choices) ──flush──> JSON in the ring and, batched, in the store
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

import msgspec

from baton.protos.errors import BatonError
from baton.protos.json import Json
from baton.protos.rpc import heed_cancel
from baton.router.observe.trail import Trail, TrailWriter, choice_json
from baton.router.request.request import ChoiceSummary, RouterRequest
from baton.tasks.lasting import count_failure

FLUSH_S = 0.25  # seconds between two writes, so that records go out in batches
KEPT_REQUESTS = 4096  # records in this process's ring
KEPT_LIVE = 65_536  # records of requests that run, each of which has an end to tell; nobody serves as many at once
KEPT_BYTES = 16 << 20  # bytes of them
MAX_UNSENT = 4096  # records of one write to the store; what is over is dropped
ASKED = "asked:"
ANSWER_IDS = ("chatcmpl-", "cmpl-", "resp_", "msg_", "rerank-", "score-", "batch_req_")  # before a request's id
FIRST_OF_SEVERAL = "-0"  # a call with several prompts is one request for each: its own id shows the first
log = logging.getLogger("baton.router")


class DecisionStore(Protocol):
    """Keeps records that every router of a cluster can read; ``cluster.store.records.RecordStore`` implements
    it.
    """

    async def put(self, records: Mapping[str, bytes]) -> None:
        """Stores records, key -> bytes, for the store's TTL; never raises, and never waits long."""

    async def get(self, key: str) -> bytes | None:
        """Returns a record; None if it has expired or the store is away."""


class DecisionRecord:
    """Collects what is recorded of one request while it runs; ``opened`` is on the router's clock, ``trails`` has
    one entry per choice.
    """

    def __init__(self, request: RouterRequest, context_class: str, router_id: str, opened: float) -> None:
        self.request, self.context_class, self.router_id, self.opened = request, context_class, router_id, opened
        self.trails: list[Trail] = []

    @property
    def over(self) -> bool:
        """Returns whether every choice has ended."""
        return all(t.over for t in self.trails)

    def plain(self) -> Json:
        """Returns the record as a JSON object."""
        request = self.request
        return {
            "request_id": request.request_id,
            "asked_id": request.context.asked_id,
            "router": self.router_id,
            "tenant": request.context.tenant,
            "model": request.model_id,
            "adapter": request.context.adapter_id,
            "context_class": self.context_class,
            "priority": request.context.priority,
            "prompt_tokens": len(request.token_ids),
            "max_tokens": request.sampling.max_tokens,
            "slo": {"ttft_s": request.context.slo_ttft_s, "tpot_s": request.context.slo_tpot_s},
            "session": request.context.session,
            "state": "over" if self.over else "running",
            "choices": [choice_json(t) for t in self.trails],
        }


class RecordObserver(Protocol):
    """Is told of requests as they begin and end; ``router.observe.traffic.TrafficMeter`` implements it."""

    def opened(self, record: DecisionRecord) -> None:
        """Takes note of the record of a request that was opened."""

    def over(self, record: DecisionRecord) -> None:
        """Takes note of a request all of whose choices have ended."""


class DecisionLog:
    """Keeps the decision records of this process: of requests that have ended, ``kept`` and ``kept_bytes`` at most,
    and ``kept_live`` of others.

    ``run`` writes them out; without it they stay live.
    """

    def __init__(
        self,
        router_id: str,
        clock: Callable[[], float],
        store: DecisionStore | None = None,
        kept: int = KEPT_REQUESTS,
        kept_bytes: int = KEPT_BYTES,
        observer: RecordObserver | None = None,
        kept_live: int = KEPT_LIVE,
    ) -> None:
        self._observer, self._kept_live = observer, kept_live
        self._router_id, self._clock, self._store = router_id, clock, store
        self._kept, self._kept_bytes = kept, kept_bytes
        self._live: OrderedDict[str, DecisionRecord] = OrderedDict()
        self._ring: OrderedDict[str, bytes] = OrderedDict()
        self._ring_bytes = 0
        self._dirty: dict[str, None] = {}
        self._aliases: OrderedDict[str, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._live) + len(self._ring)

    # ---- dispatch's side -----------------------------------------------------------------------------

    def opened(self, request: RouterRequest, context_class: str) -> DecisionRecord:
        """Begins and returns the record of a request; ``writer`` or ``trail`` adds its choices."""
        record = DecisionRecord(request, context_class, self._router_id, self._clock())
        self._live[request.request_id] = record
        if self._observer is not None:
            self._observer.opened(record)
        if len(self._live) > self._kept_live:
            self._live.popitem(last=False)
        if request.context.asked_id:
            self._named(_alias(request.context.tenant, request.context.asked_id), request.request_id)
        return record

    def _named(self, alias: str, request_id: str) -> None:
        """Notes a caller's name of a request, and drops the oldest ones of requests that have ended."""
        self._aliases[alias] = request_id
        while len(self._aliases) > self._kept + len(self._live):
            oldest, of = self._aliases.popitem(last=False)
            if of in self._live:
                self._aliases[oldest] = of

    def writer(self, record: DecisionRecord, choice: int, summary: ChoiceSummary) -> TrailWriter:
        """Adds a choice to a record and returns the writer of its trail."""
        return TrailWriter(self.trail(record, choice, summary), partial(self.changed, record))

    def trail(self, record: DecisionRecord, choice: int, summary: ChoiceSummary) -> Trail:
        """Adds a choice to a record and returns its empty trail."""
        trail = Trail(choice, summary, [])
        record.trails.append(trail)
        return trail

    def refused(self, request: RouterRequest, context_class: str, error: BatonError) -> None:
        """Records a request that dispatch refused with ``error``, without any placement."""
        record = self.opened(request, context_class)
        trail = self.trail(
            record, 0, ChoiceSummary(prompt_tokens=len(request.token_ids), context_class=context_class)
        )
        trail.failed(error)
        self.changed(record)

    def changed(self, record: DecisionRecord) -> None:
        """Marks a record to be written out by the next ``flush``."""
        self._dirty[record.request.request_id] = None

    def unplaced(self) -> list[DecisionRecord]:
        """Returns the records of requests that wait for their first placement."""
        return [r for r in self._live.values() if not r.over and not any(t.placements for t in r.trails)]

    # ---- reading -------------------------------------------------------------------------------------

    async def find(self, request_id: str, tenant: str = "") -> bytes | None:
        """Returns a request's record as JSON, from this process or the store; None if it is unknown.

        ``request_id`` is the router's id, an answer's id, or the id that the caller gave (found only for the same
        ``tenant``).
        """
        alias = _alias(tenant, request_id)
        bare = request_id_in(request_id)
        for name in (request_id, bare, f"{bare}{FIRST_OF_SEVERAL}", self._aliases.get(alias, "")):
            if name in self._live:
                return msgspec.json.encode(self._live[name].plain())
            if name in self._ring:
                return self._ring[name]
        return None if self._store is None else await self._of_store(self._store, request_id, alias)

    async def _of_store(self, store: DecisionStore, request_id: str, alias: str) -> bytes | None:
        bare = request_id_in(request_id)
        own = () if bare.startswith(ASKED) else (bare, f"{bare}{FIRST_OF_SEVERAL}")  # an alias is no record
        for name in own:
            found = await store.get(name)
            if found is not None:
                return found
        named = await store.get(alias)
        return None if named is None else await store.get(named.decode())

    # ---- writing -------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Calls ``flush`` every FLUSH_S until cancelled."""
        while True:
            await asyncio.sleep(FLUSH_S)
            await self.flush()
            heed_cancel()

    async def flush(self) -> None:
        """Encodes the changed records, moves those of ended requests to the ring, and sends all of them to the
        store in one batch.
        """
        dirty, self._dirty = self._dirty, {}
        unsent: dict[str, bytes] = {}
        for request_id in dirty:
            try:
                self._write(request_id, unsent)
            except Exception:  # one record's trouble must not lose the others'
                log.exception("the record of %s could not be written", request_id)
                count_failure("decision records")
        if self._store is not None and unsent:
            await self._store.put(unsent)

    def _write(self, request_id: str, unsent: dict[str, bytes]) -> None:
        record = self._live.get(request_id)
        if record is None:
            return
        if record.over:
            del self._live[request_id]
            if self._observer is not None:
                self._observer.over(record)
        encoded = msgspec.json.encode(record.plain())
        if record.over:
            self._keep(request_id, encoded)
        if self._store is not None and len(unsent) < MAX_UNSENT:
            unsent[request_id] = encoded
            if record.request.context.asked_id:
                alias = _alias(record.request.context.tenant, record.request.context.asked_id)
                unsent[alias] = request_id.encode()

    def _keep(self, request_id: str, encoded: bytes) -> None:
        self._ring[request_id] = encoded
        self._ring_bytes += len(encoded)
        while len(self._ring) > self._kept or self._ring_bytes > self._kept_bytes:
            _, dropped = self._ring.popitem(last=False)
            self._ring_bytes -= len(dropped)


def request_id_in(text: str) -> str:
    """Returns the request id within an answer's id: ``abc`` for ``cmpl-abc``, ``msg_abc`` and others."""
    for prefix in ANSWER_IDS:
        if text.startswith(prefix):
            return text.removeprefix(prefix)
    return text


def _alias(tenant: str, asked_id: str) -> str:
    """A key that no id of ours can be."""
    return f"{ASKED}{tenant}:{asked_id}"
