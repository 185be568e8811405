"""Preempted sequences whose KV is set aside: the same tokens as if there had been room, and nothing left behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from baton.decode_worker.engine.swap import SwapArea
from baton.engine.backends.paced.runner import PacedRunner
from baton.engine.config import EngineConfig
from baton.engine.load import load_runner
from baton.protos import channel as ch
from baton.protos.errors import BatonError
from baton.protos.measurements import StepSample
from tests.decode_worker.engine import loop_bench
from tests.decode_worker.engine.loop_bench import CONTEXT, MODEL, Bench, answer, prompt_of

DEMO = Path(__file__).parents[3] / "models" / "demo-draft"
PAGE, TOKENS = 256, 16
SLOW = StepSample(64, 2048.0, 0, 0, 0.5)  # reading prompts is slow here: copying wins
QUICK = StepSample(1 << 20, 0.0, 0, 0, 1e-6)


def area(
    samples: tuple[StepSample, ...] = (SLOW,), pages: int = 8, capacity: int = 4
) -> tuple[SwapArea, bytearray]:
    memory = bytearray(bytes(range(256)) * pages)
    for page in range(pages):
        memory[page * PAGE] = page
    found = SwapArea(memoryview(memory), PAGE, TOKENS, capacity * PAGE)
    for sample in samples:
        found.observe(sample)
    return found, memory


def test_copies_stay_within_what_the_host_has_room_for() -> None:
    swap, _ = area(capacity=8)
    mirror = SimpleNamespace(copies_left=4, make_whole=lambda pages: None, let_go=lambda pages: None)
    swap._mirror = mirror  # type: ignore[assignment]
    assert swap.save([1, 2, 3], 40) is None, "three copies, of which three pass through its pages"
    kept = swap.save([1, 2], 32)
    assert kept is not None
    assert swap.save([3], 16) is not None
    assert swap.save([4], 16) is None
    swap.drop(kept)
    assert swap.save([4], 16) is not None


def test_what_was_saved_comes_back_in_other_pages_after_those_that_are_held() -> None:
    swap, memory = area()
    kept = swap.save([1, 2, 3, 4], 40)
    assert kept is not None
    assert (kept.tokens, len(kept.pages), swap.used) == (40, 3, 3 * PAGE), "a page without tokens is not copied"
    before = bytes(memory)
    swap.restore(kept, [1, 6, 7, 5], held=1)
    assert memory[6 * PAGE] == 2
    assert memory[7 * PAGE] == 3
    assert memory[: 6 * PAGE] == before[: 6 * PAGE], "held pages and those past the tokens stay as they are"
    assert swap.used == 0


def test_nothing_is_saved_past_the_capacity_nor_where_computing_is_cheaper_nor_before_a_step() -> None:
    assert area(capacity=2)[0].save([1, 2, 3], 40) is None
    assert area((QUICK,) * 8)[0].save([1, 2, 3], 40) is None
    assert area(())[0].save([1, 2, 3], 40) is None
    assert area()[0].save([1, 2, 3], 0) is None


def test_room_comes_back_when_a_sequence_ends_while_it_waits() -> None:
    swap, _ = area()
    kept = swap.save([1, 2], 32)
    assert kept is not None
    assert swap.save([3, 4, 5], 48) is None
    swap.drop(kept)
    assert swap.save([3, 4, 5], 48) is not None


def slow_reader(pages: int) -> Bench:
    """A decode worker to which a token of a prompt costs a millisecond and an answer's next to nothing."""
    runner = PacedRunner("test", step_seconds=lambda s: 1e-5 + 1e-3 * s.prefill_tokens, **MODEL)
    return Bench(pages=pages, runner=runner)


def test_preempted_answers_are_as_if_there_had_been_room() -> None:
    bench = slow_reader(pages=40)
    assert bench.loop.swap is not None
    keys = [bench.admit(prompt_of(40, n), local=True, max_tokens=80).key for n in range(6)]
    got = bench.finish(*keys, turns=5000)
    assert [got[key] for key in keys] == [answer(prompt_of(40, n), max_tokens=80) for n in range(6)]
    assert bench.loop.scheduler.preemptions > 0
    assert bench.loop.swap.saved == bench.loop.swap.restored > 0
    assert bench.loop.swap.used == 0
    assert bench.at_baseline()


def test_a_swapped_sequence_is_not_computed_again() -> None:
    bench = slow_reader(pages=40)
    keys = [bench.admit(prompt_of(40, n), local=True, max_tokens=80).key for n in range(6)]
    bench.finish(*keys, turns=5000)
    assert bench.loop.swap is not None
    again = bench.loop.log.tokens_prefilled - 6 * 40
    unswapped = bench.loop.scheduler.preemptions - bench.loop.swap.saved
    assert again <= unswapped * CONTEXT
    if unswapped == 0:
        assert again == 0


def test_what_the_host_cannot_get_is_computed_again() -> None:
    def make_whole(pages: object) -> None:
        raise BatonError("the card says no")

    bench = slow_reader(pages=40)
    swap = bench.loop.swap
    assert swap is not None
    swap._mirror = SimpleNamespace(make_whole=make_whole)  # type: ignore[assignment]
    keys = [bench.admit(prompt_of(40, n), local=True, max_tokens=80).key for n in range(6)]
    got = bench.finish(*keys, turns=5000)
    assert [got[key] for key in keys] == [answer(prompt_of(40, n), max_tokens=80) for n in range(6)]
    assert bench.loop.scheduler.preemptions > 0
    assert swap.saved == swap.used == 0
    assert bench.at_baseline()


def test_a_cancelled_one_leaves_no_copy() -> None:
    bench = slow_reader(pages=40)
    swap = bench.loop.swap
    assert swap is not None
    keys = [bench.admit(prompt_of(40, n), local=True, max_tokens=80).key for n in range(6)]
    for _ in range(2000):
        bench.loop.turn([])
        if swap.used:
            break
    assert swap.used > 0
    bench.say(*(ch.Cancel(key, "") for key in keys))
    assert swap.used == 0
    assert bench.at_baseline()


def test_the_real_engine_goes_on_bitwise_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(model=str(DEMO), dtype="float32", max_model_len=512)
    runner = load_runner(config)
    assert runner.spec.layout.page_bytes % TOKENS == 0
    monkeypatch.setattr(loop_bench, "KV", runner.spec.layout.page_bytes // TOKENS)

    def answers(pages: int, prepare: Callable[[Bench], Any]) -> tuple[list[list[int]], Bench]:
        bench = Bench(pages=pages, runner=load_runner(config))
        prepare(bench)
        keys = [bench.admit(prompt_of(30, n), local=True, max_tokens=66, ignore_eos=True).key for n in range(6)]
        got = bench.finish(*keys, turns=5000)
        return [got[key] for key in keys], bench

    def favour_copies(bench: Bench) -> None:
        assert bench.loop.swap is not None
        monkeypatch.setattr(bench.loop.swap, "_cheaper", lambda size, tokens: True)

    roomy, _ = answers(64, lambda bench: None)
    tight, bench = answers(24, favour_copies)
    swap = bench.loop.swap
    assert swap is not None
    assert tight == roomy
    assert all(len(tokens) == 66 for tokens in tight)
    assert bench.loop.scheduler.preemptions > 0
    assert swap.saved == swap.restored > 0
    assert bench.at_baseline()
