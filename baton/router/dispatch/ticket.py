"""A ticket is a request's place in the router's queue.

Knows nothing of order or room: admission does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from baton.protos.errors import BatonError
from baton.router.dispatch.fair_queue import Order, RequestLoad, work_of
from baton.router.request.request import RouterRequest

BYTES_PER_TOKEN = 64  # an id as a Python int, its place in the request, and in the messages that carry it


class NoneAble(Exception):
    """Says that no worker could take a request however much room there were, so that it waits for one to come.

    An attempt raises it instead of returning None: the request then holds nobody back that waits for room.
    """


class TicketQueue(Protocol):
    """Declares what a ticket asks of its queue; Admission implements it."""

    def enqueue(self, ticket: Ticket, leads: bool) -> None:
        """Puts a ticket into the queue, at its place in order; or, with ``leads``, before all that wait there."""

    def dequeue(self, ticket: Ticket) -> None:
        """Takes a ticket out of the queue."""

    def let_go(self, ticket: Ticket) -> None:
        """Gives back the bytes that a ticket's request was counted to hold, because the request is over."""


class SupportsClose(Protocol):
    """Declares what an attempt returns: a reservation that can be closed."""

    def close(self) -> None:
        """Gives back what was reserved."""


T = TypeVar("T", bound=SupportsClose)


def load_of(request: RouterRequest) -> RequestLoad:
    """Returns the RequestLoad of a request: its expected work, estimated bytes, priority, tenant and SLO."""
    work = work_of(len(request.token_ids), request.sampling.max_tokens, request.n)
    return RequestLoad(
        priority=request.context.priority,
        tenant=request.context.tenant,
        weight=request.context.key.weight if request.context.key else 1.0,
        work=work,
        size=BYTES_PER_TOKEN * work,
        slo_ttft_s=request.context.slo_ttft_s,
    )


class Ticket(Generic[T]):
    """Holds a request's place in the queue, which stays its own until ``leave``, however often it waits."""

    def __init__(
        self, admission: TicketQueue, pool: str, queue: str, order: Order, since: float, load: RequestLoad
    ) -> None:
        self.pool, self.queue, self.order, self.since, self.load = pool, queue, order, since, load
        self.counted = False
        self.held_bytes = 0
        self.none_able = False  # at its last turn no worker could have taken it
        self._admission = admission
        self._attempt: Callable[[], T | None] | None = None
        self._placed: asyncio.Future[T] | None = None
        self._refusal: BatonError | None = None

    async def wait(self, attempt: Callable[[], T | None], leads: bool = False) -> T:
        """Waits for a turn in which ``attempt`` returns a reservation instead of None, and returns it.

        ``leads``: the request holds what others wait for, so it is tried before all of them. Raises what
        ``attempt`` raises, NoneAble excepted, and the error with which the ticket is shed.
        """
        if self._refusal is not None:
            raise self._refusal
        placed: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._attempt, self._placed = attempt, placed
        self._admission.enqueue(self, leads)
        try:
            return await placed
        except asyncio.CancelledError:
            # Cancelled between its turn and its waking up: nobody else knows of the placement.
            if placed.done() and not placed.cancelled() and placed.exception() is None:
                placed.result().close()
            raise
        finally:
            self._attempt = self._placed = None  # it leads back to us: garbage that only a collection would find
            self._admission.dequeue(self)

    def take_turn(self) -> bool:
        """Calls the waiting attempt once; returns False if it found no room. Called by Admission only."""
        assert self._attempt is not None
        assert self._placed is not None
        if self._placed.done():
            return True
        self.none_able = False
        try:
            placement = self._attempt()
        except NoneAble:
            self.none_able = True
            return False
        except Exception as error:
            self._placed.set_exception(error)
            return True
        if placement is None:
            return False
        self._placed.set_result(placement)
        return True

    def shed(self, error: BatonError) -> None:
        """Ends the request's wait with ``error``, now or as soon as it waits. Called by Admission only."""
        self._refusal = error
        if self._placed is not None and not self._placed.done():
            self._placed.set_exception(error)

    def leave(self) -> None:
        """Gives up the place in the queue and the bytes counted for the request. Idempotent."""
        self._admission.dequeue(self)
        self._admission.let_go(self)
