"""The workers of the policies' replay: a request on its way, and a worker's batch, line, pages and cache.

Knows nothing of policies, queues or events. A worker steps by a profile's cost curve: continuous batching, prompts
in chunks, shortest rest first, an LRU prefix cache in the trace's blocks.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from baton.cost.curves import decode_seconds
from baton.cost.profiles import PacedProfile
from baton.prefill_worker.engine.scheduler import AGING_TOKENS_PER_S
from baton.protos.measurements import WorkerLoad
from baton.protos.nouns import BLOCK_TOKENS, KvLayout, WorkerInfo
from baton.router.policies import Candidate, RoutingDecision

HASHED = 512  # tokens of a block of the trace
PER_HASHED = HASHED // BLOCK_TOKENS
LOCAL_CHUNK = 512
SLO_TPOT_S = 0.030


class Call(msgspec.Struct):
    """A request of the trace on its way. Times on the virtual clock."""

    arrived: float
    tokens: int
    outputs: int
    hashes: list[int]
    slo_ttft_s: float
    placed: float = 0.0
    uncached: int = 0
    read_s: float = 0.0
    first: float = 0.0
    ended: float = 0.0
    left: int = 0
    written: int = 0

    @property
    def good(self) -> bool:
        """Both SLOs were met."""
        tpot = (self.ended - self.first) / max(1, self.outputs - 1)
        return self.first - self.arrived <= self.slo_ttft_s and tpot <= SLO_TPOT_S

    @property
    def pages(self) -> int:
        """Returns the number of pages of 16 tokens for prompt and answer."""
        return -(-(self.tokens + self.outputs) // BLOCK_TOKENS)


class Worker:
    """One worker's batch, line of prompts, pages and cache."""

    def __init__(self, name: str, role: str, profile: PacedProfile) -> None:
        layout = KvLayout("bytes", (), BLOCK_TOKENS * profile.kv_bytes_per_token, "bytes")
        self.info = WorkerInfo(
            name, "1", role, "a:1", "m", "f", layout, profile.max_model_len, profile.vocab_size, (), profile.pages
        )
        self.profile = profile
        self.cache: OrderedDict[int, None] = OrderedDict()
        self.reading: list[Call] = []
        self.writing: list[Call] = []
        self.placed: dict[int, RoutingDecision] = {}
        self.busy = False
        self.pages = 0
        self.full_until = -1.0
        self.sequences = self.pending_prompts = self.pending_tokens = 0
        self.load = WorkerLoad()

    def beat(self) -> None:
        """Publishes the worker's load, as a heartbeat does."""
        self.load = WorkerLoad(
            running=len(self.writing),
            waiting=len(self.reading),
            waiting_tokens=sum(c.left for c in self.reading),
            leased_pages=self.pages,
            step_curve=self.profile.step,
            transfer_curve=self.profile.transfer,
        )

    def candidate(self, now: float) -> Candidate:
        """Returns the worker as the router's view would show it."""
        return Candidate(
            self.info,
            self.load,
            self.sequences,
            self.pending_prompts,
            self.pending_tokens,
            self.full_until > now,
        )

    def held(self, call: Call) -> int:
        """Leading blocks (of 16) of the prompt in its cache."""
        count = next((i for i, h in enumerate(call.hashes) if h not in self.cache), len(call.hashes))
        return min(count * PER_HASHED, (call.tokens - 1) // BLOCK_TOKENS)

    def keep(self, call: Call) -> None:
        """The prompt's blocks are cached now; the oldest give way."""
        for block in call.hashes:
            self.cache[block] = None
            self.cache.move_to_end(block)
        room = max(0, self.info.pages - self.pages) // PER_HASHED
        while len(self.cache) > room:
            self.cache.popitem(last=False)

    def step(self, now: float) -> tuple[float, list[Call], list[Call]]:
        """Seconds of the next step; prompts it finishes, sequences that advance. Shortest rest first, aged."""
        curve, budget = self.profile.step, LOCAL_CHUNK if self.writing else self.profile.prefill_chunk
        seconds, done = 0.0, []
        for call in sorted(self.reading, key=lambda c: c.left - AGING_TOKENS_PER_S * (now - c.placed)):
            if not budget:
                break
            taken = min(budget, call.left)
            before = call.tokens - call.left
            seconds += curve.prefill_token * taken + curve.prefill_pair * taken * (before + taken / 2)
            call.left, budget = call.left - taken, budget - taken
            if not call.left:
                self.reading.remove(call)
                done.append(call)
        context = sum(c.tokens + c.written for c in self.writing)
        return seconds + decode_seconds(curve, len(self.writing), context), done, list(self.writing)
