"""The prefill engine's loop: computes prompts chunk by chunk, and announces each block as soon as it exists.
Torch-free.

Knows nothing of gRPC or of who receives the blocks. Single-threaded: pages change hands only between steps.

    Prefill -> job -> chunk -> chunk + first token -> PrefillDone -> (the I/O process ships) -> SendClosed
       └ BlocksReady ┴ BlocksReady ┘        pages stay pinned from the first BlocksReady to SendClosed
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from baton.engine.abilities import copies_left, ranks_of
from baton.engine.plan import SequenceStep, StepPlan
from baton.engine.request_checks import check_request
from baton.engine.states import AttentionReach
from baton.engine.steps.handlers import Table
from baton.engine.steps.isolate import StepOutcome
from baton.engine.steps.loop import StepLoop
from baton.engine.steps.parts import EngineParts
from baton.engine.steps.sharing import prefixes_in_the_way
from baton.kv.layout import prefix
from baton.kv.layout.room import reading_room
from baton.kv.layout.selection import chosen_from, prompt_selection_of
from baton.kv.layout.state import state_hashes
from baton.kv.pages.pool import PageLease
from baton.kv.pages.tables import parts_of, table_hash
from baton.prefill_worker.engine.scheduler import PrefillJob, PrefillScheduler
from baton.protos import channel as ch
from baton.protos.errors import BatonError, Cancelled, Draining, PoolExhausted, RankLost, to_info
from baton.protos.nouns import Station

CHUNK_PARTS = 4  # a step of a quarter of a chunk tells how long a chunk takes; shorter ones mostly read weights
# A chunk's time grows by so much a step at most: the shortest of late steps is what it takes by itself, and others
# on the same cores lengthen many.
CHUNK_GROWS = 1.05


class Shipment:
    """The blocks of one job that the decode worker lacks, and the pages that the I/O process may be reading."""

    def __init__(self, job: PrefillJob, message: ch.Prefill, windows: Sequence[int] = ()):
        self.job = job
        self._parts = parts_of(windows, job.tokens, job.block_tokens)
        self._names = job.hashes if job.kept is None else job.kept.named(job.hashes)
        self._held_blocks = message.held_blocks
        self._received = frozenset(message.received_blocks)
        self._next = 0
        self._pinned: list[PageLease] = []
        self.read: list[int] = []  # pages on the host that were made whole for the I/O process
        self._state_told = False

    def ready(self, resident: bool) -> tuple[ch.ShipBlock, ...]:
        """Returns the blocks that were finished since the last call; pins their pages until ``release``.

        ``resident`` says that the blocks are also on the device. After the prompt's last token the pages of a
        recurrent state follow.
        """
        computed = self.job.sequence.computed
        if self.job.kept is not None and computed < self.job.tokens:
            return ()  # what is chosen isn't known
        blocks = computed // self.job.block_tokens if computed < self.job.tokens else len(self.job.hashes)
        fresh = tuple(self._block(i, resident) for i in range(self._next, blocks) if self._wanted(i))
        fresh += tuple(self._further(range(self._next, blocks), resident))
        self._next = max(self._next, blocks)
        if fresh:
            self._pin(self.job.held_lease)
        return fresh + self._state() if computed == self.job.tokens else fresh

    def states_of(self, blocks: Sequence[ch.ShipBlock]) -> list[int]:
        """Returns the pages of recurrent state among ``blocks``, which follow the prompt's."""
        if self.job.states is None:
            return []
        return [block.page for block in blocks if block.index >= len(self.job.hashes)]

    def _state(self) -> tuple[ch.ShipBlock, ...]:
        """Returns, once, the pages of the state after the last token, as blocks that follow the prompt's."""
        states = self.job.states
        if states is None or self._state_told:
            return ()
        self._state_told, lease, first = True, states.current, len(self.job.hashes)
        assert lease is not None, "a prompt that was read has a state"
        hashes = state_hashes(self.job.hashes[-1], len(lease.pages))
        found = zip(range(first, first + len(lease.pages)), lease.pages, hashes, strict=True)
        fresh = tuple(ch.ShipBlock(*block, 0) for block in found if self._wanted(block[0]))
        if fresh:
            self._pin(lease)
        return fresh

    def _pin(self, lease: PageLease) -> None:
        if lease not in self._pinned:
            lease.hold()
            self._pinned.append(lease)

    @property
    def unread(self) -> int:
        """Returns how many pages may still be announced while the prompt is computed."""
        wanted = len(self.job.hashes) - self._held_blocks - len(self._received)
        return max(0, wanted - len(self.read))

    @property
    def pinned(self) -> bool:
        """Returns whether the I/O process was told of any pages."""
        return bool(self._pinned)

    def close(self) -> None:
        """Closes the job's lease; pages that the I/O process was told of stay pinned until ``release``."""
        self.job.close()

    def release(self) -> None:
        """Unpins the pages, because the I/O process no longer reads them."""
        for lease in self._pinned:
            lease.release()
        self._pinned = []

    def _wanted(self, index: int) -> bool:
        if self.job.kept is not None and index in range(*self.job.kept.gap):
            return False
        return index >= self._held_blocks and index not in self._received

    def _further(self, blocks: range, resident: bool) -> Iterator[ch.ShipBlock]:
        """Yields the pages of finished ``blocks`` in further tables that the answer's first token sees."""
        for part, table in zip(self._parts, self.job.held_lease.tables, strict=True):
            for block in blocks:
                index = part.at + block - part.first
                if block >= part.first and self._wanted(index):
                    name = table_hash(self.job.hashes[block], part.number)
                    yield ch.ShipBlock(index, table[block], name, self._tokens_of(block), resident)

    def _tokens_of(self, block: int) -> int:
        size = self.job.block_tokens
        return min(size, self.job.tokens - block * size)

    def _block(self, index: int, resident: bool) -> ch.ShipBlock:
        page, tokens = self.job.held_lease.pages[index], self._tokens_of(index)
        return ch.ShipBlock(index, page, self._names[index], tokens, resident)


