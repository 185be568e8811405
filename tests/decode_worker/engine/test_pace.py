"""Decode steps are held apart while prompts are read on the same cores, and only then."""

from __future__ import annotations

import pytest

from baton.decode_worker.engine.pace import LOOK_S, OF_CHUNK, StepPace
from baton.kernels.abi.cores import LentCores
from tests.decode_worker.engine.loop_bench import Bench, answer, prompt_of

PACE_S = 0.05


class Neighbour:
    """A prefill engine beside ours: whether it computes."""

    def __init__(self) -> None:
        self.reads = True

    def cores(self, chunk_s: float = 10.0) -> LentCores:
        return LentCores(prompts_beside=lambda: chunk_s if self.reads else 0.0)


def writing(bench: Bench, *prompts: list[int]) -> list[int]:
    """Local requests whose prompts were read; their keys."""
    keys = [bench.admit(prompt, local=True, max_tokens=8).key for prompt in prompts]
    while not all(bench.tokens(key) for key in keys):
        bench.loop.turn([])
    return keys


def steps_in(bench: Bench, seconds: float) -> int:
    """Steps that are run in so much time, of which a step takes none."""
    before, until = bench.loop.log.steps, bench.now + seconds
    while bench.now < until - 1e-9:
        if not bench.loop.turn([]):
            bench.now += min(bench.loop.patience(), until - bench.now)
    return bench.loop.log.steps - before


def test_answers_advance_at_the_pace_while_prompts_are_read_beside_and_freely_afterwards() -> None:
    bench = Bench(cores=(beside := Neighbour()).cores(), pace_s=PACE_S)
    first, second = writing(bench, prompt_of(5), prompt_of(40))
    assert steps_in(bench, 3.5 * PACE_S) == 3
    beside.reads = False
    got = bench.finish(first, second)
    assert got == {first: answer(prompt_of(5)), second: answer(prompt_of(40))}
    assert bench.now == pytest.approx(3.5 * PACE_S), "nothing was waited for once no prompt was read"
    assert bench.at_baseline()


def test_answers_are_never_held_back_for_half_as_long_as_a_worker_that_does_both_would() -> None:
    bench = Bench(cores=Neighbour().cores(chunk_s=0.05), pace_s=PACE_S)
    writing(bench, prompt_of(5))
    assert steps_in(bench, 3.5 * OF_CHUNK * 0.05) == 3


def test_an_answer_that_joins_meanwhile_is_in_the_next_step() -> None:
    bench = Bench(cores=Neighbour().cores(), pace_s=PACE_S)
    (first,) = writing(bench, prompt_of(5))
    prompt = prompt_of(20)
    admitted = bench.admit(prompt, local=False)
    bench.deliver(admitted, prompt)
    bench.commit(admitted, prompt)
    before = len(bench.tokens(first))
    assert steps_in(bench, 1.5 * PACE_S) == 1
    assert len(bench.tokens(first)) == before + 1
    assert len(bench.tokens(admitted.key)) == 2


def test_a_prompt_that_is_read_here_never_waits() -> None:
    bench = Bench(cores=Neighbour().cores(), pace_s=PACE_S)
    writing(bench, prompt_of(5))
    key = bench.admit(prompt_of(200), local=True).key
    while not bench.tokens(key):
        assert bench.loop.turn([])
    assert bench.now == 0.0


def test_a_loop_whose_answers_ended_while_it_waited_sleeps_as_long_as_ever() -> None:
    pace = StepPace(PACE_S, lambda: True, lambda: now[0])
    now = [0.0]
    pace.begin()
    assert pace.holds()
    assert pace.patience == LOOK_S
    now[0] = PACE_S
    assert pace.patience == float("inf")
    assert not pace.holds()


def test_without_a_pace_nothing_is_held_back() -> None:
    bench = Bench(cores=Neighbour().cores())
    writing(bench, prompt_of(5))
    while bench.loop.turn([]):
        pass
    assert bench.now == 0.0
    assert bench.at_baseline()
