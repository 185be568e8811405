"""The prefill worker's I/O side: one handoff per prompt, fed by the engine as blocks are finished. Torch-free.

Knows nothing of gRPC (shell.py does) or of the pool. Each Prefill sent to the engine is followed by exactly one
SendClosed, after the handoff has stopped reading pages.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import NamedTuple, assert_never

import msgspec
from opentelemetry.trace import Span

from baton.cluster.metering.telemetry import Attributes, open_span
from baton.engine.request_checks import blocks_for
from baton.kv.exchange.filling import NOTHING, FillReport
from baton.kv.exchange.warming import Warmer
from baton.kv.layout import prefix
from baton.kv.layout.bridge import bridge, wire_layout
from baton.kv.layout.page import sliding_window, sunk_blocks
from baton.kv.layout.repaging import Repaging
from baton.kv.layout.selection import chosen_from, prompt_selection_of, selection_of
from baton.kv.layout.state import state_pages
from baton.kv.layout.table_bridge import TableBridge
from baton.kv.memory.host_pages import PageMemory
from baton.kv.pages.tables import count_of, hashes_behind
from baton.kv.pages.window import first_seen
from baton.kv.wire.base import Transport
from baton.prefill_worker.io.divided_handoff import DividedHandoff, OwnHost, Receivers
from baton.prefill_worker.io.handoff import Handoff, HandoffReport
from baton.prefill_worker.io.handoff_frames import Destination, Sender
from baton.prefill_worker.io.host_senders import HostSenders
from baton.prefill_worker.io.retabling import Retabling
from baton.prefill_worker.io.wire_plan import WirePlan
from baton.protos import channel as ch
from baton.protos.errors import BatonError, Draining, InvalidRequest, ModelNotFound, from_info
from baton.protos.nouns import EngineRequest, KvLayout, Station, TokenLogprobs, TokenRun


class PrefillCall(msgspec.Struct, frozen=True):
    """A prompt to compute, where to send its blocks, and where to fetch some of them."""

    request: EngineRequest
    model_id: str  # "" for any
    decode_address: str
    lease: bytes  # id of the decode worker's lease
    epoch: int  # number of this prefill for the lease
    held_blocks: int  # leading blocks that the decode worker has
    received_blocks: tuple[int, ...] = ()  # indices of other blocks that it has
    traceparent: str = ""  # W3C trace context; "" for no trace
    decode_incarnation: str = ""  # id of the decode worker's present life; "" if unknown
    fetch_address: str = ""  # worker that holds leading blocks; "" for none
    fetch_blocks: int = 0  # leading blocks that are cheaper to fetch than to compute
    fetch_limit_s: float = 0.0  # seconds after which fetching is given up; 0 for none


class PrefillResult(msgspec.Struct, frozen=True):
    """The result of a prefill, known once the decode worker has taken the blocks over."""

    first: TokenRun  # first output token
    cached_tokens: int  # prompt tokens found in the prefix cache
    shipped_blocks: int
    shipped_bytes: int
    stations: tuple[Station, ...]  # durations of the request's stages
    fetched_blocks: int = 0  # blocks taken from another worker or a lower tier
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    pooled: bytes = b""  # embedding as float32 bytes, if one was requested


class _Job:
    """A prompt from its arrival until its handoff has ended."""

    def __init__(self, handoff: Handoff | DividedHandoff, call: PrefillCall):
        self.handoff = handoff
        self.done: ch.PrefillDone | None = None
        self.sent = False  # whether the engine knows of it
        self._call = call
        self.span = self._open("prefill")

    def take(self, message: ch.FromPrefillEngine) -> None:
        """Handles one message of the engine about this prompt."""
        match message:
            case ch.BlocksReady():
                self.handoff.ship(message.blocks)
            case ch.PrefillDone():
                self._finish(message)
            case ch.PrefillFailed():
                self.handoff.fail(from_info(message.error))
            case _:
                assert_never(message)

    def _finish(self, done: ch.PrefillDone) -> None:
        """Commits the handoff: the first token is known, and what is still being sent delays the answer."""
        self.done = done
        self.end_span()
        self.span = self._open("transfer")
        self.handoff.commit(done.first, done.cached_tokens, done.at)

    def shipped(self, report: HandoffReport) -> None:
        """Records the exact duration and size of the transfer; the span itself also contains closing the stream."""
        if self.span is not None:
            self.span.set_attribute("baton.kv.exposed_seconds", report.exposed_s)
            self.span.set_attribute("baton.kv.bytes", report.shipped_bytes)

    def end_span(self) -> None:
        """Ends the trace span of the present stage."""
        if self.span is not None:
            self.span.end()
            self.span = None

    def _open(self, name: str) -> Span | None:
        request = self._call.request
        attributes: Attributes = {"baton.request_id": request.request_id, "baton.tokens": len(request.token_ids)}
        return open_span(name, self._call.traceparent, attributes) if self._call.traceparent else None


class DecodePeers(NamedTuple):
    """Callbacks by which a prefill worker learns about decode workers and reports handoffs to them.

    ``expect(address, incarnation)`` is called before each handoff; ``layout_of(address)`` returns the decode
    worker's layout, None means that all have this worker's. ``receivers`` asks which hosts of its ranks take KV,
    None means that its address takes all. At its end either ``completed(report)`` or
    ``failed(address, error, began)`` is called; ``began`` is the handoff's first moment, on the service's clock.
    """

    expect: Callable[[str, str], None] = lambda address, incarnation: None
    layout_of: Callable[[str], Awaitable[KvLayout]] | None = None
    completed: Callable[[HandoffReport], None] = lambda report: None
    failed: Callable[[str, BatonError, float], None] = lambda address, error, began: None
    receivers: Receivers | None = None


class PrefillService:
    """Serves the prefill calls of this worker. ``send`` passes a message to the engine and must not block."""

    def __init__(
        self,
        send: ch.SendToEngine,
        memory: PageMemory,
        sender: Sender,
        transport: Transport,
        clock: Callable[[], float],
        peers: DecodePeers = DecodePeers(),
        warmer: Warmer | None = None,
        keys: Iterator[int] | None = None,
        hosts: HostSenders | None = None,
    ):
        self._send = send
        self._memory = memory
        self._sender = sender
        self._transport = transport
        self._clock = clock
        self._peers = peers
        self._warmer = warmer
        self._hosts = hosts
        self._keys = keys or itertools.count(1)
        self._jobs: dict[int, _Job] = {}
        self._lost: BatonError | None = None
        self.finished = 0

    @property
    def active(self) -> int:
        """Returns the number of prompts that have not ended."""
        return len(self._jobs)

    async def prefill(self, call: PrefillCall) -> PrefillResult:
        """Computes a prompt and hands its blocks to the decode worker; returns the first token and figures.

        Raises a BatonError, which is the decode worker's refusal, the engine's failure or a lost connection;
        cancelling it cancels the prompt.
        """
        self._check(call)
        self._peers.expect(call.decode_address, call.decode_incarnation)
        key, handoff, began = next(self._keys), self._handoff(call), self._clock()
        job = self._jobs[key] = _Job(handoff, call)
        try:
            fetched = await self._warm(call)
            prompt = await self._prompt(key, call)
            self._require_engine()
            job.sent = True
            self._send(prompt)
            report = await handoff.run()
            job.shipped(report)
        except BatonError as error:
            self._peers.failed(call.decode_address, error, began)
            raise
        finally:
            self._release(key, job)
        assert job.done is not None, "a handoff can't complete before its prompt"
        self.finished += 1
        self._peers.completed(report)
        return PrefillResult(
            job.done.first,
            job.done.cached_tokens,
            report.shipped_blocks,
            report.shipped_bytes,
            _stations(job.done, report, fetched),
            fetched.blocks,
            job.done.prompt_logprobs,
            job.done.pooled,
        )

    def cancel_all(self, reason: str) -> int:
        """Ends every prompt with Draining, because a drain's grace period is over; returns how many there were."""
        for job in self._jobs.values():
            job.handoff.fail(Draining(f"the prefill worker leaves ({reason}); ask another"))
        return len(self._jobs)

    def send_away(self, error: BatonError) -> int:
        """Does nothing and returns 0, because finishing a prompt is better than beginning it again on another
        worker.
        """
        return 0

    def hang_up(self) -> None:
        """Refuses every prompt from now on with Draining, because the worker is about to leave its role."""
        self._lost = Draining("the prefill worker leaves its role; ask another")

    def lost(self, error: BatonError) -> None:
        """Ends every handoff with ``error`` and refuses new prompts with it, because the engine is gone."""
        self._lost = error
        for job in self._jobs.values():
            job.handoff.fail(error)

    def take(self, message: ch.FromEitherRole) -> None:
        """Handles one message of the engine; one about a prompt that has ended is dropped."""
        match message:
            case ch.BlocksReady() | ch.PrefillDone() | ch.PrefillFailed():
                if (job := self._jobs.get(message.key)) is not None:
                    job.take(message)
            case ch.Tokens() | ch.Admitted() | ch.Refused() | ch.Rearmed() | ch.Committed() | ch.Ended():
                raise AssertionError(f"a prefill engine sends no {type(message).__name__}")
            case ch.CloseReceive():
                raise AssertionError("a prefill engine has no lease that others fill")
            case _:
                assert_never(message)

    async def _warm(self, call: PrefillCall) -> FillReport:
        """Fetches blocks that are cheaper to fetch than to compute, so that the engine finds them in its cache."""
        if self._warmer is None:
            return NOTHING
        return await self._warmer.warm(
            call.request, call.fetch_address, call.fetch_blocks, call.fetch_limit_s or None
        )

    async def _prompt(self, key: int, call: PrefillCall) -> ch.Prefill:
        """Returns the engine's message: which leading blocks and which others the decode worker has, counted in our
        blocks, and whether it wants whole ones of us.
        """
        ours, held = self._sender.layout, (call.held_blocks, call.received_blocks)
        may_differ = (
            bool(call.held_blocks or call.received_blocks or ours.windows) or selection_of(ours) is not None
        )
        if self._peers.layout_of is None or not may_differ:
            return ch.Prefill(key, call.request, *held)  # nothing is nothing: no need to ask it before we begin
        theirs = await self._peers.layout_of(call.decode_address)
        paging = self._paging(call, theirs)
        if paging is None:
            return ch.Prefill(key, call.request, call.held_blocks, _not_seen(call, theirs))
        whole = bool(ours.windows) and not theirs.windows
        return ch.Prefill(key, call.request, *paging.wanted(), whole)

    def _paging(self, call: PrefillCall, theirs: KvLayout) -> Repaging | Retabling | None:
        """Returns what maps our blocks to the decode worker's, where it has others: of another size, or of other
        layers.
        """
        ours, tokens = self._sender.layout, len(call.request.token_ids)
        if bool(ours.windows) != bool(theirs.windows) and ours.block_tokens == theirs.block_tokens:
            return Retabling(ours, theirs, tokens, call.held_blocks, call.received_blocks)
        if ours.block_tokens == theirs.block_tokens or not theirs.runs:
            return None  # pages of less than a run: the bridge refuses them by name
        return Repaging(ours, theirs, tokens, call.held_blocks, _not_seen(call, theirs))

    def _release(self, key: int, job: _Job) -> None:
        """Ends the job: cancels the prompt if it isn't done, and tells the engine that its pages are no longer
        read.
        """
        job.end_span()
        del self._jobs[key]
        if not job.sent:
            return
        if job.done is None:
            self._send(ch.Cancel(key, "handoff ended"))
        self._send(ch.SendClosed(key))

    def _handoff(self, call: PrefillCall) -> Handoff | DividedHandoff:
        size = self._sender.layout.block_tokens
        blocks, layout = blocks_for(len(call.request.token_ids), size), self._sender.layout
        further = count_of(layout.windows, len(call.request.token_ids), size)
        destination = Destination(
            address=call.decode_address,
            lease=call.lease,
            epoch=call.epoch,
            request_id=call.request.request_id,
            total_blocks=blocks + state_pages(layout) + further,
            tail_tokens=len(call.request.token_ids) - (blocks - 1) * size,
            adapter_id=call.request.adapter_id,
        )
        receivers = self._peers.receivers
        plan = None if self._peers.layout_of is None else lambda: self._wire(call)
        if receivers is None or plan is None:
            return self._own_handoff(plan, destination)
        own = OwnHost(() if self._hosts is None else self._hosts.part, partial(self._own_handoff, plan), plan)
        others = () if self._hosts is None else self._hosts.others(self._sender, call.decode_incarnation)
        return DividedHandoff(own, others, destination, receivers)

    def _own_handoff(self, plan: Callable[[], Awaitable[WirePlan]] | None, to: Destination) -> Handoff:
        return Handoff(self._transport, self._memory, self._sender, to, self._clock, plan=plan)

    async def _wire(self, call: PrefillCall) -> WirePlan:
        """Returns how this prompt's blocks are sent to its decode worker. Raises LayoutMismatch before any byte is
        sent.
        """
        assert self._peers.layout_of is not None
        ours, theirs, request = self._sender.layout, await self._peers.layout_of(call.decode_address), call.request
        theirs = wire_layout(ours, theirs)
        divides = bool(ours.windows) != bool(theirs.windows)
        made, paging = (TableBridge if divides else bridge)(ours, theirs), self._paging(call, theirs)
        if ours.fidelity == theirs.fidelity and paging is None:
            return WirePlan(theirs, made)
        root = prefix.root(self._sender.fingerprint, theirs.fidelity, request.adapter_id, request.tenant_salt)
        chain = prefix.chain(root, request.token_ids, theirs.block_tokens)
        kept = prompt_selection_of(theirs, chosen_from(theirs, request, is_local=False))
        further = hashes_behind(chain, theirs.windows, len(request.token_ids), theirs.block_tokens)
        return WirePlan(theirs, made, (*(chain if kept is None else kept.named(chain)), *further), paging)

    def _require_engine(self) -> None:
        """Raises the error with which prompts ended if the engine is gone or changes its role."""
        if self._lost is not None:
            raise self._lost

    def _check(self, call: PrefillCall) -> None:
        self._require_engine()
        if call.model_id and call.model_id != self._sender.model_id:
            text = f"this worker serves {self._sender.model_id!r}, not {call.model_id!r}"
            raise ModelNotFound(text, "model_id")
        if not call.request.token_ids:
            raise InvalidRequest("a prompt needs at least one token", "token_ids")


def _not_seen(call: PrefillCall, theirs: KvLayout) -> tuple[int, ...]:
    """Returns the blocks, in the size of ``theirs``, that the receiver has, and those that no later token attends
    to.
    """
    tokens, size = len(call.request.token_ids), theirs.block_tokens
    unseen = range(sunk_blocks(theirs), first_seen(tokens, sliding_window(theirs), size))
    if selection_of(theirs) is None:
        return call.received_blocks
    return tuple(sorted({*call.received_blocks, *unseen}))


def _stations(done: ch.PrefillDone, report: HandoffReport, fetched: FillReport) -> tuple[Station, ...]:
    """Returns the durations of the engine's stages, with those of fetching before and of the transfer after
    them.
    """
    fetch = (Station("fetch", fetched.seconds),) if fetched.blocks else ()
    return (*fetch, *done.stations, Station("transfer", report.exposed_s))
