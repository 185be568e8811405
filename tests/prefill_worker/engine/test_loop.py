"""The prefill loop over a real pool, real pages and the paced engine; only the channel is a list."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from baton.engine.backends.paced.runner import PacedRunner, paced_answer, rows_after
from baton.engine.plan import StepPlan, StepResult
from baton.engine.steps.parts import EngineParts
from baton.kv.layout import prefix
from baton.kv.memory.host_pages import PageMemory
from baton.kv.pages.pool import PagePool
from baton.prefill_worker.engine.loop import PrefillLoop
from baton.protos import channel as ch
from baton.protos.errors import BatonError, RankLost
from baton.protos.nouns import EngineRequest, Sampling
from tests.decode_worker.test_card_pages import CardRunner

KV, VOCAB, CONTEXT = 32, 997, 4096
MODEL: dict[str, Any] = {"kv_bytes_per_token": KV, "vocab_size": VOCAB, "max_model_len": CONTEXT}
GREEDY = Sampling(temperature=0.0, max_tokens=8)


class Tape:
    """The engine's end of a channel that only remembers."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def poll(self, timeout_s: float) -> list[Any]:
        return []


class Bench:
    """Runs a prefill loop and records each step's plan."""

    def __init__(self, pages: int = 64, chunk_tokens: int = 64, runner: Any = None):
        self.now = 0.0
        self.memory = PageMemory.create(pages, 16 * KV)
        runner = runner or Recorder("test", step_seconds=lambda s: 0.0, **MODEL)
        runner.bind(self.memory.view(), pages)
        self.plans: list[StepPlan] = runner.plans
        self.pool, self.tape = PagePool(pages), Tape()
        parts = EngineParts.around(runner, self.pool, self.tape, lambda: self.now)
        self.loop = PrefillLoop(parts, chunk_tokens=chunk_tokens, max_batch=8)

    def say(self, *messages: Any) -> list[Any]:
        before = len(self.tape.sent)
        self.loop.turn(list(messages))
        return [m for m in self.tape.sent[before:] if not isinstance(m, (ch.Stats, ch.CacheChanged))]

    def finish(self) -> None:
        for _ in range(500):
            if not self.loop.turn([]):
                return

    def of(self, key: int, kind: type) -> list[Any]:
        return [m for m in self.tape.sent if isinstance(m, kind) and m.key == key]

    def shipped(self, key: int) -> list[ch.ShipBlock]:
        return [b for m in self.of(key, ch.BlocksReady) for b in m.blocks]

    def at_baseline(self) -> bool:
        self.pool.check()
        return self.loop.snapshot().at_baseline and not self.loop.shipments and not self.loop.scheduler.jobs


