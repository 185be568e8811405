"""The decode engine's loop: admits requests, receives their KV, and generates answers. Torch-free.

Knows nothing of gRPC, streams or routers. Single-threaded: pages change hands only between steps.

    Admit -> Admitted -> (blocks arrive) -> Commit -> Committed -> Tokens … Tokens with a finish_reason
         └ local ───────> prompt in chunks ────────────────────────┘
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from baton.decode_worker.engine.admission import OpenedPages, open_pages
from baton.decode_worker.engine.ahead import PromptReader
from baton.decode_worker.engine.budget import StepBudget
from baton.decode_worker.engine.counts import load_of, with_drafts
from baton.decode_worker.engine.handoffs import HandoffTable
from baton.decode_worker.engine.job import DecodeJob
from baton.decode_worker.engine.limits import DecodeLimits
from baton.decode_worker.engine.outputs import StepOutputs
from baton.decode_worker.engine.pace import StepPace
from baton.decode_worker.engine.requests import RequestState
from baton.decode_worker.engine.scheduler import DecodeScheduler
from baton.decode_worker.engine.starvation import Starvation
from baton.decode_worker.engine.swap import SwapArea
from baton.engine.abilities import mirror_of
from baton.engine.plan import SampledToken, SequenceStep
from baton.engine.request_checks import check_request
from baton.engine.speculate.draft import States
from baton.engine.speculate.drafter import Drafter
from baton.engine.states import AttentionReach
from baton.engine.steps.handlers import Table
from baton.engine.steps.isolate import StepOutcome
from baton.engine.steps.loop import IDLE_WAIT_S, StepLoop, note
from baton.engine.steps.parts import EngineParts
from baton.engine.steps.sharing import prefixes_in_the_way
from baton.protos import channel as ch
from baton.protos.errors import Draining, HandoffRefused, LeaseUnknown, Overloaded, PoolExhausted, to_info
from baton.protos.measurements import StepSample

LEASE_ID_BYTES = 16  # too many to guess


class DecodeLoop(StepLoop):
    """The engine loop of a decode worker; it sends one Tokens message per step. ``entropy(n)`` gives n random
    bytes.
    """

    role = "decode"

    def __init__(
        self,
        parts: EngineParts,
        limits: DecodeLimits,
        entropy: Callable[[int], bytes],
        drafter: Drafter | None = None,
    ):
        self.requests: dict[int, RequestState] = {}
        self.receives = HandoffTable(self.requests, parts.clock, mirror_of(parts.runner))
        super().__init__(parts)
        self.limits = limits
        self.budget = StepBudget(limits.itl_target_s)
        self.pace = StepPace(limits.pace_s, parts.cores.prompts_beside, parts.clock)
        memory = None if self.spec.layout.windows else parts.memory  # copies are of one page table
        pages, clock = self.pool.pages, parts.clock
        self.swap = SwapArea.beside(memory, self.spec.layout, pages, clock, self.mirror) if memory else None
        self.drafter, self.ahead = drafter, PromptReader(drafter, parts.clock)
        reach = AttentionReach.of(self.spec.layout, grows=True)
        self.scheduler = DecodeScheduler(
            self.pool, limits.max_batch, limits.chunk_tokens, self.budget, self.swap, drafter, parts.rules, reach
        )
        self.entropy = entropy
        self.leases_swept = self._ages = 0
        self.starvation = Starvation(self.pool, parts.sharing, parts.clock)
        self.outputs = StepOutputs(parts.clock)
        self._hit_tokens = self._asked_tokens = 0

    def beat(self) -> bool:
        """Ends overdue leases, runs one step and sends its tokens, and lets drafters read prompts that are still
        arriving.

        Returns False if there was nothing to do.
        """
        self._sweep()
        self._end_late()
        if self.scheduler.only_decodes and self.pace.holds():
            self._tell()
            return False
        plan, took = self.scheduler.plan(), 0.0
        if plan.items:
            self.pace.begin()
            self.starvation.clear()
            outcome = self.compute(plan)
            took = outcome.seconds
            self._observe(plan.shape(took))
            self._learn(plan.items, outcome)
        starved = not plan.items and self._fail_starved()
        self._tell()
        return self.ahead.turn(took) or bool(plan.items) or starved

    def _observe(self, sample: StepSample) -> None:
        self.budget.observe(sample)
        if self.swap is not None:
            self.swap.observe(sample)
        if self.drafter is not None:
            rows = sample.decode_sequences + sample.draft_tokens
            self.drafter.observe(rows, sample.prefill_tokens, sample.seconds)

    def patience(self) -> float:
        """Returns the seconds until the next lease runs out or a delayed step may be due, at most IDLE_WAIT_S."""
        return self.receives.patience(min(IDLE_WAIT_S, self.pace.patience))

    # ---- messages ----

    def handlers(self) -> Table:
        """Returns the handlers of the messages that a decode worker's I/O process sends."""
        return (
            self.shared_handlers()
            .on(ch.Admit, self._on_admit)
            .on(ch.Rearm, self._on_rearm)
            .on(ch.ReceiveOpened, self.receives.opened)
            .on(ch.ReceiveClosed, self.receives.closed)
            .on(ch.IntakeClosed, self._on_intake_closed)
            .on(ch.BlocksReceived, self.receives.arrived)
            .on(ch.Commit, self._on_commit)
            .on(ch.Cancel, self._on_cancel)
            .covering(ch.ToDecodeEngine)
        )

    def _on_admit(self, message: ch.Admit) -> None:
        try:
            admitted = self._admit(message)
        except Exception as error:
            note(error, f"sequence {message.key} could not be admitted")
            self._withdraw(message.key)
            hopeless = isinstance(error, PoolExhausted) and self.empty and self.parts.sharing.only_keeps_prefixes
            self.channel.send(ch.Refused(message.key, to_info(prefixes_in_the_way() if hopeless else error)))
        else:
            self.channel.send(admitted)

    def _on_rearm(self, message: ch.Rearm) -> None:
        try:
            rearmed = self.receives.rearm(message)
        except Exception as error:
            self.channel.send(ch.Refused(message.key, to_info(error)))
        else:
            self.channel.send(rearmed)

    def _on_commit(self, message: ch.Commit) -> None:
        state = self.requests.get(message.key)
        if state is None or state.receive is None:
            self.channel.send(ch.Ended(message.key, to_info(LeaseUnknown("the lease has ended", "lease"))))
            return
        if message.epoch != state.receive.epoch:
            return  # a Rearm overtook it: the I/O process has closed that stream
        if not state.receive.complete:
            raise HandoffRefused("the handoff was committed before every block was in")
        self._commit(state, message)

    def _on_cancel(self, message: ch.Cancel) -> None:
        if message.key in self.requests:
            self._end(message.key)
            self.channel.send(ch.Ended(message.key, None))
        self.receives.shut(message.key)  # the I/O process has closed its intake before it sends this

    def _on_intake_closed(self, message: ch.IntakeClosed) -> None:
        self.receives.shut(message.key)

    def fail(self, key: int, error: Exception) -> None:
        """Ends the request with channel key ``key`` and reports ``error`` to the I/O process."""
        state = self.requests.get(key)
        if state is None:
            return
        gate_open = state.awaited
        self._end(key)
        self.channel.send(ch.Ended(key, to_info(error)))
        if gate_open:
            self.channel.send(ch.CloseReceive(key))

    # ---- admission and commit ----

    def _admit(self, message: ch.Admit) -> ch.Admitted:
        if self.draining:
            raise Draining("this decode worker is draining; ask another")
        if self.scheduler.waiting:
            raise Overloaded("preempted sequences wait for pages here; ask another", retry_after_s=1.0)
        request = message.request
        self.parts.adapters.require(request.adapter_id)
        check_request(request, self.spec, self.pool.pages, self.scheduler.chunk_tokens)
        found = open_pages(message, self.spec, self.pool, self.parts.rules, self.scheduler.growth_reserve)
        try:
            lease_id = self._register(message, found)
        except BaseException:
            found.close()
            raise
        return found.admitted(message, lease_id)

    def _register(self, message: ch.Admit, found: OpenedPages) -> bytes:
        """Registers the job under the request's key and, for a handoff, its lease; returns the lease's id."""
        key, now, lease_id = message.key, self.clock(), self.entropy(LEASE_ID_BYTES)
        found.pages.hinted_blocks = message.request.hinted_blocks(found.pages.block_tokens)
        sequence = self.sequence(key, message.request)
        self._ages += 1
        job = DecodeJob(sequence, found.root, found.pages, self._ages, found.states, found.kept, found.running)
        if not message.local:
            ttl_s = message.ttl_s or self.limits.ttl_s
            landing = None if found.states is None else found.states.landing()
            slots = 0 if found.kept is None else found.kept.slots
            self.receives.begin(key, lease_id, found.pages, ttl_s, landing, slots)
            self.ahead.begin(sequence)
        self.requests[key] = state = RequestState(job, self.receives.get(key), now)
        if message.local:
            self._join_local(state)
        return lease_id

    def _withdraw(self, key: int) -> None:
        """Removes what was registered of an admission that failed, which no other process was told of."""
        self.parts.adapters.release(key)
        if key in self.requests:
            self._end(key)
        self.receives.withdraw(key)

    def _join_local(self, state: RequestState) -> None:
        job = state.job
        state.cached_tokens = min(job.sequence.computed, job.sequence.request.prompt_tokens)
        self._hit_tokens += state.cached_tokens
        self._asked_tokens += len(job.sequence.request.token_ids)
        self.ahead.begin(job.sequence)
        self.scheduler.add(job)
        if job.sequence.outputs:
            self.outputs.owe(job.sequence.seq)

    def _commit(self, state: RequestState, message: ch.Commit) -> None:
        job, receive = state.job, state.receive
        assert receive is not None
        receive.commit()
        self.ahead.end(message.key)
        self.receives.forget_settled(message.key)
        state.cached_tokens = message.cached_tokens
        job.advance(job.sequence.pending)
        if job.states is not None:
            job.states.landed(job.sequence.computed, *job.state_terms)
        self.scheduler.add(job)
        self.channel.send(ch.Committed(message.key, message.epoch))
        key, first = message.key, message.first
        if first.token_ids:
            self._take(key, (SampledToken(key, first.token_ids[0], first.logprobs[0] if first.logprobs else None),))
        elif self.outputs.take(key, state, first):  # the answer was complete when it came
            self._end(key)

    # ---- after a step ----

    def _learn(self, items: Iterable[SequenceStep], outcome: StepOutcome) -> None:
        """Takes the results of a step for those of its ``items`` that are still wanted."""
        for key, sampled in outcome.sampled.items():
            self._tell_ahead(key, sampled)
        for item in items:
            self._advance(item, outcome)

    def _advance(self, item: SequenceStep, outcome: StepOutcome) -> None:
        if item.seq in outcome.failed:
            self.fail(item.seq, outcome.failed[item.seq])
            return
        job = self.requests[item.seq].job
        job.sequence.score(item.start, outcome.scored.get(item.seq, ()))
        job.advance(len(item.tokens) - len(item.verify))
        if item.watch_rows:
            job.weigh(outcome.observed[item.seq])
        elif item.watch is not None:
            job.choose(outcome.observed[item.seq].tolist())
        job.keep_state()
        job.sequence.pool(item.start, job.sequence.computed, outcome.pooled.get(item.seq))
        chosen = outcome.sampled.get(item.seq, ())
        if item.verify:
            self._take_verified(item, job, chosen, outcome.states.get(item.seq))
            return
        self._show(item, job, outcome.states.get(item.seq))
        if chosen:
            self._take(item.seq, chosen)

    def _tell_ahead(self, key: int, chosen: tuple[SampledToken, ...]) -> None:
        """Tells the grammar of ``key``, if it has one, all tokens that the step brings it."""
        sequence = self.requests[key].job.sequence
        if sequence.has_grammar:
            ids = [one.token_id for one in chosen]
            rows = self._standing(key, ids) if len(ids) > 1 else (0,)
            sequence.tell_ahead([ids[row] for row in rows])

    def _standing(self, key: int, ids: list[int]) -> Sequence[int]:
        """Returns the rows of the step whose tokens ``key`` takes: those of accepted drafts, and the one before."""
        return self.requests[key].job.sequence.standing(self.scheduler.drafts[key].stands(ids))

    def _show(self, item: SequenceStep, job: DecodeJob, states: States | None) -> None:
        """Passes the model's last hidden states to the drafter, which makes drafts from them."""
        if self.drafter is not None and states is not None and len(states):
            self.drafter.saw(job.sequence, item.start + len(item.tokens) - len(states), states)

    def _take_verified(
        self, item: SequenceStep, job: DecodeJob, chosen: tuple[SampledToken, ...], states: States | None
    ) -> None:
        """Takes the drafts that equal the model's choices, and the model's own token after them."""
        draft, drafts = self.scheduler.drafts[item.seq], len(chosen) - 1
        ids = [one.token_id for one in chosen]
        rows = self._standing(item.seq, ids)
        if self.drafter is not None and drafts:
            self.drafter.judge(job.sequence, draft, len(rows) - 1, ids, rows)
            self.log.note_accepted(len(rows) - 1)
            if states is not None:
                self.drafter.saw(job.sequence, item.start, states[list(rows)])
        job.settle(item, rows[-1])
        self._take(item.seq, tuple([chosen[row] for row in rows]), drafts)
        if item.seq in self.requests:
            job.give_back()

    def _take(self, key: int, chosen: tuple[SampledToken, ...], drafts: int = 0) -> None:
        """Appends the next tokens of ``key`` to its sequence and to the step's outputs; ends the request after the
        last.
        """
        state = self.requests[key]
        if state.first_at is None:
            self.ahead.end(key)
        if self.outputs.take(key, state, state.job.take(chosen, drafts)):
            self._end(key)

    def _end_late(self) -> None:
        """Ends answers whose grammars reported late that the last token completes them."""
        for key in self.outputs.take_late(self.requests):
            self._end(key)

    def _tell(self) -> None:
        self.tell_evicted()  # before an answer's end, upon which a client may ask again
        if outputs := self.outputs.clear():
            self.channel.send(ch.Tokens(self.log.steps, outputs))

    # ---- ends ----

    def _end(self, key: int) -> None:
        """Ends a request and frees its pages; those that may still be written stay leased until they can't be."""
        job = self.requests.pop(key).job
        self.ahead.end(key)
        self._let_go(key, job)
        if self.drafter is not None:
            self.drafter.end(job.sequence)
        job.sequence.leave()  # the drafter may keep it for long
        self.receives.forget_settled(key)

    def _let_go(self, key: int, job: DecodeJob) -> None:
        """Frees the pages of ``job``, whose request ``key`` has ended, and its use of an adapter."""
        self.scheduler.remove(job)
        self.parts.adapters.release(key)

    def _sweep(self) -> None:
        for key in self.receives.overdue():
            self.leases_swept += 1
            self.fail(key, LeaseUnknown("the lease ended: its handoff made no progress", "lease"))

    def _fail_starved(self) -> bool:
        """Fails the oldest sequence if nothing can run and no page can come free for it; returns whether it did."""
        oldest = self.scheduler.starved()
        if oldest is None or not self.starvation.is_hopeless() or any(a.awaited for a in self.requests.values()):
            return False
        self.starvation.clear()
        error = PoolExhausted(
            f"{len(oldest.sequence.tokens)} tokens don't fit the pool of {self.pool.pages} pages; give it more",
            "pages",
        )
        self.fail(oldest.sequence.seq, error)
        return True

    # ---- counts ----

    @property
    def empty(self) -> bool:
        """Returns whether no answer is being generated and no stream may write a page."""
        return not self.requests and not self.receives

    def load(self) -> tuple[int, int, int]:
        """Returns the number of sequences in the batch, of waiting ones, and of prompt tokens still to be
        computed.
        """
        return load_of(self.scheduler)

    def _stats(self) -> ch.Stats:
        return with_drafts(super()._stats(), self.drafter)

    def extras(self) -> dict[str, int]:
        """Returns the counts that only a decode worker has, by field of Stats."""
        return {
            "preemptions": self.scheduler.preemptions,
            "leases_swept": self.leases_swept,
            "prefix_hit_tokens": self._hit_tokens,
            "prefix_asked_tokens": self._asked_tokens,
        }
