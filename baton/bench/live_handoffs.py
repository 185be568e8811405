"""Measures the fixed costs of KV handoffs between two live workers, beside the time of steps and bytes.

Knows nothing of routers' HTTP: a request begins with its Admit. The figures are valid on an idle cluster only.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from baton.cluster.membership import PolledRoster
from baton.cost.profiles import Overhead
from baton.planner.figures import percentile
from baton.protos.errors import NoWorker
from baton.protos.measurements import TransferCurve
from baton.protos.nouns import WorkerInfo
from baton.protos.v1 import worker_pb2 as w
from baton.router.workers.decode_session import DecodeLease
from baton.router.workers.link import DecodeLink, WorkerLink
from baton.router.workers.link_table import LinkTable

# Tokens of the prompts that are handed over, doubling so that a line is fitted well.
LENGTHS = (64, 256, 512, 1024, 2048, 4096, 8192)
TIMES = 2  # handoffs of each length, because the first one may be disturbed
CONNECT_S = 10.0  # seconds that a worker has to be connected
LOOK_S = 0.02  # seconds between looks whether it is connected
Told = Callable[[str], None]


class PromptTimes(msgspec.Struct, frozen=True):
    """The times of one handed-over prompt, in seconds."""

    tokens: int  # of the prompt
    size: int  # bytes of KV that were sent
    admitted_s: float  # until the decode worker had admitted it
    answered_s: float  # until its first token came back
    read_s: float  # of those, spent in the queue and in prefill


class PromptMaker(Protocol):
    """Makes prompts and requests for measurements."""

    salt: bytes  # tenant's salt of the prompts' block hashes
    longest: int  # tokens of a prompt, at most

    def tokens(self, count: int) -> list[int]:
        """Returns ``count`` arbitrary token ids."""

    def admit(self, prompt: list[int], outputs: int, local: bool) -> w.Admit:
        """Returns the message that admits ``prompt`` for ``outputs`` tokens; ``local`` has the decode worker
        prefill it.
        """


async def handoffs(links: LinkTable, decode: DecodeLink, prompts: PromptMaker, told: Told) -> list[PromptTimes]:
    """Returns the times of prompts of several lengths that a prefill worker reads for ``decode``; [] without a
    prefill worker.

    Progress is passed to ``told``. Raises NoWorker if the prefill worker can't be reached.
    """
    reader = next((k for k in links if k.info.role == "prefill" and k.info.state == "ready"), None)
    if reader is None:
        told("no prefill worker: transfers are not measured")
        return []
    await until_up(reader)
    found: list[PromptTimes] = []
    for length in (n for n in LENGTHS if n <= prompts.longest):
        found += [await handoff(links, reader.info.worker_id, decode, prompts, length) for _ in range(TIMES)]
        told(f"{length} prompt tokens handed over: {found[-1].size} bytes")
    return found


async def handoff(
    links: LinkTable, reader: str, decode: DecodeLink, prompts: PromptMaker, length: int
) -> PromptTimes:
    """Hands a prompt of ``length`` tokens over from prefill worker ``reader`` to ``decode``; returns its times."""
    prompt = prompts.tokens(length)
    since = time.monotonic()
    async with decode.admit(prompts.admit(prompt, 1, local=False), _drop, lambda: "retry") as lease:
        admitted = time.monotonic()
        request = _prefill(prompts, prompt, lease, decode.info)
        reply = await links.prefill(reader).prefill(request, None)
        answered = time.monotonic()
        await lease.ended
    read = sum(s.seconds for s in reply.stations if s.name in ("queue", "prefill"))
    return PromptTimes(length, reply.shipped_bytes, admitted - since, answered - since, read)


def overhead(handed: Sequence[PromptTimes], transfer: TransferCurve, chunk_tokens: int) -> Overhead:
    """Returns the fixed seconds of requests and handoffs, from the times of ``handed`` prompts.

    A request's is the time from Admit to Admitted; a handoff's is the rest that is neither prefill nor transfer.
    Only prompts of one chunk are used, whose transfer isn't hidden behind prefill; the first of each length isn't
    counted if there is a second, because it includes connecting.
    """
    known, again = set[int](), list[PromptTimes]()
    for one in handed:
        if one.tokens <= chunk_tokens and one.tokens in known:
            again.append(one)
        known.add(one.tokens)
    found = again or handed
    if not found:
        return Overhead()
    trip = undisturbed([h.admitted_s for h in found])
    rest = [h.answered_s - h.read_s - trip - transfer.fixed - transfer.per_byte * h.size for h in found]
    return Overhead(request=trip, handoff=max(0.0, undisturbed(rest)))


def undisturbed(seconds: Sequence[float]) -> float:
    """Returns the lower quartile of ``seconds``, because other work on the machine only adds time."""
    return percentile(sorted(seconds), 0.25)


def transfer_curve(roster: PolledRoster) -> TransferCurve:
    """Returns the mean of the transfer curves that the prefill workers fitted to their own handoffs; zeros without
    one.
    """
    found = [e.load.transfer_curve for e in roster.snapshot().values() if e.load.transfer_curve is not None]
    if not found:
        return TransferCurve(0.0, 0.0)
    count = len(found)
    return TransferCurve(sum(c.fixed for c in found) / count, sum(c.per_byte for c in found) / count)


async def until_up(link: WorkerLink) -> None:
    """Waits until the worker behind ``link`` is connected. Raises NoWorker after CONNECT_S."""
    deadline = time.monotonic() + CONNECT_S
    while not link.up:
        if time.monotonic() > deadline:
            raise NoWorker(f"{link.info.worker_id} can't be reached at {link.info.address}")
        await asyncio.sleep(LOOK_S)


def _prefill(prompts: PromptMaker, prompt: list[int], lease: DecodeLease, to: WorkerInfo) -> w.PrefillRequest:
    return w.PrefillRequest(
        request_id=lease.request_id,
        model_id=to.model_id,
        lease=lease.lease,
        epoch=lease.epoch,
        decode_address=to.address,
        decode_incarnation=to.incarnation,
        token_ids=prompt,
        prompt_tokens=len(prompt),
        held_blocks=lease.held_blocks,
        sampling=prompts.admit(prompt, 1, local=False).sampling,
        tenant_salt=prompts.salt,
    )


def _drop(output: w.RequestTokens) -> None:
    """Ignores the request's tokens."""
