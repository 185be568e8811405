"""A decode worker in compressed time: equal steps are taken many at once; blocks may be of any size. Torch-free.

Knows nothing of routers. It follows ``decode_worker.engine.scheduler``: oldest first, prompts in chunks mixed with
decodes, a growth reserve for newcomers, the youngest preempted and computed again. ``writers_wait``: a step that
prefills generates nothing, as in engines without chunked prefill. ``stepwise_decode.StepwiseDecode`` runs the
scheduler itself; docs/planning.md says where tests hold the two equal. The pool is the real one.

Times are exact: k decode steps of n sequences take k x (body(n) + sequence x n + context x C) + context x n x k (k
+ 1) / 2, where C is the tokens of KV read before.
"""

from __future__ import annotations

import math
from collections import deque
from heapq import heapify, heappop, heappush

from baton.kv.pages.pool import PageLease, PagePool
from baton.planner.costs.worker import WorkerCosts
from baton.planner.simulator.batch_member import BatchMember
from baton.planner.simulator.flight import Flight
from baton.protos.errors import PoolExhausted

RESERVE_SHARE = 8  # the growth reserve is at most this part of the pool, as in decode_worker.engine.scheduler


class CompressedDecode:
    """Simulates a decode worker; ``now``, its own clock, is the end of its last step in simulated seconds.

    ``busy`` is seconds in steps, ``generated`` counts output tokens.
    """

    def __init__(
        self,
        costs: WorkerCosts,
        block_tokens: int,
        max_batch: int,
        chunk_tokens: int,
        writers_wait: bool = False,
    ) -> None:
        self._mixed_steps = 0 if writers_wait else 1  # tokens that a writer gets in a step that reads
        self.costs, self.block, self.max_batch, self.chunk = costs, block_tokens, max_batch, chunk_tokens
        self.pool = PagePool(max(1, costs.kv_tokens // block_tokens), watched=False)
        self.now = 0.0
        self.preemptions = 0
        self.busy = 0.0
        self.generated = 0
        self._tick = 0
        self._context = 0  # tokens of KV that the writing members have together
        self._ages = 0
        self._writing = 0
        self._due: list[tuple[int, int, BatchMember]] = []
        self._full: list[tuple[int, int, BatchMember]] = []
        self._prefilling: deque[BatchMember] = deque()
        self._members: dict[int, BatchMember] = {}  # by age: oldest first
        self._waiting: deque[BatchMember] = deque()

    # ---- what the cluster asks of it ---------------------------------------------------------------------

    @property
    def sequences(self) -> int:
        """Returns the number of sequences in the batch, prefilling or decoding, and of preempted ones."""
        return len(self._members) + len(self._waiting)

    @property
    def prefilling(self) -> int:
        """Returns the number of prompts being prefilled here."""
        return len(self._prefilling)

    @property
    def prefilling_tokens(self) -> int:
        """Returns the prompt tokens still to be computed here."""
        return sum(m.prompt_left for m in self._prefilling)

    def continue_totals(self, before: CompressedDecode) -> None:
        """Goes on counting from the totals of ``before``."""
        self.busy, self.generated = before.busy, before.generated

    def reserve(self, flight: Flight) -> PageLease:
        """Returns a lease of pages for the prompt, leaving those that running sequences need soon.

        Raises PoolExhausted.
        """
        if self._waiting:
            raise PoolExhausted("preempted sequences wait for pages", "pages")
        blocks = -(-flight.prompt // self.block)
        reserve = min(len(self._members), self.pool.pages // RESERVE_SHARE)
        limit = (flight.prompt - 1) // self.block
        return self.pool.open(flight.full_blocks, blocks, reserve, limit)

    def join(self, flight: Flight, lease: PageLease, local: bool, now: float) -> None:
        """Adds a request to the batch from the next step on; ``local``: its prompt is to be prefilled here."""
        assert not self._members or self.now >= now, "advance it to now first: somebody may have ended"
        self.now = max(self.now, now)
        self._ages += 1
        prompt_left = flight.prompt - lease.held * self.block if local else 0
        member = BatchMember(flight, lease, self._ages, prompt_left)
        self._members[member.age] = member
        if prompt_left:
            self._prefilling.append(member)
        else:
            member.seal()
            self._write(member)

    def next_event(self) -> float:
        """Returns the simulated time at which a sequence ends, or needs a page, or a mixed step ends; infinity if
        nothing runs.
        """
        if not self._members:
            return math.inf
        if self._prefilling:
            return self.now + self._mixed_seconds(*self._mixed())
        return self.now + self._run_seconds(self._run_length())

    def advance(self, until: float) -> list[Flight]:
        """Takes every step that begins before ``until``; returns the requests that ended, their times set.

        The step in progress at ``until`` is taken whole: requests that come meanwhile join the next one.
        """
        ended: list[Flight] = []
        while self._members and self.now < until:
            if self._prefilling:
                self._take_mixed(ended)
            else:
                steps = self._run_length()
                if self.now + self._run_seconds(steps) > until:
                    steps = min(steps, self._steps_until(until))
                self._take_run(max(1, steps), ended)
        return ended

    def stop(self) -> None:
        """Ends the worker, and records in each sequence how many tokens it had generated."""
        for member in self._members.values():
            if not member.prompt_left:
                member.wrote(self._tick)

    # ---- steps ---------------------------------------------------------------------------------------------

    def _step_base(self) -> float:
        return self.costs.step_seconds(0, 0.0, self._writing, self._context)

    def _run_seconds(self, steps: int) -> float:
        context = self.costs.context_seconds(self._writing)
        return steps * self._step_base() + context * self._writing * steps * (steps + 1) / 2

    def _run_length(self) -> int:
        """Steps until a member ends or needs a page."""
        while self._due and self._due[0][2].gone:
            heappop(self._due)
        while self._full and self._full[0][2].gone:
            heappop(self._full)
        first = min(self._due[0][0], self._full[0][0] if self._full else self._due[0][0])
        return max(1, first - self._tick)

    def _steps_until(self, until: float) -> int:
        """The fewest steps that end at or after ``until``."""
        context = self.costs.context_seconds(self._writing)
        a, b, c = context * self._writing / 2, self._step_base(), self.now - until
        linear = b + a
        root = -c / linear if a <= 0 else (-linear + math.sqrt(linear * linear - 4 * a * c)) / (2 * a)
        return max(1, math.ceil(root - 1e-9))

    def _take_run(self, steps: int, ended: list[Flight]) -> None:
        seconds = self._run_seconds(steps)
        self.now += seconds
        self.busy += seconds
        self._after(steps, ended)

    def _after(self, steps: int, ended: list[Flight]) -> None:
        """``steps`` tokens were written by each that writes."""
        self._tick += steps
        self._context += steps * self._writing
        self.generated += steps * self._writing
        while self._due and self._due[0][0] <= self._tick:
            member = heappop(self._due)[2]
            if not member.gone:
                self._end(member, ended)
        while self._full and self._full[0][0] <= self._tick:
            member = heappop(self._full)[2]
            if not member.gone:
                self._grow(member)
        if self._waiting:
            self._resume()

    def _mixed(self) -> tuple[int, float]:
        """Prompt tokens of the next chunk step, and their attention pairs."""
        budget, pairs = self.chunk, 0.0
        for member in self._prefilling:
            take = min(member.prompt_left, budget)
            before = member.tokens - member.prompt_left
            pairs += take * (before + take / 2)
            budget -= take
            if budget == 0:
                break
        return self.chunk - budget, pairs

    def _mixed_seconds(self, tokens: int, pairs: float) -> float:
        writing = self._writing * self._mixed_steps
        return self.costs.step_seconds(tokens, pairs, writing, self._mixed_steps * (self._context + writing))

    def _take_mixed(self, ended: list[Flight]) -> None:
        tokens, pairs = self._mixed()
        seconds = self._mixed_seconds(tokens, pairs)
        self.now += seconds
        self.busy += seconds
        done: list[BatchMember] = []
        while tokens:
            member = self._prefilling[0]
            take = min(member.prompt_left, tokens)
            member.prompt_left -= take
            tokens -= take
            if member.prompt_left == 0:
                done.append(self._prefilling.popleft())
        self._after(self._mixed_steps, ended)
        for member in done:
            if not member.gone:
                self._finish_reading(member, ended)

    def _finish_reading(self, member: BatchMember, ended: list[Flight]) -> None:
        """Moves a member on whose prompt is computed, and with it the first token."""
        member.seal()
        flight = member.flight
        flight.written += 1
        self.generated += 1
        if flight.first_token < 0:
            flight.first_token = self.now
        if flight.written >= flight.outputs:
            member.gone = True
            self._leave(member, ended)
        else:
            self._write(member)

    # ---- members -------------------------------------------------------------------------------------------

    def _write(self, member: BatchMember) -> None:
        """Adds a member to those that write a token per step; it has its first one already."""
        member.begin(self._tick)
        self._writing += 1
        self._context += member.tokens - 1
        heappush(self._due, (member.due, member.age, member))
        self._watch(member)

    def _watch(self, member: BatchMember) -> None:
        """Note the tick at which the pages it has will be full."""
        room = len(member.lease.pages) * self.block - (member.tokens - 1 + self._tick - member.start)
        if self._tick + room < member.due:
            heappush(self._full, (self._tick + max(1, room), member.age, member))

    def _grow(self, member: BatchMember) -> None:
        while True:
            try:
                member.lease.extend(1)
            except PoolExhausted:
                victim = self._members[next(reversed(self._members))]
                if victim is self._members[next(iter(self._members))]:
                    heappush(self._full, (self._tick + 1, member.age, member))
                    return
                self._preempt(victim)
                if victim is member:
                    return
            else:
                self._watch(member)
                return

    def _settle(self, member: BatchMember) -> None:
        """Brings a member's counters up to date, and takes it out of the sums."""
        if not member.prompt_left:
            member.wrote(self._tick)
            self._writing -= 1
            self._context -= member.tokens - 1
        else:
            self._prefilling.remove(member)

    def _preempt(self, member: BatchMember) -> None:
        """Takes a member's pages. Its full blocks, the answer's too, stay cached as in the real pool."""
        self._settle(member)
        member.gone = True
        computed = member.tokens - max(1, member.prompt_left)
        member.lease.seal_run(0, member.blocks(computed, self.block))
        member.lease.close()
        del self._members[member.age]
        again = BatchMember(member.flight, member.lease, member.age, member.tokens)
        self._waiting.append(again)
        self._waiting = deque(sorted(self._waiting, key=lambda m: m.age))
        self.preemptions += 1
        member.flight.preemptions += 1

    def _resume(self) -> None:
        while self._waiting:
            member = self._waiting[0]
            tokens = member.tokens
            reserve = min(len(self._members), self.pool.pages // RESERVE_SHARE)
            limit = (tokens - 1) // self.block
            try:
                lease = self.pool.open(member.blocks(tokens, self.block), -(-tokens // self.block), reserve, limit)
            except PoolExhausted:
                return
            member.lease, member.prompt_left = lease, tokens - lease.held * self.block
            self._members[member.age] = member
            self._members = dict(sorted(self._members.items()))
            self._prefilling.append(self._waiting.popleft())

    def _end(self, member: BatchMember, ended: list[Flight]) -> None:
        member.gone = True
        self._settle(member)
        self._leave(member, ended)

    def _leave(self, member: BatchMember, ended: list[Flight]) -> None:
        member.lease.close()
        del self._members[member.age]
        member.flight.last_token = self.now
        ended.append(member.flight)
        if len(self._due) > 64 + 4 * len(self._members):
            self._due = [entry for entry in self._due if not entry[2].gone]
            heapify(self._due)