class PrefillLoop(StepLoop):
    """The engine loop of a prefill worker: receives prompts, and sends their blocks and first tokens.

    A step computes at most ``chunk_tokens`` tokens of at most ``max_batch`` prompts.
    """

    role = "prefill"

    def __init__(self, parts: EngineParts, chunk_tokens: int = 512, max_batch: int = 64):
        super().__init__(parts)
        most = reading_room(self.spec.layout, chunk_tokens)
        self._reach = AttentionReach.of(self.spec.layout, grows=True, most=most)
        self.scheduler = PrefillScheduler(
            self.pool, chunk_tokens, max_batch, rules=parts.rules, reach=self._reach, may_start=self._has_room
        )
        self.shipments: dict[int, Shipment] = {}
        ranks = ranks_of(parts.runner)
        self._hosts_send = bool(ranks is not None and ranks.senders)
        self._hit_tokens = self._asked_tokens = 0
        self._chunk_s = 0.0  # seconds by itself, as late steps show; 0: none was long enough

    def beat(self) -> bool:
        """Plans and runs one step and announces its blocks and first tokens; returns False if there was nothing to
        compute.
        """
        plan = self.scheduler.plan(self.clock())
        if not plan.items:
            return self._made_way()
        if not self._hosts_send:
            plan = self._announced(plan)
        outcome = self.compute(plan)
        self._tell_chunk(sum(len(item.tokens) for item in plan.items), outcome.seconds)
        for item in plan.items:
            self._advance(item, outcome)
        return True

    def _announced(self, plan: StepPlan) -> StepPlan:
        """Announces the cached blocks of the plan's prompts, which leave while it is computed; returns the plan
        without the prompts that fail so.
        """
        return StepPlan(tuple([item for item in plan.items if self._announce(item.seq)]))

    def _has_room(self, key: int) -> bool:
        """Returns whether the host has room for copies of all blocks that prompt ``key`` and those that were begun
        will ship, or whether none was: then nothing else keeps it.
        """
        left = copies_left(self.mirror)
        if left is None:
            return True
        begun = {seq: shipment for seq, shipment in self.shipments.items() if shipment.job.lease is not None}
        unread = sum(shipment.unread for seq, shipment in begun.items() if seq in self.scheduler.jobs)
        return not begun or unread + self.shipments[key].unread <= left

    def _tell_chunk(self, tokens: int, seconds: float) -> None:
        """Tells engines on the same cores how long a whole chunk takes, from a step that was a good part of one."""
        chunk = self.scheduler.chunk_tokens
        if tokens * CHUNK_PARTS < chunk:
            return
        took = seconds * chunk / tokens
        self._chunk_s = min(took, CHUNK_GROWS * self._chunk_s) if self._chunk_s else took
        self.parts.cores.tell_chunk(self._chunk_s)

    def _made_way(self) -> bool:
        """Fails the last of several prompts that lack pages for their next chunks, so that others get its pages, or
        one that pinned prefixes keep from starting; returns whether it did.
        """
        stuck, shipping = self.scheduler.stuck, len(self.shipments) - len(self.scheduler.jobs)
        if shipping:
            return False  # pages that are being read come free
        if self.scheduler.starved is not None and self.parts.sharing.only_keeps_prefixes:
            self.fail(self.scheduler.starved, prefixes_in_the_way())
            return True
        if len(stuck) < 2:
            return False
        text = "pages that prompts here will need were taken by pinned prefixes or fetches; ask another worker"
        self.fail(stuck[-1], PoolExhausted(text, "pages"))
        return True

    # ---- messages ----

    def handlers(self) -> Table:
        """Returns the handlers of the messages that a prefill worker's I/O process sends."""
        return (
            self.shared_handlers()
            .on(ch.Prefill, self._on_prefill)
            .on(ch.SendClosed, self._on_send_closed)
            .on(ch.Cancel, self._on_cancel)
            .covering(ch.ToPrefillEngine)
        )

    def _on_prefill(self, message: ch.Prefill) -> None:
        if self.draining:
            raise Draining("this prefill worker is draining; ask another")
        request = message.request
        self.parts.adapters.require(request.adapter_id)
        check_request(request, self.spec, self.pool.pages, self.scheduler.chunk_tokens)
        root = prefix.root(
            self.spec.fingerprint, self.spec.layout.fidelity, request.adapter_id, request.tenant_salt
        )
        sequence = self.sequence(message.key, request)
        size = self.pool.block_tokens
        hashes = prefix.chain(root, request.token_ids, size)
        kept = prompt_selection_of(self.spec.layout, chosen_from(self.spec.layout, request, is_local=False))
        job = PrefillJob(sequence, hashes, self.clock(), size, self._shipped_from(message), kept, message.whole)
        if message.whole:
            self._require_pages(len(hashes) * self._reach.tables)
        self.shipments[message.key] = Shipment(job, message, self.scheduler.reach_of(job).windows)
        self.scheduler.add(job)

    def _require_pages(self, pages: int) -> None:
        """Raises PoolExhausted if this worker can never lease ``pages`` pages at once."""
        if pages > self.pool.pages:
            text = (
                f"the decode worker wants whole blocks, {pages} pages; this pool has {self.pool.pages}: ask another"
            )
            raise PoolExhausted(text, "pages")

    def _shipped_from(self, message: ch.Prefill) -> int:
        """Returns the first block that the receiver may want, apart from sink blocks, which every token sees."""
        first, received = max(message.held_blocks, self._reach.sunk), frozenset(message.received_blocks)
        while first in received:
            first += 1
        return first

    def _on_cancel(self, message: ch.Cancel) -> None:
        if message.key in self.scheduler.jobs:
            self.fail(message.key, Cancelled(f"cancelled: {message.reason}"))

    def _on_send_closed(self, message: ch.SendClosed) -> None:
        self.scheduler.remove(message.key)
        self.parts.adapters.release(message.key)
        shipment = self.shipments.pop(message.key, None)
        if shipment is not None:
            if self.mirror is not None:
                self.mirror.let_go(shipment.read)
            shipment.close()
            shipment.release()

    def fail(self, key: int, error: Exception) -> None:
        """Ends the prompt with channel key ``key`` and reports ``error`` to the I/O process."""
        self.scheduler.remove(key)
        self.parts.adapters.release(key)
        shipment = self.shipments.get(key)
        if shipment is not None:
            shipment.close()
            if not shipment.pinned:
                del self.shipments[key]
        self.channel.send(ch.PrefillFailed(key, to_info(error)))

    # ---- after a step ----

    def _advance(self, item: SequenceStep, outcome: StepOutcome) -> None:
        if item.seq in outcome.failed:
            self.fail(item.seq, outcome.failed[item.seq])
            return
        job = self.scheduler.jobs[item.seq]
        before = job.sequence.computed
        job.advance(len(item.tokens))
        job.sequence.score(before, outcome.scored.get(item.seq, ()))
        job.sequence.pool(before, job.sequence.computed, outcome.pooled.get(item.seq))
        if item.watch is not None:
            job.choose(outcome.observed[item.seq].tolist())
        job.held_lease.slide(job.sequence.computed, job.shipped_from)
        on_device = self.mirror is not None and self.mirror.shared is not None  # for its step is done
        if self._announce(item.seq, resident=on_device) and item.seq in outcome.sampled:
            self._finish(job, outcome)

    def _announce(self, key: int, resident: bool = False) -> bool:
        """Announces the blocks that were finished since; returns False, and fails the prompt, if the host can't get
        their pages.
        """
        blocks = self.shipments[key].ready(resident)
        try:
            self._make_whole(self.shipments[key], blocks)
        except RankLost:
            raise
        except BatonError as error:
            self.fail(key, error)
            return False
        if blocks:
            self.channel.send(ch.BlocksReady(key, blocks))
        return True

    def _make_whole(self, shipment: Shipment, blocks: Sequence[ch.ShipBlock]) -> None:
        if self.mirror is None or not blocks:
            return
        self.mirror.make_whole(pages := [block.page for block in blocks])
        shipment.read += pages
        if states := shipment.states_of(blocks):
            self.mirror.lend(states)

    def _finish(self, job: PrefillJob, outcome: StepOutcome) -> None:
        key, now = job.sequence.seq, self.clock()
        self.scheduler.remove(key)
        self.parts.adapters.release(key)
        (sampled,) = outcome.sampled[key]
        # An answer that came from a worker which was lost before it told the end may be complete.
        first = job.sequence.late_end() or job.sequence.append(sampled.token_id, sampled.logprobs)
        started = now if job.started is None else job.started
        stations = (Station("queue", started - job.arrived), Station("prefill", now - started))
        self._hit_tokens += job.cached_tokens
        self._asked_tokens += job.tokens
        scores, pooled = tuple(job.sequence.scores), job.sequence.pooled()
        self.channel.send(ch.PrefillDone(key, first, job.cached_tokens, stations, scores, pooled, now))

    # ---- counts ----

    @property
    def reserved(self) -> int:
        """Returns the number of pages that the started prompts may still need."""
        return self.scheduler.growth

    @property
    def empty(self) -> bool:
        """Returns whether no prompt is being computed or shipped."""
        return not self.scheduler.jobs and not self.shipments

    def load(self) -> tuple[int, int, int]:
        """Returns the number of prompts in progress, of waiting ones, and of prompt tokens still to be computed."""
        started = sum(job.lease is not None for job in self.scheduler.jobs.values())
        return started, len(self.scheduler.jobs) - started, self.scheduler.waiting_tokens

    def extras(self) -> dict[str, int]:
        """Returns the prompt tokens found in the prefix cache and those looked up, by field of Stats."""
        return {"prefix_hit_tokens": self._hit_tokens, "prefix_asked_tokens": self._asked_tokens}
