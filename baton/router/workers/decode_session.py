"""One session with a decode worker, and the requests that it carries.

Knows nothing of policies, queues or reconnecting. A ``DecodeLease`` is one request on the worker, from Admit until
the worker ends it or the router cancels it. Whoever leaves a lease that the worker hasn't ended sends exactly one
Cancel; a lease of a lost session sends none, because the loss cancels it on the worker.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from baton.process.turns import call_in_turns
from baton.protos.convert import error_from_pb
from baton.protos.errors import BatonError, Cancelled, WorkerLost, from_info
from baton.protos.v1 import worker_pb2 as w
from baton.router.workers.call_errors import is_of_worker

TokenSink = Callable[[w.RequestTokens], None]
log = logging.getLogger("baton.router")


class DecodeSession:
    """Keeps the leases in flight on one connection to a decode worker.

    Messages in ``outbox`` are sent in order; ``receive`` takes the worker's. ``doubt`` is called, before any lease
    hears of it, when the worker says that its engine is gone.
    """

    def __init__(self, worker_id: str, doubt: Callable[[], None] = lambda: None) -> None:
        self.worker_id = worker_id
        self._doubt = doubt
        self.outbox: asyncio.Queue[w.SessionUp] = asyncio.Queue()
        self._leases: dict[str, DecodeLease] = {}
        self._lost: BatonError | None = None

    def __len__(self) -> int:
        return len(self._leases)

    def send(self, message: w.SessionUp) -> None:
        """Queues a message for the worker; never waits."""
        self.outbox.put_nowait(message)

    def add(self, lease: DecodeLease) -> None:
        """Registers a lease, so that the worker's messages for it are delivered.

        Raises WorkerLost if the session is over.
        """
        if self._lost is not None:
            raise self._lost
        self._leases[lease.request_id] = lease

    def remove(self, lease: DecodeLease) -> bool:
        """Stops delivery to a lease; returns False if the worker had ended it already."""
        return self._leases.pop(lease.request_id, None) is not None

    def receive(self, down: w.SessionDown) -> None:
        """Delivers one message of the worker to its lease; drops messages for leases that are gone."""
        match down.WhichOneof("message"):
            case "tokens":
                for output in down.tokens.outputs:
                    self._tokens(output)
            case "admitted":
                self._deliver(down.admitted)
            case "rearmed":
                self._deliver(down.rearmed)
            case "refused":
                self._deliver(down.refused)
            case "ended":
                self._deliver(down.ended)
            case _:
                pass  # of a newer build of the worker

    def lose(self, error: BatonError) -> None:
        """Ends every lease with ``error``, because the connection is lost; very many over several turns of the
        loop.
        """
        self._lost = error
        leases, self._leases = self._leases, {}
        call_in_turns(lambda lease: lease.over(error), leases.values())

    def move_away(self, error: BatonError) -> int:
        """Ends every lease with ``error``, sending Cancels to the worker; returns their number. Very many end over
        several turns of the loop.
        """
        leases = list(self._leases.values())
        call_in_turns(lambda lease: lease.leave(error), leases)
        return len(leases)

    def _tokens(self, output: w.RequestTokens) -> None:
        lease = self._leases.get(output.request_id)
        if lease is None:
            return
        try:
            lease.sink(output)
        except BatonError as error:  # a hole in the answer: this request fails alone
            lease.over(error)
            return
        except Exception as error:  # so does one that we stumble over; the session is everybody's
            log.exception("tokens of %s could not be taken", output.request_id)
            lease.over(BatonError(f"the router failed on this request: {error}"))
            return
        if output.run.finish_reason:
            del self._leases[output.request_id]
            lease.over(None)

    def _deliver(self, message: w.Admitted | w.Rearmed | w.Refused | w.Ended) -> None:
        lease = self._leases.get(message.request_id)
        if lease is None:
            return
        if isinstance(message, w.Admitted | w.Rearmed):
            lease.answered(message)
            return
        error = _error_of(message.error, self.worker_id)
        if is_of_worker(error):
            self._doubt()
        if isinstance(message, w.Refused):
            lease.refused(error)
        else:
            del self._leases[lease.request_id]
            lease.over(error)


class DecodeLease:
    """Holds a request on a decode worker, as an async context manager.

    Entering waits for Admitted, or raises the refusal. ``ended`` resolves when the worker finished the request, or
    raises why it ended early. ``why`` gives the reason of a Cancel.
    """

    def __init__(self, session: DecodeSession, admit: w.Admit, sink: TokenSink, why: Callable[[], str]) -> None:
        loop = asyncio.get_running_loop()
        self.request_id: str = admit.request_id
        self.sink = sink
        self.lease = b""
        self.epoch = 0
        self.held_blocks = 0
        self.ended: asyncio.Future[None] = loop.create_future()
        self._session, self._admit, self._why = session, admit, why
        self._answer: asyncio.Future[w.Admitted | w.Rearmed] = loop.create_future()

    async def __aenter__(self) -> DecodeLease:
        self._session.add(self)
        self._session.send(w.SessionUp(admit=self._admit))
        try:
            admitted = await self._answer
        except BaseException:
            self.close()
            raise
        self.lease, self.epoch, self.held_blocks = admitted.lease, admitted.epoch, admitted.held_blocks
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def rearm(self) -> tuple[int, ...]:
        """Starts a new epoch, in which late KV frames of the old one are refused; returns the indices of blocks
        already received.

        Raises AlreadyCommitted if the worker is decoding already, LeaseUnknown, WorkerLost.
        """
        self._answer = asyncio.get_running_loop().create_future()
        rearm = w.Rearm(request_id=self.request_id, lease=self.lease, epoch=self.epoch + 1)
        self._session.send(w.SessionUp(rearm=rearm))
        rearmed = await self._answer
        self.epoch = rearmed.epoch
        return tuple(rearmed.received_blocks)

    def close(self) -> None:
        """Sends Cancel unless the worker ended the lease, and ends the lease. Idempotent."""
        self._cancel()
        self.over(None)

    def leave(self, error: BatonError) -> None:
        """Sends Cancel unless the worker ended the lease, and ends the lease with ``error``."""
        self._cancel()
        self.over(error)

    def _cancel(self) -> None:
        if self._session.remove(self):
            cancel = w.Cancel(request_id=self.request_id, reason=self._why())
            self._session.send(w.SessionUp(cancel=cancel))

    # ---- for Session ---------------------------------------------------------------------------------

    def answered(self, message: w.Admitted | w.Rearmed) -> None:
        """Takes the worker's consent to Admit or Rearm."""
        if not self._answer.done():
            self._answer.set_result(message)

    def refused(self, error: BatonError) -> None:
        """Takes the worker's refusal: of Admit, which ends the lease, or of Rearm, which doesn't."""
        if not self.lease:
            self._session.remove(self)
        if not self._answer.done():
            self._answer.set_exception(error)

    def over(self, error: BatonError | None) -> None:
        """Ends the lease, normally or with ``error``; no more messages will come."""
        if error is None and not self.ended.done():
            self.ended.set_result(None)
        reason = error or Cancelled("the request ended before it was answered")
        for future in [f for f in (self.ended, self._answer) if not f.done()]:
            future.set_exception(reason)
            future.exception()  # somebody may have stopped listening


def _error_of(pb: w.WireError, worker_id: str) -> BatonError:
    if pb.type in ("", "Cancelled"):  # what we cancel ourselves, we no longer listen to
        return WorkerLost(f"{worker_id} cancelled the request by itself")
    return from_info(error_from_pb(pb))
