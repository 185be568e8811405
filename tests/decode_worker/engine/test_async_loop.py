"""Steps planned while the one before them runs: answers are those of steps one after another, and pages stay whole.

The runner computes a step when its results are waited for, as late as a device may; a peer writes a prompt's KV the
moment it hears of pages. So whoever gets a page that a step in flight still writes has a wrong token in the end.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from baton.decode_worker.engine.async_loop import AsyncDecodeLoop
from baton.decode_worker.engine.following import following
from baton.decode_worker.engine.job import DecodeJob
from baton.decode_worker.engine.loop import DecodeLoop
from baton.drill.models.late_steps import LateSteps
from baton.engine.backends.paced.runner import PacedRunner, rows_after
from baton.engine.plan import SequenceStep, StepPlan, StepResult
from baton.protos import channel as ch
from baton.protos.errors import BatonError
from baton.protos.nouns import Sampling, TokenRun
from tests.decode_worker.engine.loop_bench import KV, MODEL, VOCAB, Bench, answer, prompt_of, request
from tests.decode_worker.test_preemption import Engine, Run, paced, real, same, told, undisturbed
from tests.thorough import later

SEEDS = 40
STOPS = tuple(range(0, VOCAB, 9))


class LateBench(Bench):
    """The bench whose runner's steps are asynchronous."""

    def __init__(self, kind: type[AsyncDecodeLoop] = AsyncDecodeLoop, **rest: Any) -> None:
        super().__init__(**rest)
        self.steps = LateSteps(self.runner)
        entropy = self.loop.entropy
        self.loop: AsyncDecodeLoop = kind(self.loop.parts, self.loop.limits, entropy, self.steps)

    def counts(self) -> tuple[int, int]:
        """Returns the steps planned ahead and the rows thrown away."""
        found = self.loop.extras()
        return found["steps_ahead"], found["rows_discarded"]


