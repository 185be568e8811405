"""The batch of a decode worker in compressed time: who is in it, with which pages. Torch-free.

Knows nothing of seconds: a tick is a step. It follows ``decode_worker.engine.scheduler``: oldest first, prompts in
chunks, a growth reserve for newcomers, the youngest preempted and computed again. The pool is the real one.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from heapq import heapify, heappop, heappush

from baton.kv.pages.pool import PageLease, PagePool
from baton.planner.simulator.batch_member import BatchMember
from baton.planner.simulator.flight import Blocks, Flight
from baton.protos.errors import PoolExhausted

RESERVE_SHARE = 8  # the growth reserve is at most this part of the pool, as in decode_worker.engine.scheduler


class CompressedBatch:
    """Holds the members of a batch; blocks have ``block_tokens`` tokens.

    ``tick`` counts steps; ``writing`` members write a token in each, and have ``context`` tokens of KV together.
    ``starved``: the only member found no page.
    """

    def __init__(self, pool: PagePool, block_tokens: int, chunk_tokens: int) -> None:
        self.pool, self.block, self.chunk = pool, block_tokens, chunk_tokens
        self.tick = self.context = self.writing = self.preemptions = 0
        self.starved = False
        self.members: dict[int, BatchMember] = {}  # by age: oldest first
        self.waiting: deque[BatchMember] = deque()  # preempted, oldest first
        self.reading: deque[BatchMember] = deque()  # with prompt tokens to compute, oldest first
        self._joining: list[BatchMember] = []  # from the next step on
        self._due: list[tuple[int, int, BatchMember]] = []
        self._full: list[tuple[int, int, BatchMember]] = []
        self._ages = 0

    @property
    def sequences(self) -> int:
        """Returns the number of sequences in the batch or preempted."""
        return len(self.members) + len(self._joining) + len(self.waiting)

    @property
    def prompts(self) -> list[int]:
        """Returns the tokens that are left of each prompt which is computed here."""
        return [m.prompt_left for m in (*self.reading, *self._joining) if m.prompt_left]

    def reserve(self, flight: Flight) -> PageLease:
        """Returns a lease of pages for the prompt, leaving those that running sequences need soon.

        Raises PoolExhausted.
        """
        if self.waiting:
            raise PoolExhausted("preempted sequences wait for pages", "pages")
        return self._open(flight.full_blocks, flight.prompt)

    def join(self, flight: Flight, lease: PageLease, local: bool) -> None:
        """Adds a request from the next step on; ``local``: its prompt is to be computed here."""
        self._ages += 1
        prompt_left = flight.prompt - lease.held * self.block if local else 0
        member = BatchMember(flight, lease, self._ages, prompt_left)
        if not prompt_left:
            member.seal(flight.prompt, self.block)
        self._joining.append(member)

    def plan(self) -> int:
        """Prepares the next step as the real scheduler plans it; returns how many steps are alike from it on.

        Preempted members that fit come back, then writers whose pages are full get another, oldest first.
        """
        self.starved = False
        for member in self._joining:
            self.members[member.age] = member
            if member.prompt_left:
                self.reading.append(member)
            else:
                self._write(member)
        self._joining.clear()
        if self.waiting:
            self._resume()
        before = len(self.waiting)
        while self._full and self._full[0][0] <= self.tick and not self.starved:
            member = heappop(self._full)[2]
            if not member.gone:
                self._grow(member)
        if self.reading or self.starved or len(self.waiting) > before:  # who was preempted may fit after one step
            return 1
        return self._run_length()

    def chunk_and_pairs(self) -> tuple[int, float]:
        """Returns the prompt tokens of the next step, and their attention pairs."""
        budget, pairs = self.chunk, 0.0
        for member in self.reading:
            take = min(member.prompt_left, budget)
            before = member.tokens - member.prompt_left
            pairs += take * (before + take / 2)
            budget -= take
            if budget == 0:
                break
        return self.chunk - budget, pairs

    def write(self, steps: int) -> list[BatchMember]:
        """Counts ``steps`` tokens for each that writes; returns those whose answers end, gone from the batch."""
        self.tick += steps
        self.context += steps * self.writing
        ended = []
        while self._due and self._due[0][0] <= self.tick:
            member = heappop(self._due)[2]
            if not member.gone:
                self._settle(member)
                self._leave(member)
                ended.append(member)
        return ended

    def read(self) -> list[BatchMember]:
        """Counts the next step's prompt tokens as computed, oldest first; returns the members that are complete."""
        done, tokens = [], self.chunk
        while tokens and self.reading:
            member = self.reading[0]
            take = min(member.prompt_left, tokens)
            member.prompt_left -= take
            member.seal(member.tokens - member.prompt_left, self.block)
            tokens -= take
            if member.prompt_left == 0:
                done.append(self.reading.popleft())
        return done

    def finish_reading(self, member: BatchMember) -> bool:
        """Gives a member its first token, whose prompt is computed; returns whether its answer ends with it."""
        member.flight.written += 1
        if member.flight.written >= member.flight.outputs:
            self._leave(member)
            return True
        self._write(member)
        return False

    def stop(self) -> None:
        """Records in each sequence how many tokens it had generated."""
        for member in self.members.values():
            if not member.prompt_left:
                member.wrote(self.tick)

    # ---- pages ---------------------------------------------------------------------------------------------

    def _open(self, blocks: Blocks, tokens: int) -> PageLease:
        reserve = min(len(self.members) + len(self._joining), self.pool.pages // RESERVE_SHARE)
        return self.pool.open(blocks, -(-tokens // self.block), reserve, (tokens - 1) // self.block)

    def _grow(self, member: BatchMember) -> None:
        while True:
            try:
                member.lease.extend(1)
            except PoolExhausted:
                victim = self.members[next(reversed(self.members))]
                if victim is self.members[next(iter(self.members))]:
                    self.starved = True
                    heappush(self._full, (self.tick, member.age, member))
                    return
                self._preempt(victim)
                if victim is member:
                    return
            else:
                self._watch(member)
                return

    def _preempt(self, member: BatchMember) -> None:
        """Takes a member's pages."""
        self._settle(member)
        self._leave(member)
        insort(self.waiting, BatchMember(member.flight, member.lease, member.age, 0), key=lambda m: m.age)
        self.preemptions += 1

    def _resume(self) -> None:
        while self.waiting:
            member = self.waiting[0]
            tokens = member.tokens
            try:
                lease = self._open(member.blocks(0, tokens // self.block), tokens)
            except PoolExhausted:
                return
            self.waiting.popleft()
            self.members[member.age] = member
            self.members = dict(sorted(self.members.items()))
            member.lease, member.sealed, computed = lease, lease.held, lease.held * self.block
            if computed == tokens - 1 >= member.flight.prompt:
                self._write(member)  # only its last token is to be computed
            else:
                member.prompt_left = tokens - computed
                insort(self.reading, member, key=lambda m: m.age)

    # ---- members -------------------------------------------------------------------------------------------

    def _run_length(self) -> int:
        """Steps until a member ends or needs a page."""
        while self._due and self._due[0][2].gone:
            heappop(self._due)
        while self._full and self._full[0][2].gone:
            heappop(self._full)
        first = min(self._due[0][0], self._full[0][0] if self._full else self._due[0][0])
        return max(1, first - self.tick)

    def _write(self, member: BatchMember) -> None:
        """Adds a member to those that write a token per step; it has its first one already."""
        member.begin(self.tick)
        self.writing += 1
        self.context += member.tokens - 1
        heappush(self._due, (member.due, member.age, member))
        self._watch(member)

    def _watch(self, member: BatchMember) -> None:
        """Note the tick at which the pages it has will be full."""
        room = len(member.lease.pages) * self.block - (member.tokens - 1 + self.tick - member.start)
        if self.tick + room < member.due:
            heappush(self._full, (self.tick + room, member.age, member))

    def _settle(self, member: BatchMember) -> None:
        """Brings a member's counters up to date, and takes it out of the sums."""
        if not member.prompt_left:
            member.wrote(self.tick)
            self.writing -= 1
            self.context -= member.tokens - 1
        else:
            self.reading.remove(member)

    def _leave(self, member: BatchMember) -> None:
        """Gives a member's pages back; its full blocks, the answer's too, stay cached as in the real pool."""
        member.gone = True
        member.seal(member.tokens - max(1, member.prompt_left), self.block)
        member.lease.close()
        del self.members[member.age]
        if len(self._due) > 64 + 4 * len(self.members):
            self._due = [entry for entry in self._due if not entry[2].gone]
            heapify(self._due)
