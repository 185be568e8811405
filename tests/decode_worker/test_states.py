"""Recurrent state by every way that K and V go: handoff, prefix hits, a second prefill, preemption, migration."""

from __future__ import annotations

import pytest

from baton.decode_worker.engine.loop import DecodeLoop
from baton.engine.config import EngineConfig
from baton.engine.load import load_runner
from baton.engine.plan import Runner
from baton.engine.states import StateRules
from baton.kv.layout.state import state_pages
from baton.protos import channel as ch
from baton.protos.nouns import Sampling
from tests.conformance.checkpoints import make
from tests.conformance.drive import Driver
from tests.decode_worker.states import Pair, Worker, request

TOKENS = 40
GREEDY = Sampling(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
KINDS = ["qwen3_next", *(pytest.param(kind, marks=pytest.mark.thorough) for kind in ("bamba", "jamba"))]
VOCABULARY = 1003


@pytest.fixture(scope="module", params=KINDS)
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    directory = make(tmp_path_factory.mktemp("hybrid"), request.param, vocab_size=VOCABULARY)
    return load_runner(EngineConfig(str(directory), threads=1))


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(7 * i * i + 131 * salt + 3) % 997 for i in range(length)]


def alone(runner: Runner, *prompts: list[int]) -> list[list[int]]:
    return Driver(runner, pages=400, chunk=1000).answer(prompts, GREEDY)


