"""A model whose layers all see a window: pages behind it are given back and never shipped, answers stay the same.

Real checkpoint, real loops on both sides, blocks copied by hand. Whatever no lease has is evicted and overwritten
between any two steps, so a token that read a page given back would be another.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from baton.decode_worker.engine.limits import DecodeLimits
from baton.decode_worker.engine.loop import DecodeLoop
from baton.engine.config import EngineConfig
from baton.engine.load import load_runner
from baton.engine.plan import Runner
from baton.engine.steps.loop import StepLoop
from baton.engine.steps.parts import EngineParts
from baton.kv.memory.host_pages import PageMemory
from baton.kv.pages.lease import LEAST_SLIDE
from baton.kv.pages.pool import PagePool
from baton.prefill_worker.engine.loop import PrefillLoop
from baton.protos import channel as ch
from baton.protos.nouns import EngineRequest, Sampling
from bench.windows import Tape
from tests.conformance.checkpoints import make
from tests.conformance.drive import Driver
from tests.engine.backends.ranks.threads import bind

WINDOW, VOCAB = 37, 777
SEEN = -(-WINDOW // 16) + 1  # blocks that a token can see
CHUNK = SEEN + LEAST_SLIDE + 48 // 16  # pages that a prompt may have as it is read
ANSWER = Sampling(temperature=0.0, max_tokens=120, ignore_eos=True)


class Side:
    """Holds one worker's engine: model, pages and loop."""

    def __init__(
        self, model: Path, loop: type[StepLoop], pages: int = 64, runner: Runner | None = None, **settings: Any
    ) -> None:
        runner = runner or load_runner(EngineConfig(str(model), threads=1, dtype="float32", **settings))
        self.memory = PageMemory.create(pages, runner.spec.layout.page_bytes)
        bind(runner, self.memory)
        self.pool, self.tape, self.most = PagePool(pages, runner.spec.layout.block_tokens), Tape(), 0
        ids = itertools.count(1)
        parts = EngineParts.around(runner, self.pool, self.tape, lambda: 0.0, memory=self.memory.view())
        if loop is PrefillLoop:
            self.loop: StepLoop = PrefillLoop(parts, chunk_tokens=48, max_batch=4)
        else:
            limits = DecodeLimits(max_batch=4, chunk_tokens=48)
            self.loop = DecodeLoop(parts, limits, entropy=lambda n: next(ids).to_bytes(n, "big"))

    def say(self, *messages: Any) -> None:
        self.loop.turn(list(messages))

    def finish(self, forget: bool = True) -> None:
        while self.loop.turn([]):
            self.most = max(self.most, self.pool.snapshot_counts().leased)
            self.pool.check()
            if forget:
                self.forget()

    def forget(self) -> None:
        """Evicts all that nobody leases, and writes nonsense over it."""
        with self.pool.open([], self.pool.available) as lease:
            for page in lease.pages:
                self.memory.page(page)[:] = b"\x7e" * len(self.memory.page(page))

    def tokens(self, key: int) -> list[int]:
        outputs = [o for told in self.tape.of(ch.Tokens) for o in told.outputs if o.key == key]
        return [token for output in outputs for token in output.run.token_ids]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("windowed") / "mistral", "mistral", sliding_window=WINDOW)


def prompt_of(length: int, seed: int = 1) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(VOCAB), k=length))


def request(prompt: tuple[int, ...], sampling: Sampling = ANSWER) -> EngineRequest:
    return EngineRequest("r", prompt, len(prompt), sampling, 0)


@pytest.fixture(scope="module")
def wanted(model: Path) -> dict[int, list[int]]:
    """Answers to prompts by length, with every page kept."""
    driver = Driver(load_runner(EngineConfig(str(model), threads=1, dtype="float32")), pages=80)
    return {n: driver.answer([prompt_of(n)], ANSWER)[0] for n in (5, 37, 300)}


def hand_over(
    prefill: Side, decode: Side, prompt: tuple[int, ...], asked: EngineRequest | None = None
) -> list[int]:
    """Admits, reads and commits ``prompt``; returns the blocks that were shipped."""
    asked = asked or request(prompt)
    decode.say(ch.Admit(1, asked, False, 30.0))
    (admitted,) = decode.tape.of(ch.Admitted)
    unseen = tuple(range(*admitted.unseen))
    prefill.say(ch.Prefill(1, asked, admitted.held_blocks, unseen))
    prefill.finish()
    shipped = [block for ready in prefill.tape.of(ch.BlocksReady) for block in ready.blocks]
    for block in shipped:
        decode.memory.page(admitted.pages[block.index])[:] = prefill.memory.page(block.page)
    prefill.say(ch.SendClosed(1))
    numbers = [block.index for block in shipped]
    (done,) = prefill.tape.of(ch.PrefillDone)
    decode.say(ch.ReceiveOpened(1, 1), ch.BlocksReceived(1, 1, tuple(numbers)), ch.Commit(1, 1, done.first, 0))
    decode.say(ch.ReceiveClosed(1, 1))
    return numbers