def written(plan: StepPlan) -> set[int]:
    """Returns the pages to which a step appends."""
    return {
        page
        for item in plan.items
        for page in item.pages[item.start // 16 : -(-(item.start + len(item.tokens)) // 16)]
    }


class Play:
    """One seed's requests, local ones and handoffs, cancelled at any turn and preempted for want of pages."""

    def __init__(self, seed: int, kind: type[AsyncDecodeLoop] = AsyncDecodeLoop, watched: bool = True) -> None:
        self.rng = random.Random(seed)
        self.bench = LateBench(kind, pages=self.rng.choice((10, 12, 16, 40)), max_batch=self.rng.choice((2, 4, 8)))
        self.queue: list[Any] = []
        self.asked: dict[int, tuple[list[int], dict[str, Any], int, bool]] = {}
        self.cancelled: set[int] = set()
        self.refusals: set[str] = set()
        self.given_early = 0
        send = self.bench.tape.send
        self.bench.tape.send = lambda message: (self._heard(message), send(message))  # type: ignore[method-assign]
        if watched:
            self._watch()

    def _watch(self) -> None:
        """Counts pages that come free while a step in flight writes them."""
        pool, give_back = self.bench.pool, self.bench.pool.give_back

        def watching(pages: Any, hinted: Any = ()) -> None:
            give_back(pages, hinted)
            free = {page for page in pages if not pool.leased.of[page]}
            self.given_early += any(free & written(plan) for plan, _ in self.bench.steps._under_way)

        pool.give_back = watching  # type: ignore[method-assign]

    def _heard(self, message: Any) -> None:
        if isinstance(message, ch.Admitted) and not self.asked[message.key][3]:
            self._deliver(message)
        if isinstance(message, ch.Refused):
            self.refusals.add(message.error.type)
            self.queue.append(self._admit(message.key))

    def _deliver(self, admitted: ch.Admitted) -> None:
        prompt, sampling, choice, _ = self.asked[admitted.key]
        rows = list(rows_after(b"", prompt, 0, KV))
        for i, page in enumerate(admitted.pages[admitted.held_blocks :], admitted.held_blocks):
            data = b"".join(rows[16 * i : 16 * i + 16])
            self.bench.memory.page(page)[: len(data)] = data
        key, blocks = admitted.key, tuple(range(admitted.held_blocks, len(admitted.pages)))
        first = answer(prompt, choice, **sampling)[0]
        self.queue += [ch.ReceiveOpened(key, 1), ch.BlocksReceived(key, 1, blocks)]
        self.queue += [ch.Commit(key, 1, TokenRun(0, (first,), finish_reason=self._ends(key, first)), 0)]
        self.queue += [ch.ReceiveClosed(key, 1)]

    def _ends(self, key: int, first: int) -> str:
        sampling = self.asked[key][1]
        stops = first in sampling.get("stop_token_ids", ()) and not sampling.get("min_tokens")
        return "stop" if stops else "length" if sampling["max_tokens"] == 1 else ""

    def _admit(self, key: int) -> ch.Admit:
        prompt, sampling, choice, local = self.asked[key]
        return ch.Admit(key, request(key, prompt, choice, **sampling), local, 0.0)

    def _asks(self, key: int) -> None:
        rng = self.rng
        sampling: dict[str, Any] = {"max_tokens": rng.choice((1, 2, 5, 17, 60))}
        sampling |= {"temperature": 1.0, "seed": rng.randrange(9)} if rng.random() < 0.5 else {}
        sampling |= {"stop_token_ids": STOPS} if rng.random() < 0.5 else {}
        sampling |= {"min_tokens": rng.randrange(6)} if rng.random() < 0.3 else {}
        odd = ({"logprobs": 1}, {"presence_penalty": 0.5}, {"bad_words": ((990, 991),)})
        sampling |= rng.choice(odd) if rng.random() < 0.1 else {}
        prompt = prompt_of(rng.choice((5, 16, 31, 70)), rng.choice((0, key)))
        self.asked[key] = prompt, sampling, rng.randrange(2), rng.random() < 0.5
        self.queue.append(self._admit(key))

    def run(self) -> None:
        for key in range(1, 25):
            self._asks(key)
            for _ in range(self.rng.choice((0, 0, 1, 5))):
                self._turn()
            if self.rng.random() < 0.25:
                gone = self.rng.randrange(1, key + 1)
                self.cancelled.add(gone)
                self.queue = [m for m in self.queue if getattr(m, "key", 0) != gone] + [ch.Cancel(gone, "left")]
        for _ in range(3000):
            if not self._turn() and not self.queue:
                break
        self._judge()

    def _turn(self) -> bool:
        messages, self.queue = self.queue, []
        self.rng.shuffle(rest := [m for m in messages if isinstance(m, ch.Admit)])
        busy = self.bench.loop.turn([m for m in messages if not isinstance(m, ch.Admit)] + rest)
        self.bench.pool.check()
        return busy

    def _judge(self) -> None:
        assert self.bench.loop.empty
        assert self.refusals <= {"PoolExhausted", "Overloaded"}
        for key, (prompt, sampling, choice, _) in self.asked.items():
            told = self.bench.tokens(key)
            wanted = answer(prompt, choice, **sampling)
            if key in self.cancelled:
                wanted = wanted[: len(told)]
            assert told == wanted, f"request {key}: {sampling}"
        assert self.bench.at_baseline()
        assert not self.given_early


def test_random_requests_cancels_and_preemptions_change_no_token() -> None:
    ahead = discarded = preempted = 0
    for seed in range(SEEDS):
        (play := Play(seed)).run()
        steps, rows = play.bench.counts()
        ahead, discarded = ahead + steps, discarded + rows
        preempted += play.bench.loop.scheduler.preemptions
    assert min(ahead, discarded, preempted) > SEEDS // 2


class Hasty(AsyncDecodeLoop):
    """Gives pages back at once, as if no step were in flight."""

    def _let_go(self, key: int, job: DecodeJob) -> None:
        DecodeLoop._let_go(self, key, job)


def test_pages_given_back_in_flight_are_noticed() -> None:
    """Planted bug: what is written late lands in the pages of whoever was admitted meanwhile."""
    told = list[str]()
    for seed in range(SEEDS):
        try:
            Play(seed, Hasty, watched=False).run()
        except AssertionError as error:
            told.append(str(error))
    assert any("request" in one for one in told), "no token was wrong"
    early = 0
    for seed in range(SEEDS):
        play = Play(seed, Hasty)
        with suppress(AssertionError):
            play.run()
        early += play.given_early
    assert early


class Ahead(Run):
    """Every kind of answer, by a loop whose steps are planned ahead where they can be."""

    def __init__(self, engine: Engine, names: frozenset[str]) -> None:
        super().__init__(engine)
        sync = self.loop
        steps = LateSteps(engine.runner)
        self.loop: AsyncDecodeLoop = AsyncDecodeLoop(sync.parts, sync.limits, sync.entropy, steps)
        self.names = names

    def alone(self) -> None:
        """Admits those of ``names``, and runs until all have ended."""
        for key, asked in self.engine.requests.items():
            if asked.request_id in self.names:
                self.loop.take(ch.Admit(key, asked, True, 0.0))
        while not self.loop.empty:
            if not self.loop.turn([]):
                time.sleep(0.001)  # a grammar's process is asked
        self.pool.check()
        assert self.loop.snapshot().at_baseline
        assert not self.engine.adapters.listed(ch.ListAdapters(0)).adapters[0].running


PLAIN = ("greedy", "drawn", "another choice", "min_tokens", "stop ids", "allowed ids")


@pytest.mark.parametrize("engine", [paced, later(real)])
def test_each_kind_of_answer_is_what_it_is_without(engine: Callable[[], Engine]) -> None:
    whole, _ = undisturbed(engine())
    for key, asked in engine().requests.items():
        kind = asked.request_id
        (run := Ahead(engine(), frozenset({kind}))).alone()
        same({kind: told(run.tape, key)}, whole, "planned ahead, alone")
        count = run.loop.extras()["steps_ahead"]
        assert (count > 0) == (kind in (*PLAIN, "prompt logprobs")), kind
    (run := Ahead(engine(), frozenset(PLAIN))).alone()
    keys = {asked.request_id: key for key, asked in engine().requests.items()}
    same({kind: told(run.tape, keys[kind]) for kind in PLAIN}, whole, "planned ahead, together")
    assert run.loop.extras()["steps_ahead"] > 5
    (run := Ahead(engine(), frozenset(keys))).alone()
    same({kind: told(run.tape, key) for kind, key in keys.items()}, whole, "all kinds together")


def test_results_are_looked_at_one_step_late_and_a_late_row_is_thrown_away() -> None:
    bench = LateBench()
    prompt = prompt_of(20)
    whole = answer(prompt, max_tokens=30)
    bench.admit(prompt, True, max_tokens=30, stop_token_ids=(whole[4],))
    assert len(bench.steps._under_way) == 1, "the second step was submitted before the first was looked at"
    bench.finish()
    assert bench.tokens(1) == whole[:5]
    assert bench.counts() == (5, 1)
    assert bench.loop.log.tokens_decoded == 4
    assert bench.at_baseline()


def test_an_answer_that_must_end_with_the_step_in_flight_has_no_row_behind_it() -> None:
    bench = LateBench()
    bench.admit(prompt_of(20), True, max_tokens=6)
    bench.finish()
    assert bench.counts() == (5, 0)


@pytest.mark.parametrize(
    "asked", [{"logprobs": 0}, {"repetition_penalty": 1.1}, {"bad_words": ((1, 2),)}, {"prompt_logprobs": 1}]
)
def test_one_that_needs_its_token_first_keeps_the_others_beside_it(asked: dict[str, Any]) -> None:
    """Nobody is served in every second step because others are planned ahead."""
    bench = LateBench()
    bench.admit(prompt_of(20), True, max_tokens=8, **asked)
    bench.admit(prompt_of(21, 1), True, max_tokens=8)
    sizes = []
    while bench.loop.turn([]):
        sizes.append(len([m for m in bench.tape.sent if isinstance(m, ch.Tokens)][-1].outputs))
    assert sizes.count(2) >= 6
    assert bench.tokens(1) == answer(prompt_of(20))
    assert bench.tokens(2) == answer(prompt_of(21, 1))


def test_nothing_is_planned_ahead_where_a_page_is_lacking_and_nobody_is_preempted_in_flight() -> None:
    bench = LateBench(pages=4)
    bench.admit(prompt_of(31), True, max_tokens=40)
    bench.admit(prompt_of(30, 1), True, max_tokens=40)
    loop = bench.loop
    preempt = loop.scheduler._preempt

    def watched(job: DecodeJob) -> None:
        assert loop._flight is None
        preempt(job)

    loop.scheduler._preempt = watched  # type: ignore[method-assign]
    bench.finish()
    assert loop.scheduler.preemptions
    assert bench.tokens(1) == answer(prompt_of(31), max_tokens=40)[: len(bench.tokens(1))]


class Failing(PacedRunner):
    """Can't compute sequence ``bad`` from position ``at`` on."""

    bad, at = 0, 0

    def run(self, plan: StepPlan) -> StepResult:
        if any(item.seq == self.bad and item.start >= self.at for item in plan.items):
            raise BatonError("it is at fault")
        return super().run(plan)


def test_a_sequence_that_fails_in_flight_fails_alone_and_the_step_behind_it_is_dropped() -> None:
    runner = Failing("test", step_seconds=lambda s: 0.0, **MODEL)
    bench = LateBench(runner=runner)
    runner.bad, runner.at = 2, 24
    prompts = {key: prompt_of(20, key) for key in (1, 2, 3)}
    for prompt in prompts.values():
        bench.admit(prompt, True, max_tokens=12)
    bench.finish()
    assert [bench.tokens(key) for key in (1, 3)] == [answer(prompts[key], max_tokens=12) for key in (1, 3)]
    assert bench.tokens(2) == answer(prompts[2], max_tokens=12)[: len(bench.tokens(2))]
    assert [m.error.message for m in bench.tape.sent if isinstance(m, ch.Ended)] == ["it is at fault"]
    assert bench.at_baseline()


class Refusing(LateSteps):
    """Takes two of three steps."""

    count = 0

    def submit(self, plan: StepPlan, fed: Any = ()) -> None:
        self.count += 1
        if not self.count % 3:
            raise BatonError("the plan doesn't fit")
        super().submit(plan, fed)


def test_a_step_that_is_not_taken_is_run_at_once() -> None:
    bench = LateBench()
    bench.loop._steps = Refusing(bench.runner)
    bench.admit(prompt_of(20), True, max_tokens=20)
    bench.finish()
    assert bench.tokens(1) == answer(prompt_of(20), max_tokens=20)
    assert bench.counts()[0] > 0


def test_a_loop_that_is_told_to_end_lands_the_step_in_flight_first() -> None:
    bench = LateBench()
    bench.admit(prompt_of(20), True, max_tokens=20)
    said = iter([[], [ch.Shutdown()]])
    bench.tape.poll = lambda timeout_s: next(said)  # type: ignore[method-assign]
    bench.loop.run()
    assert bench.loop._flight is None
    assert not bench.steps._under_way


def test_pages_of_a_cancelled_answer_are_its_own_until_the_step_in_flight_has_ended() -> None:
    bench = LateBench()
    admitted = bench.admit(prompt_of(20), True, max_tokens=20)
    loop, free = bench.loop, bench.pool.available
    loop.take(ch.Cancel(admitted.key, "left"))
    assert bench.pool.available == free
    assert not loop.empty
    bench.say()
    assert bench.pool.available > free
    assert loop.empty
    assert bench.counts()[1] == 1


def test_a_plan_behind_another_takes_prompts_on_in_chunks_and_new_sequences() -> None:
    bench = LateBench(chunk_tokens=16)
    loop = bench.loop
    keys = itertools.count(1)
    for length in (5, 40):
        loop.take(ch.Admit(key := next(keys), request(key, prompt_of(length, key), max_tokens=4), True, 0.0))
    first = loop.scheduler.plan()
    assert shape(first) == [(1, 0, 5, True), (2, 0, 11, False)]
    loop.take(ch.Admit(key := next(keys), request(key, prompt_of(3, key), max_tokens=4), True, 0.0))
    behind = following(loop.scheduler, first)
    assert behind is not None
    assert behind.fed == {1}
    assert shape(behind.plan) == [(1, 5, 1, True), (2, 11, 16, False)]
    assert behind.plan.items[0].sample == bench.loop.requests[1].job.sequence.spec_after_next()
    assert isinstance(behind.plan.items[0].sample.sampling, Sampling)


def shape(plan: StepPlan) -> list[tuple[int, int, int, bool]]:
    def of(item: SequenceStep) -> tuple[int, int, int, bool]:
        return item.seq, item.start, len(item.tokens), item.sample is not None

    return [of(item) for item in plan.items]