@pytest.mark.parametrize("length", [1, 16, 33, 100])
def test_a_handoff_brings_the_state_and_the_answer_is_the_one_alone(runner: Runner, length: int) -> None:
    pair, prompt = Pair(runner), prompt_of(length)
    assert pair.answer(1, prompt) == alone(runner, prompt)[0]
    assert pair.shipped == -(-length // 16) + pair.parts
    assert pair.prefill.at_baseline()
    assert pair.decode.at_baseline()


def test_a_prefix_hit_goes_on_from_a_checkpoint_on_both_sides(runner: Runner) -> None:
    pair, first, longer = Pair(runner), prompt_of(90), prompt_of(90) + prompt_of(50, salt=1)
    pair.answer(1, first)
    assert pair.answer(2, longer) == alone(runner, longer)[0]
    done = [m for m in pair.prefill.tape.sent if isinstance(m, ch.PrefillDone)]
    assert [m.cached_tokens for m in done] == [0, 80], "the last full block of the first prompt has a checkpoint"
    local = Worker(runner, 400, "decode")
    for key, prompt in enumerate((first, longer), 1):
        local.admit(key, prompt, local=True)
        local.finish()
        assert local.tokens(key) == alone(runner, prompt)[0]
    assert local.cached(2) == 80
    assert local.at_baseline()


def test_the_next_turn_of_a_conversation_goes_on_behind_the_last_full_block_of_the_answer(runner: Runner) -> None:
    worker, prompt = Worker(runner, 400, "decode"), prompt_of(70)
    worker.admit(1, prompt, local=True)
    worker.finish()
    turn = prompt + worker.tokens(1) + prompt_of(9, salt=2)
    worker.admit(2, turn, local=True)
    worker.finish()
    assert worker.tokens(2) == alone(runner, turn)[0]
    assert worker.cached(2) == (70 + TOKENS - 1) // 16 * 16


def test_blocks_without_a_checkpoint_behind_them_are_computed_again(runner: Runner) -> None:
    worker, prompt = Worker(runner, 400, "decode"), prompt_of(100)
    worker.admit(1, prompt, local=True)
    worker.finish()
    other = prompt[:57] + prompt_of(30, salt=3)  # shares three full blocks; the checkpoint is behind the second
    worker.admit(2, other, local=True)
    worker.finish()
    assert worker.tokens(2) == alone(runner, other)[0]
    assert worker.cached(2) == 32


def test_a_second_prefill_brings_what_the_first_did_not(runner: Runner) -> None:
    pair, prompt = Pair(runner), prompt_of(75)
    admitted = pair.decode.admit(1, prompt, local=False)
    pair.move(pair.compute(1, prompt, admitted.held_blocks), admitted, most=pair.parts + 1)
    rearmed = next(m for m in pair.decode.say(ch.Rearm(1, admitted.lease, 2)) if isinstance(m, ch.Rearmed))
    assert len(rearmed.received_blocks) == pair.parts + 1
    pair.decode.say(ch.ReceiveClosed(1, 1))
    again = Worker(runner, 400, "prefill", chunk=32)
    first, pair.prefill = pair.prefill, again
    said = pair.compute(2, prompt, admitted.held_blocks, rearmed.received_blocks)
    pair.move(said, admitted, epoch=2)
    done = next(m for m in said if isinstance(m, ch.PrefillDone))
    pair.decode.say(ch.Commit(1, 2, done.first, 0), ch.ReceiveClosed(1, 2))
    pair.decode.finish()
    assert pair.decode.tokens(1) == alone(runner, prompt)[0]
    first.say(ch.SendClosed(1))
    again.say(ch.SendClosed(2))
    assert all(worker.at_baseline() for worker in (first, again, pair.decode))


@pytest.mark.parametrize("aside", [False, True])
def test_preempted_sequences_go_on_from_a_checkpoint_or_from_what_was_set_aside(
    runner: Runner, aside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [prompt_of(60, salt) for salt in range(3)]
    wanted, parts = alone(runner, *prompts), state_pages(runner.spec.layout)
    worker = Worker(runner, 3 * (4 + 2 * parts) + 3, "decode", memory=aside)
    loop = worker.loop
    assert isinstance(loop, DecodeLoop)
    if loop.swap is not None:
        monkeypatch.setattr(loop.swap, "_cheaper", lambda size, tokens: True)
        monkeypatch.setattr(loop.swap, "_capacity", 1 << 30)
    worker.say(*(ch.Admit(key, request(key, prompt), True, 30.0) for key, prompt in enumerate(prompts)))
    worker.finish()
    assert [worker.tokens(key) for key in range(3)] == wanted
    assert loop.scheduler.preemptions
    assert loop.swap is None or loop.swap.restored
    assert worker.at_baseline()


def test_an_answer_goes_on_elsewhere_as_if_nothing_had_happened(runner: Runner) -> None:
    prompt = prompt_of(50)
    (whole,) = alone(runner, prompt)
    worker = Worker(runner, 400, "decode")
    worker.say(ch.Admit(1, request(1, prompt + whole[:21], emitted=21), True, 30.0))
    worker.finish()
    outputs = [o for m in worker.tape.sent if isinstance(m, ch.Tokens) for o in m.outputs]
    assert [o.run.output_index for o in outputs] == list(range(21, TOKENS))
    assert [token for o in outputs for token in o.run.token_ids] == whole[21:]


def test_a_step_that_failed_half_way_is_run_again_from_the_same_state(runner: Runner) -> None:
    worker, prompts = Worker(runner, 400, "decode"), [prompt_of(40, salt) for salt in range(2)]
    wanted = alone(runner, *prompts)
    run, failures = runner.run, iter([3, 7, 8, 20])
    steps, fails = 0, next(failures)

    def fails_sometimes(plan):  # type: ignore[no-untyped-def]
        nonlocal steps, fails
        steps += 1
        result = run(plan)  # all was computed, and the states were written
        if len(plan.items) == 2 and steps >= fails:
            fails = next(failures, 10**9)
            raise RuntimeError("planted")
        return result

    worker.runner.run = fails_sometimes  # type: ignore[method-assign]
    try:
        for key, prompt in enumerate(prompts):
            worker.admit(key, prompt, local=True)
        worker.finish()
    finally:
        del worker.runner.run
    assert [worker.tokens(key) for key in range(2)] == wanted
    assert fails == 10**9, "each planted failure was met"


def test_a_pool_without_room_for_checkpoints_leaves_them_out(runner: Runner) -> None:
    parts, prompt = state_pages(runner.spec.layout), prompt_of(60)
    worker = Worker(runner, 7 + 2 * parts, "decode")
    worker.admit(1, prompt, local=True)
    worker.finish()
    assert worker.tokens(1) == alone(runner, prompt)[0]
    assert worker.at_baseline()


def test_checkpoints_take_no_more_of_the_pool_than_the_kv_they_belong_to(runner: Runner) -> None:
    rules = StateRules.of(runner.spec.layout)
    assert rules is not None
    assert rules.every >= rules.pages > 0
    assert rules.cut(0, 10**6, prompt=10**6, size=16) == rules.every * 16
    assert rules.cut(0, 100, prompt=100, size=16) == min(96, rules.every * 16)
    assert rules.cut(96, 100, prompt=100, size=16) == 100
