"""One router's session with a decode worker: its requests, and what still has to be written to it. Torch-free.

Knows nothing of gRPC or of the engine. A worker never waits for a router's write: while one is pending, the token
frames that follow are merged, so that a slow router gets fewer, longer runs, and memory stays bounded.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress

import msgspec

from baton.protos import channel as ch
from baton.protos.errors import ErrorInfo
from baton.protos.nouns import TokenRun

GAP_S = 0.005  # seconds between two frames, because each costs a write
WIDE_GAP_S = 0.010  # seconds after a frame of MANY_STEPS: no reader tells 100 writes a second from 200
MANY_STEPS = 3  # steps in GAP_S that are quick ones


class Reply(msgspec.Struct, frozen=True):
    """An engine's answer to one request, or the request's end."""

    request_id: str
    message: ch.Admitted | ch.Rearmed | ch.Refused | ch.Ended


class TokenFrame(msgspec.Struct):
    """The tokens of all requests that advanced since the previous frame, by request id."""

    step: int  # number of the last step in it
    outputs: dict[str, ch.Output]
    steps: int = 1  # number of steps in it
    urgent: bool = False  # whether an answer begins in it


class SessionRequest:
    """A request of a session. ``key`` is its number on the engine's channel."""

    def __init__(self, key: int, request_id: str, session: RouterSession, traceparent: str, local: bool):
        self.key = key
        self.request_id = request_id
        self.session = session
        self.traceparent = traceparent
        self.local = local
        self.lease = b""
        self.epoch = 0
        self.cancelled = False


class RouterSession:
    """The requests of one router by id, and its outbox."""

    def __init__(self, router_id: str):
        self.router_id = router_id
        self.requests: dict[str, SessionRequest] = {}
        self._outbox: deque[Reply | TokenFrame] = deque()
        self._news = asyncio.Event()
        self._over = False
        self._framed_at = float("-inf")
        self._gap_s = GAP_S

    def reply(self, request: SessionRequest, message: ch.Admitted | ch.Rearmed | ch.Refused | ch.Ended) -> None:
        """Queues an answer, unless the request was replaced by another with its id."""
        if self.requests.get(request.request_id) is request:
            self._put(Reply(request.request_id, message))

    def refuse(self, request_id: str, error: ErrorInfo) -> None:
        """Queues a refusal of something that never became a request."""
        self._put(Reply(request_id, ch.Refused(0, error)))

    def tokens(self, step: int, request: SessionRequest, output: ch.Output) -> None:
        """Adds an output of step ``step`` to the last frame that is queued, or to a new one."""
        if request.cancelled:
            return
        last = self._outbox[-1] if self._outbox else None
        if not isinstance(last, TokenFrame):
            self._put(last := TokenFrame(step, {}))
        last.steps += last.step != step
        last.step = step
        if output.run.output_index == 0:
            last.urgent = True
            self._news.set()
        earlier = last.outputs.get(request.request_id)
        last.outputs[request.request_id] = output if earlier is None else merge(earlier, output)

    def forget_tokens(self, request: SessionRequest) -> None:
        """Drops the queued tokens of a cancelled request, because its id may be used again."""
        for item in self._outbox:
            if isinstance(item, TokenFrame):
                item.outputs.pop(request.request_id, None)

    def lost(self, error: ErrorInfo) -> None:
        """Ends every request with ``error``, and then the session, because the engine is gone."""
        for request in tuple(self.requests.values()):
            self.reply(request, ch.Ended(request.key, error))
        self.end()

    def end(self) -> None:
        """Ends the session after what is queued."""
        self._over = True
        self._news.set()

    async def outgoing(self) -> AsyncIterator[Reply | TokenFrame]:
        """Yields what is to be written, in order, until the session ends; waits for more meanwhile."""
        while True:
            while self._outbox:
                if len(self._outbox) == 1 and isinstance(self._outbox[0], TokenFrame):
                    await self._gap(self._outbox[0])
                item = self._outbox.popleft()
                if isinstance(item, Reply) or item.outputs:
                    yield item
            if self._over:
                return
            self._news.clear()
            await self._news.wait()

    async def _gap(self, frame: TokenFrame) -> None:
        """Delays a frame that follows another too soon, so that quick steps share one, because each frame costs a
        write.

        A frame isn't delayed if an answer begins in it, or if a reply follows.
        """
        loop = asyncio.get_running_loop()
        early = self._framed_at + self._gap_s - loop.time()
        if early > 0 and not (self._over or frame.urgent):
            self._news.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(early):
                    await self._news.wait()
        self._framed_at = loop.time()
        self._gap_s = WIDE_GAP_S if frame.steps >= MANY_STEPS else GAP_S

    def _put(self, item: Reply | TokenFrame) -> None:
        self._outbox.append(item)
        self._news.set()


def merge(first: ch.Output, then: ch.Output) -> ch.Output:
    """Returns two consecutive outputs of one request as one."""
    run = TokenRun(
        output_index=first.run.output_index,
        token_ids=first.run.token_ids + then.run.token_ids,
        logprobs=first.run.logprobs + then.run.logprobs,
        finish_reason=then.run.finish_reason,
        stop_token_id=then.run.stop_token_id,
        accepted_drafts=first.run.accepted_drafts + then.run.accepted_drafts,
        rejected_drafts=first.run.rejected_drafts + then.run.rejected_drafts,
    )
    return ch.Output(
        first.key,
        run,
        first.cached_tokens or then.cached_tokens,
        first.stations + then.stations,
        first.prompt_logprobs or then.prompt_logprobs,
        first.pooled or then.pooled,
    )