class Recorder(PacedRunner):
    """Keeps the plans, and raises for the bad token."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.plans: list[StepPlan] = []

    def run(self, plan: StepPlan) -> StepResult:
        if any(13 in item.tokens for item in plan.items):
            raise RuntimeError("boom")
        self.plans.append(plan)
        return super().run(plan)


def prefill(key: int, prompt: list[int], held: int = 0, received: tuple[int, ...] = (), **more: Any) -> ch.Prefill:
    return ch.Prefill(key, EngineRequest(f"r{key}", tuple(prompt), len(prompt), GREEDY, **more), held, received)


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(7 * i + 131 * salt + 20) % (VOCAB - 20) + 20 for i in range(length)]


def first_of(prompt: list[int]) -> int:
    return paced_answer(prompt, GREEDY, **MODEL)[0]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_block_is_said_to_be_on_the_card_once_the_step_that_needed_it_is_done(bench: Bench) -> None:
    """Cached ones leave before it: the card may not have them yet."""
    bench.loop.mirror = SimpleNamespace(  # type: ignore[assignment]
        shared=object(), make_whole=lambda pages: None, let_go=lambda pages: None
    )
    prompt = prompt_of(70)
    bench.say(prefill(1, prompt))
    bench.finish()
    assert [block.resident for block in bench.shipped(1)] == [True] * 5
    bench.say(prefill(2, [*prompt, *prompt_of(40, 3)]))
    bench.finish()
    assert [(block.index, block.resident) for block in bench.shipped(2)] == [
        *((index, False) for index in range(4)),
        *((index, True) for index in range(4, 7)),
    ]


def test_a_block_that_the_host_cannot_get_fails_its_prompt_alone(bench: Bench) -> None:
    bad: set[int] = set()

    def make_whole(pages: list[int]) -> None:
        if bad & set(pages):
            raise BatonError("the card says no")

    bench.loop.mirror = SimpleNamespace(  # type: ignore[assignment]
        shared=object(), make_whole=make_whole, let_go=lambda pages: None
    )
    prompt = prompt_of(70)
    bench.say(prefill(1, prompt))
    bench.finish()
    bench.say(ch.SendClosed(1))
    bad |= {block.page for block in bench.shipped(1)[:1]}
    bench.say(prefill(2, [*prompt, *prompt_of(30, 1)]), prefill(3, prompt_of(40, 2)))  # its cached blocks, at first
    bench.finish()
    bad |= set(range(bench.pool.pages)) - bad
    bench.say(prefill(4, prompt_of(20, 3)))  # those that a step has written
    bench.finish()
    for key in (2, 4):
        (failed,) = bench.of(key, ch.PrefillFailed)
        assert "the card says no" in failed.error.message
        assert not bench.of(key, ch.PrefillDone)
        assert not bench.shipped(key)
    assert bench.of(3, ch.PrefillDone)
    assert [block.index for block in bench.shipped(3)] == [0, 1, 2]
    bench.say(*(ch.SendClosed(key) for key in (2, 3, 4)))
    assert bench.at_baseline()


class OnCard(CardRunner):
    """Computes on a card whose pages the host has copies of on demand, of which 16 may stay."""

    copies = 16
    plans: list[StepPlan] = []


def test_blocks_are_on_the_host_from_when_they_are_announced_until_they_were_sent() -> None:
    card = OnCard("test", step_seconds=lambda s: 0.0, **MODEL)
    bench, prompt = Bench(runner=card), prompt_of(100)
    rows = list(rows_after(b"", [*prompt, *prompt_of(30, 3)], 0, KV))

    def are_there(blocks: list[ch.ShipBlock]) -> bool:
        pages = [bytes(bench.memory.page(block.page))[: block.tokens * KV] for block in blocks]
        wanted = [rows[16 * block.index : 16 * block.index + block.tokens] for block in blocks]
        return pages == [b"".join(each) for each in wanted]

    bench.say(prefill(1, prompt))
    bench.finish()
    first = bench.shipped(1)
    assert len(first) == 7
    assert are_there(first)
    bench.say(prefill(2, [*prompt, *prompt_of(30, 3)]))  # six of its blocks are cached, and read by two now
    bench.finish()
    second = bench.shipped(2)
    assert len(second) == 9
    bench.say(ch.SendClosed(1))
    assert are_there(second)
    bench.say(ch.SendClosed(2))
    assert bench.at_baseline()
    assert card.mirror.copies == 10
    bench.say(prefill(3, prompt))
    bench.finish()
    assert card.brought == 0, "the card has what is cached"
    assert are_there(bench.shipped(3))


def test_prompts_wait_while_the_host_has_no_room_for_what_they_would_ship() -> None:
    card = OnCard("test", step_seconds=lambda s: 0.0, **MODEL)
    card.copies = 8
    bench = Bench(runner=card)
    bench.say(prefill(1, prompt_of(100)), prefill(2, prompt_of(100, 1)), prefill(3, prompt_of(16, 2)))
    bench.finish()
    assert [len(bench.shipped(key)) for key in (1, 2, 3)] == [7, 0, 1], "the shortest come first"
    assert card.mirror.copies_left == 0
    bench.say(ch.SendClosed(3))
    bench.finish()
    assert not bench.shipped(2)
    bench.say(ch.SendClosed(1))
    bench.finish()
    assert len(bench.shipped(2)) == 7
    bench.say(ch.SendClosed(2), prefill(4, prompt_of(200, 3)))
    bench.finish()
    assert len(bench.shipped(4)) == 13, "it is alone"
    bench.say(ch.SendClosed(4))
    assert card.mirror.copies <= 8
    assert bench.at_baseline()


def test_without_a_card_no_block_is_said_to_be_on_it(bench: Bench) -> None:
    bench.say(prefill(1, prompt_of(70)))
    bench.finish()
    assert not any(block.resident for block in bench.shipped(1))


@pytest.mark.parametrize("length", [1, 15, 16, 17, 64, 65, 200])
def test_a_prompt_gives_its_first_token_and_every_block_before_it(bench: Bench, length: int) -> None:
    prompt = prompt_of(length)
    bench.say(prefill(1, prompt))
    bench.finish()
    (done,) = bench.of(1, ch.PrefillDone)
    assert done.first.token_ids == (first_of(prompt),)
    blocks = bench.shipped(1)
    assert [b.index for b in blocks] == list(range(-(-length // 16)))
    assert sum(b.tokens for b in blocks) == length
    root = prefix.root(bench.loop.spec.fingerprint, bench.loop.spec.layout.fidelity)
    assert [b.hash for b in blocks] == prefix.chain(root, prompt)
    rows = list(rows_after(b"", prompt, 0, KV))
    for b in blocks:
        expected = b"".join(rows[16 * b.index : 16 * b.index + b.tokens])
        assert bytes(bench.memory.page(b.page)[: len(expected)]) == expected
    assert max(i for i, m in enumerate(bench.tape.sent) if isinstance(m, ch.BlocksReady)) < bench.tape.sent.index(
        done
    )
    bench.say(ch.SendClosed(1))
    assert bench.at_baseline()


def test_the_cache_is_told_what_reading_costs_by_the_steps_that_read() -> None:
    passed = [0.0]  # seconds by the runner's own clock, so that a step takes just what it is to take
    runner = Recorder(
        "test",
        step_seconds=lambda s: 1e-6 * s.prefill_tokens + 1e-8 * s.prefill_attention,
        sleep=lambda seconds: passed.append(passed[-1] + seconds),
        clock=lambda: passed[-1],
        **MODEL,
    )
    bench, told = Bench(256, runner=runner), []
    bench.pool.priced = lambda token, pair: told.append(pair / token)  # type: ignore[method-assign]
    for key in range(1, 9):
        bench.say(prefill(key, prompt_of(64 * key, key)))
        bench.finish()
        bench.now += 1.0
        bench.say(ch.SendClosed(key))
    assert 0 < told[-1] < 1


def test_blocks_leave_while_later_chunks_compute(bench: Bench) -> None:
    answered = bench.say(prefill(1, prompt_of(200)))
    assert [b.index for b in answered[0].blocks] == [0, 1, 2, 3]
    assert [b.index for b in bench.say()[0].blocks] == [4, 5, 6, 7]


def test_only_blocks_the_decode_side_lacks_are_shipped(bench: Bench) -> None:
    bench.say(prefill(1, prompt_of(100), held=2, received=(4, 6)))
    bench.finish()
    assert [b.index for b in bench.shipped(1)] == [2, 3, 5]


def test_cached_blocks_are_shipped_but_not_computed(bench: Bench) -> None:
    bench.say(prefill(1, prompt_of(96)))
    bench.finish()
    bench.say(ch.SendClosed(1))
    answered = bench.say(prefill(2, prompt_of(96)))
    assert [len(i.tokens) for i in bench.plans[-1].items] == [16]
    assert [b.index for b in answered[0].blocks] == [0, 1, 2, 3, 4]
    assert bench.of(2, ch.PrefillDone)[0].cached_tokens == 80
    bench.say(ch.SendClosed(2))
    assert bench.at_baseline()


def test_short_prompts_share_a_step_and_come_before_a_long_one(bench: Bench) -> None:
    bench.say(prefill(1, prompt_of(300, 1)), prefill(2, prompt_of(20, 2)), prefill(3, prompt_of(30, 3)))
    assert [(i.seq, len(i.tokens)) for i in bench.plans[0].items] == [(2, 20), (3, 30), (1, 14)]


def test_a_long_prompt_ages_until_it_goes_first(bench: Bench) -> None:
    bench.say(prefill(1, prompt_of(600, 1)))
    bench.now = 1.0
    bench.say(prefill(2, prompt_of(60, 2)))
    assert [i.seq for i in bench.plans[-1].items] == [1]


def test_a_lower_priority_number_goes_first(bench: Bench) -> None:
    bench.say(prefill(1, prompt_of(20, 1)), prefill(2, prompt_of(300, 2), priority=-1))
    assert bench.plans[0].items[0].seq == 2


def test_the_second_of_two_identical_prompts_waits_for_the_firsts_blocks(bench: Bench) -> None:
    bench.say(prefill(1, prompt_of(100)), prefill(2, prompt_of(100)))
    bench.finish()
    assert bench.of(2, ch.PrefillDone)[0].cached_tokens == 96
    assert sum(len(i.tokens) for p in bench.plans for i in p.items) == 104


def test_the_second_goes_on_alone_when_the_first_is_cancelled(bench: Bench) -> None:
    bench.say(prefill(1, prompt_of(100)), prefill(2, prompt_of(100)))
    bench.say(ch.Cancel(1, "client_gone"))
    bench.finish()
    assert bench.of(2, ch.PrefillDone)[0].first.token_ids == (first_of(prompt_of(100)),)


def test_a_cancelled_prompt_with_blocks_in_flight_keeps_its_pages_until_send_closed(bench: Bench) -> None:
    bench.say(prefill(1, prompt_of(200)))
    (failed,) = bench.say(ch.Cancel(1, "client_gone"))
    assert failed.error.type == "Cancelled"
    counts = bench.pool.snapshot_counts()
    assert (counts.leased, counts.quarantined) == (0, 13)
    bench.say(ch.SendClosed(1))
    assert bench.at_baseline()


def test_a_cancelled_prompt_that_waits_leaves_nothing(bench: Bench) -> None:
    bench.loop.take(prefill(1, prompt_of(200)))
    bench.loop.take(ch.Cancel(1, "deadline"))
    assert bench.at_baseline()
    bench.say(ch.SendClosed(1))


def test_a_prompt_waits_for_pages_and_then_runs() -> None:
    bench = Bench(pages=14)
    bench.say(prefill(1, prompt_of(150, 1)))
    bench.say(prefill(2, prompt_of(140, 2)))
    bench.finish()
    assert bench.of(2, ch.PrefillDone) == []
    assert bench.loop.load()[:2] == (0, 1)
    bench.say(ch.SendClosed(1))
    bench.finish()
    assert bench.of(2, ch.PrefillDone)[0].first.token_ids == (first_of(prompt_of(140, 2)),)


def test_a_prompt_that_can_not_be_computed_fails_alone(bench: Bench) -> None:
    bench.say(prefill(1, prompt_of(20, 1)), prefill(2, [20, 13, 20]), prefill(3, prompt_of(20, 3)))
    assert "boom" in bench.of(2, ch.PrefillFailed)[0].error.message
    assert [bench.of(k, ch.PrefillDone)[0].first.token_ids[0] for k in (1, 3)] == [
        first_of(prompt_of(20, k)) for k in (1, 3)
    ]
    bench.say(*(ch.SendClosed(k) for k in (1, 2, 3)))
    assert bench.at_baseline()


@pytest.mark.parametrize(
    ("prompt", "error"), [([], "InvalidRequest"), ([-1], "InvalidRequest"), ([1] * 1100, "ContextTooLong")]
)
def test_what_can_never_be_computed_is_refused_by_name(bench: Bench, prompt: list[int], error: str) -> None:
    (failed,) = bench.say(prefill(1, prompt))
    assert failed.error.type == error
    assert bench.at_baseline()


def test_draining_refuses_new_prompts(bench: Bench) -> None:
    bench.say(ch.Drain())
    assert bench.say(prefill(1, prompt_of(5)))[0].error.type == "Draining"


def test_a_pin_holds_cached_pages_until_unpin(bench: Bench) -> None:
    bench.say(prefill(1, prompt_of(64)))
    bench.say(ch.SendClosed(1))
    hashes = tuple(b.hash for b in bench.shipped(1))
    (pinned,) = bench.say(ch.Pin(7, (*hashes, b"x" * 32)))
    assert len(pinned.pages) == 4
    assert bench.pool.snapshot_counts().leased == 4
    bench.say(ch.Unpin(7))
    assert bench.at_baseline()


def test_a_prompt_that_a_pinned_prefix_keeps_from_starting_fails_once_nothing_else_comes_free() -> None:
    bench = Bench(pages=8)
    bench.say(prefill(1, prompt_of(64)))
    bench.say(ch.SendClosed(1))
    hashes = tuple(b.hash for b in bench.shipped(1))
    bench.say(ch.Pin(7, hashes), ch.Pin(8, hashes, lasts=True))
    bench.say(prefill(2, prompt_of(100, 1)))
    bench.finish()
    assert not bench.of(2, ch.PrefillFailed), "a fetch ends soon"
    bench.say(ch.Unpin(7))
    (failed,) = bench.of(2, ch.PrefillFailed)
    assert (failed.error.type, failed.error.param) == ("Unavailable", "worker.pinned_share")
    bench.say(prefill(3, prompt_of(20, 2)))
    bench.finish()
    assert bench.shipped(3)


def test_random_cancels_leave_the_pool_at_baseline(bench: Bench) -> None:
    salts = itertools.cycle(range(5))
    for key in range(1, 60):
        bench.say(prefill(key, prompt_of(20 + key * 3, next(salts))))
        if key % 3 == 0:
            bench.say(ch.Cancel(key - 1, "client_gone"))
        bench.say(ch.SendClosed(key - 1))
    bench.finish()
    bench.say(*(ch.SendClosed(k) for k in range(60)))
    assert bench.at_baseline()


def test_an_engine_that_lost_a_rank_while_it_took_a_message_ends():
    bench = Bench()

    def unload(message: ch.UnloadAdapter) -> Any:
        raise RankLost("rank 1 is stuck: it doesn't take what it is told", rank=1)

    bench.loop.parts.adapters.unload = unload  # type: ignore[method-assign]
    with pytest.raises(RankLost, match="rank 1 is stuck"):
        bench.say(ch.UnloadAdapter(1, "sql@0"))