@pytest.mark.parametrize("length", [5, 37, 300])
def test_a_handoff_ships_what_the_window_shows_and_the_answer_is_the_same(model, wanted, length):
    prefill, decode = Side(model, PrefillLoop), Side(model, DecodeLoop)
    shipped = hand_over(prefill, decode, prompt_of(length))
    decode.finish()
    assert decode.tokens(1) == wanted[length]
    blocks = -(-length // 16)
    assert shipped == list(range(max(0, length - WINDOW + 1) // 16, blocks))
    assert decode.most <= SEEN + LEAST_SLIDE + 1
    assert prefill.most <= min(blocks, CHUNK)
    for side in (prefill, decode):
        side.pool.check()
        assert side.loop.snapshot().at_baseline


def test_a_worker_that_reads_the_prompt_itself_gives_pages_back_as_it_reads(model, wanted):
    decode = Side(model, DecodeLoop)
    decode.say(ch.Admit(1, request(prompt_of(300)), True, 30.0))
    decode.finish()
    assert decode.tokens(1) == wanted[300]
    assert decode.pool.snapshot_counts().leased == 0


def test_prompts_read_at_once_leave_each_other_the_pages_of_their_window(model, wanted):
    prefill = Side(model, PrefillLoop, pages=2 * CHUNK)
    for key, length in enumerate((300, 200, 120), 1):  # each shorter than what is left of those before
        unseen = (length - WINDOW + 1) // 16
        prefill.say(ch.Prefill(key, request(prompt_of(length, seed=key)), 0, tuple(range(unseen))))
    assert sum(job.lease is not None for job in prefill.loop.scheduler.jobs.values()) == 2
    for _ in range(100):
        if not prefill.loop.turn([]) and len(prefill.tape.of(ch.PrefillDone)) == 3:
            break
        prefill.pool.check()
        prefill.forget()
        for done in prefill.tape.of(ch.PrefillDone):
            prefill.say(ch.SendClosed(done.key))
    firsts = {done.key: done.first.token_ids[0] for done in prefill.tape.of(ch.PrefillDone)}
    assert firsts[1] == wanted[300][0]
    assert len(firsts) == 3
    assert not prefill.tape.of(ch.PrefillFailed)
    assert prefill.loop.snapshot().at_baseline


def test_a_receiver_that_wants_every_block_gets_every_block(model):
    prefill = Side(model, PrefillLoop)
    prefill.say(ch.Prefill(1, request(prompt_of(300)), 0, ()))
    prefill.finish()
    assert [b.index for ready in prefill.tape.of(ch.BlocksReady) for b in ready.blocks] == list(range(19))


@pytest.mark.parametrize("role", [PrefillLoop, DecodeLoop])
def test_a_prefix_is_found_by_the_blocks_that_its_continuation_sees(model, wanted, role):
    side, prompt = Side(model, role), prompt_of(300)
    say = {
        PrefillLoop: lambda key: ch.Prefill(key, request(prompt), 17, ()),
        DecodeLoop: lambda key: ch.Admit(key, request(prompt), True, 30.0),
    }[role]
    side.say(say(1))
    side.finish(forget=False)
    if role is PrefillLoop:
        side.say(ch.SendClosed(1))
    blocks = [side.pool.blocks.block_of[page] for page in side.pool.supply.cached]
    chain = side.loop.pool.blocks.page_of
    assert len(blocks) >= 18
    kept = [side.pool.keep(block) for block in list(chain)[18 - SEEN : 18]]
    side.forget()
    for page in kept:
        side.pool.unkeep(page)
    side.say(say(2))
    side.finish(forget=False)
    if role is PrefillLoop:
        assert side.tape.of(ch.PrefillDone)[1].cached_tokens == 18 * 16
        assert side.tape.of(ch.PrefillDone)[1].first.token_ids[0] == wanted[300][0]
    else:
        (cached,) = [
            o.cached_tokens
            for t in side.tape.of(ch.Tokens)
            for o in t.outputs
            if o.key == 2 and not o.run.output_index
        ]
        assert cached == 18 * 16
        assert side.tokens(2) == wanted[300]


def test_preempted_sequences_go_on_as_they_would_have(model, wanted):
    side = Side(model, DecodeLoop, pages=24)
    side.say(*(ch.Admit(key, request(prompt_of(300)[:37]), True, 30.0) for key in (1, 2, 3)))
    for at in range(400):
        if not side.loop.turn([]):
            break
        if at % 50 == 30:
            scheduler = side.loop.scheduler
            scheduler._preempt(scheduler.running[-1])
        side.forget()
    assert side.loop.scheduler.preemptions > 0
    expected = Driver(load_runner(EngineConfig(str(model), threads=1, dtype="float32")), pages=40).answer(
        [prompt_of(300)[:37]], ANSWER
    )[0]
    assert [side.tokens(key) for key in (1, 2, 3)] == [expected] * 3
