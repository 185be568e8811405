"""The decode worker's I/O side, between routers' sessions, the engine and the intake. Torch-free.

Knows nothing of gRPC (shell.py does) or of pages' owners. The order of two messages matters everywhere in it: first
the intake refuses, then the engine is told, so that a freed page is never written.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from typing import assert_never

from opentelemetry.trace import Span

from baton.cluster.metering.telemetry import Attributes, open_span
from baton.decode_worker.io.intake import Intake
from baton.decode_worker.io.intake_lease import IntakeLease
from baton.decode_worker.io.router_session import RouterSession, SessionRequest
from baton.kv.exchange.warming import Warmer
from baton.protos import channel as ch
from baton.protos.errors import (
    BatonError,
    Draining,
    ErrorInfo,
    InvalidRequest,
    LeaseUnknown,
    ModelNotFound,
    from_info,
    to_info,
)
from baton.protos.nouns import EngineRequest


class DecodeService:
    """Serves all sessions of this worker. ``send`` passes a message to the engine and must not block."""

    def __init__(
        self,
        send: ch.SendToEngine,
        intake: Intake,
        model_id: str,
        ttl_s: float,
        warmer: Warmer | None = None,
        keys: Iterator[int] | None = None,
    ):
        self._send = send
        self._warmer = warmer
        self._warming: set[asyncio.Task[None]] = set()
        self._intake = intake
        self._model_id = model_id
        self._ttl_s = ttl_s
        self._keys = keys or itertools.count(1)
        self._requests: dict[int, SessionRequest] = {}
        self._sessions: dict[RouterSession, None] = {}  # in the order in which they began
        self._spans: dict[int, Span] = {}
        self._left: BatonError | None = None
        self.finished = 0

    @property
    def active(self) -> int:
        """Returns the number of requests that have not ended."""
        return len(self._requests)

    # ---- sessions ----

    def open_session(self, router_id: str) -> RouterSession:
        """Returns a new session for a router."""
        session = RouterSession(router_id)
        self._sessions[session] = None
        return session

    def close_session(self, session: RouterSession, reason: str = "session_lost") -> None:
        """Closes a session, because its router is gone; cancels all of its requests."""
        self._sessions.pop(session, None)
        for request in tuple(session.requests.values()):
            self._cancel(request, reason)
            self._drop(request)
        session.end()

    def admit(
        self,
        session: RouterSession,
        request: EngineRequest,
        model_id: str,
        local: bool,
        ttl_s: float,
        traceparent: str,
    ) -> None:
        """Asks the engine to admit a request; Admitted or Refused follows in ``session``.

        ``local`` has this worker compute the prompt. ``ttl_s`` is how long a lease lasts without progress, 0 for
        the default.
        """
        earlier = session.requests.get(request.request_id)
        if earlier is not None and not earlier.cancelled:
            error = InvalidRequest(
                f"request {request.request_id!r} is already here; give it another id", "request_id"
            )
            session.refuse(request.request_id, to_info(error))
            return
        if self._left is not None:
            session.refuse(request.request_id, to_info(self._left))
            return
        if model_id and model_id != self._model_id:
            session.refuse(request.request_id, to_info(ModelNotFound(self._other_model(model_id), "model_id")))
            return
        entry = SessionRequest(next(self._keys), request.request_id, session, traceparent, local)
        session.requests[request.request_id] = self._requests[entry.key] = entry
        admit = ch.Admit(entry.key, request, local, ttl_s or self._ttl_s)
        if local and self._warmer is not None and self._warmer.has_tiers:
            task = asyncio.create_task(self._admit_warm(self._warmer, entry, admit))
            self._warming.add(task)
            task.add_done_callback(self._warming.discard)
        else:
            self._send(admit)

    def rearm(self, session: RouterSession, request_id: str, lease: bytes, epoch: int) -> None:
        """Begins a second prefill of a request with ``epoch``; frames of the first are refused from this moment.

        Rearmed or Refused follows in ``session``.
        """
        entry = session.requests.get(request_id)
        if entry is None:
            session.refuse(request_id, to_info(LeaseUnknown("the request has ended here; admit it again", "lease")))
            return
        if (lease, epoch) == (entry.lease, entry.epoch + 1):
            self._intake.rearm(entry.key, epoch)
        self._send(ch.Rearm(entry.key, lease, epoch))

    def cancel(self, session: RouterSession, request_id: str, reason: str) -> None:
        """Cancels a request; Ended follows in ``session`` unless the request had ended."""
        entry = session.requests.get(request_id)
        if entry is not None:
            self._cancel(entry, reason)

    def cancel_all(self, reason: str) -> int:
        """Cancels every request, because a drain's grace period is over; returns how many there were."""
        entries = tuple(self._requests.values())
        for entry in entries:
            self._cancel(entry, reason)
        return len(entries)

    def send_away(self, error: BatonError) -> int:
        """Ends each request with ``error`` for its router, which continues it elsewhere; returns how many there
        were.

        They run here until the router cancels them. Cancelling them at once would break handoffs in progress before
        their router has heard why, and it would blame the prefill workers.
        """
        entries = [entry for entry in self._requests.values() if not entry.cancelled]
        for entry in entries:
            entry.session.reply(entry, ch.Ended(entry.key, to_info(error)))
        return len(entries)

    def hang_up(self) -> None:
        """Ends every session after what is queued for its router, and refuses all requests from now on."""
        self._left = Draining("the decode worker leaves its role; ask another")
        for session in tuple(self._sessions):
            session.end()

    def lost(self, error: BatonError) -> None:
        """Ends every session and every handoff with ``error``, because the engine is gone."""
        for session in tuple(self._sessions):
            session.lost(to_info(error))
        for key in tuple(self._requests):
            self._intake.close(key, error)
        self._requests.clear()

    # ---- what the engine says ----

    def take(self, message: ch.FromEitherRole) -> None:
        """Handles one message of the engine; one about a request that has ended is dropped."""
        match message:
            case ch.Tokens():
                self._tokens(message)
            case ch.Committed():
                self._intake.on_committed(message.key, message.epoch)
                self._begin_decode(message.key)
            case ch.Admitted() | ch.Rearmed() | ch.Refused() | ch.Ended():
                if (entry := self._requests.get(message.key)) is not None:
                    self._answer(entry, message)
            case ch.CloseReceive():
                self._intake.close(message.key)
                self._send(ch.IntakeClosed(message.key))
            case ch.BlocksReady() | ch.PrefillDone() | ch.PrefillFailed():
                raise AssertionError(f"a decode engine sends no {type(message).__name__}")
            case _:
                assert_never(message)

    def _answer(self, entry: SessionRequest, message: ch.Admitted | ch.Rearmed | ch.Refused | ch.Ended) -> None:
        if entry.cancelled and isinstance(message, (ch.Admitted, ch.Rearmed)):
            return  # its intake is closed: nothing may be received for it any more
        if isinstance(message, (ch.Admitted, ch.Rearmed)):
            self._allowed(entry, message)
            return
        entry.session.reply(entry, message)
        if isinstance(message, ch.Ended) or (isinstance(message, ch.Refused) and not entry.lease):
            self._drop(entry, message.error)

    def _allowed(self, entry: SessionRequest, message: ch.Admitted | ch.Rearmed) -> None:
        """Tells the router of a lease, or of its next epoch, once every host would take streams of it; at once of a
        prompt that is computed here, which none receives.
        """
        if isinstance(message, ch.Admitted):
            self._admitted(entry, message)
        else:
            entry.epoch = message.epoch

        def reply() -> None:
            if self._requests.get(entry.key) is entry and not entry.cancelled:
                entry.session.reply(entry, message)

        if entry.local:
            reply()
        else:
            self._intake.when_known(entry.key, reply)

    def _admitted(self, entry: SessionRequest, message: ch.Admitted) -> None:
        entry.lease, entry.epoch = message.lease, message.epoch
        if entry.local:
            self._begin_decode(entry.key)
            return
        at = message.pages, message.hashes, message.held_blocks, message.unseen, message.slots
        self._intake.register(IntakeLease(entry.key, message.lease, message.epoch, *at))

    def _tokens(self, message: ch.Tokens) -> None:
        for output in message.outputs:
            entry = self._requests.get(output.key)
            if entry is None:
                continue
            entry.session.tokens(message.step, entry, output)
            if output.run.finish_reason:
                self._finished(entry)

    def _finished(self, entry: SessionRequest) -> None:
        self.finished += 1
        if entry.cancelled:  # the engine had finished before it heard: this is the cancel's answer
            entry.session.reply(entry, ch.Ended(entry.key, None))
        self._drop(entry)

    async def _admit_warm(self, warmer: Warmer, entry: SessionRequest, admit: ch.Admit) -> None:
        """Reads blocks of the prompt from lower tiers into the pages, then asks the engine to admit the request."""
        try:
            await warmer.warm(admit.request)
        finally:
            self._admit(entry, admit)

    def _admit(self, entry: SessionRequest, admit: ch.Admit) -> None:
        """Asks the engine to admit the request, unless it changes its role; repeats a Cancel that came
        meanwhile.
        """
        if self._left is not None:
            entry.session.reply(entry, ch.Refused(entry.key, to_info(self._left)))
            self._drop(entry)
            return
        self._send(admit)
        if entry.cancelled:
            self._send(ch.Cancel(entry.key, "cancelled while it waited"))

    # ---- ends ----

    def _cancel(self, entry: SessionRequest, reason: str) -> None:
        entry.cancelled = True
        entry.session.forget_tokens(entry)
        self._intake.close(entry.key)
        self._send(ch.Cancel(entry.key, reason))

    def _drop(self, entry: SessionRequest, error: ErrorInfo | None = None) -> None:
        """Forgets the request; what is queued for its router is still sent."""
        self._intake.close(entry.key)
        self._requests.pop(entry.key, None)
        if entry.session.requests.get(entry.request_id) is entry:
            del entry.session.requests[entry.request_id]
        span = self._spans.pop(entry.key, None)
        if span is not None:
            if error is not None:
                span.record_exception(from_info(error))
            span.end()

    def _begin_decode(self, key: int) -> None:
        entry = self._requests.get(key)
        if entry is not None and entry.traceparent:
            attributes: Attributes = {"baton.request_id": entry.request_id, "baton.local": entry.local}
            self._spans[key] = open_span("decode", entry.traceparent, attributes)

    def _other_model(self, model_id: str) -> str:
        return f"this worker serves {self._model_id!r}, not {model_id!r}"
