"""The decode loop over a real pool, real pages and the paced engine; only the channel is a list."""

from __future__ import annotations

import itertools
import random

import pytest

from baton.decode_worker.engine.starvation import SHARED_S
from baton.drill.language.grammar import GrammarDelays, SimulatedGrammars, follow
from baton.engine.backends.paced.runner import PacedRunner
from baton.engine.plan import StepPlan, StepResult
from baton.kv.layout import prefix
from baton.protos import channel as ch
from baton.protos.nouns import Grammar, TokenRun
from tests.decode_worker.engine.loop_bench import CONTEXT, MODEL, VOCAB, Bench, answer, bench, prompt_of, request
from tests.faults import each_line

__all__ = ["bench"]


@pytest.mark.parametrize("length", [1, 15, 16, 17, 64, 65, 200])
def test_a_local_request_is_answered_as_it_would_be_alone(bench: Bench, length: int) -> None:
    admitted = bench.admit(prompt_of(length), local=True)
    assert bench.finish(admitted.key)[admitted.key] == answer(prompt_of(length))
    assert bench.at_baseline()


def test_mixed_requests_share_steps_and_get_their_own_answers(bench: Bench) -> None:
    lengths = [5, 40, 130, 17, 64]
    keys = [bench.admit(prompt_of(n, n), local=True, max_tokens=20).key for n in lengths]
    got = bench.finish(*keys)
    assert [got[k] for k in keys] == [answer(prompt_of(n, n), max_tokens=20) for n in lengths]
    assert bench.at_baseline()


def test_a_handed_over_prompt_is_decoded_from_its_pages(bench: Bench) -> None:
    prompt = prompt_of(50)
    admitted = bench.admit(prompt, local=False)
    bench.deliver(admitted, prompt)
    assert ch.Committed(admitted.key, 1) in bench.commit(admitted, prompt)
    assert bench.finish(admitted.key)[admitted.key] == answer(prompt)
    assert not bench.at_baseline(), "the stream is still open: its pages wait"
    bench.say(ch.ReceiveClosed(admitted.key, 1))
    assert bench.at_baseline()


def test_the_first_token_can_be_the_last(bench: Bench) -> None:
    prompt = prompt_of(20)
    admitted = bench.admit(prompt, local=False, max_tokens=1)
    bench.deliver(admitted, prompt)
    (tokens,) = [m for m in bench.commit(admitted, prompt) if isinstance(m, ch.Tokens)]
    assert tokens.outputs[0].run.finish_reason == "length"
    bench.say(ch.ReceiveClosed(admitted.key, 1))
    assert bench.at_baseline()


def test_a_second_request_finds_the_blocks_of_the_first_answer(bench: Bench) -> None:
    prompt = prompt_of(40)
    first = bench.admit(prompt, local=True, max_tokens=30)
    emitted = bench.finish(first.key)[first.key]
    again = bench.admit(prompt + emitted + [1], local=True)
    assert again.held_blocks == (40 + 30 - 1) // 16
    assert bench.finish(again.key)[again.key] == answer(prompt + emitted + [1])
    assert bench.at_baseline()


def test_a_replay_goes_on_at_the_next_index(bench: Bench) -> None:
    prompt, whole = prompt_of(30), answer(prompt_of(30), max_tokens=12)
    bench.say(ch.Admit(9, request(9, prompt, emitted=tuple(whole[:5]), max_tokens=12), True, 0.0))
    for _ in range(20):
        bench.loop.turn([])
    runs = [o.run for m in bench.tape.sent if isinstance(m, ch.Tokens) for o in m.outputs]
    assert runs[0].output_index == 5
    assert [t for r in runs for t in r.token_ids] == whole[5:]


def test_a_replay_that_was_complete_when_it_came_ends_without_another_token() -> None:
    """Its worker was lost before it heard from the grammar that the last token completed the answer."""
    grammar, prompt = Grammar("regex", "x"), prompt_of(30)
    asked = {"grammar": grammar, "max_tokens": 60}
    whole = answer(prompt, until=follow(grammar), **asked)
    bench = Bench(grammars=SimulatedGrammars(GrammarDelays(lambda: bench.now, random.Random(1))))
    replayed = request(9, prompt, emitted=tuple(whole), **asked)
    bench.say(ch.Admit(9, replayed, True, 0.0))
    for _ in range(20):
        bench.loop.turn([])
        bench.now += 1.0
    runs = [o.run for m in bench.tape.sent if isinstance(m, ch.Tokens) for o in m.outputs]
    assert [(r.output_index, r.token_ids, r.finish_reason) for r in runs] == [(len(whole), (), "stop")]
    assert bench.at_baseline()


def test_a_handoff_that_brings_no_token_because_the_answer_was_complete_ends_it(bench: Bench) -> None:
    prompt = prompt_of(50)
    admitted = bench.admit(prompt, local=False)
    bench.deliver(admitted, prompt)
    ended = TokenRun(0, (), (), "stop")
    (tokens,) = [m for m in bench.say(ch.Commit(admitted.key, 1, ended, 0)) if isinstance(m, ch.Tokens)]
    assert [output.run for output in tokens.outputs] == [ended]
    bench.say(ch.ReceiveClosed(admitted.key, 1))
    assert bench.at_baseline()


def test_choices_of_a_sampled_request_differ_by_index(bench: Bench) -> None:
    prompt, sampling = prompt_of(33), {"temperature": 1.0, "seed": 7}
    got = []
    for choice in range(3):
        bench.say(ch.Admit(50 + choice, request(1, prompt, choice, **sampling), True, 0.0))
        got.append(bench.finish(50 + choice)[50 + choice])
    assert got == [answer(prompt, choice, **sampling) for choice in range(3)]
    assert len({tuple(g) for g in got}) == 3


def test_min_tokens_holds_a_stop_id_back_and_ignore_eos_lets_it_pass() -> None:
    prompt = prompt_of(20)
    stop = answer(prompt, max_tokens=8)[3]
    for sampling in ({"stop_token_ids": (stop,)}, {"stop_token_ids": (stop,), "min_tokens": 6}):
        bench = Bench()
        key = bench.admit(prompt, local=True, **sampling).key
        assert bench.finish(key)[key] == answer(prompt, **sampling)
    eos = PacedRunner("eos", step_seconds=lambda s: 0.0, eos_token_ids=(stop,), **MODEL)
    bench = Bench(runner=eos)
    ends, goes_on = bench.admit(prompt, local=True).key, bench.admit(prompt, local=True, ignore_eos=True).key
    got = bench.finish(ends, goes_on)
    assert len(got[ends]) == 4
    assert len(got[goes_on]) == 8


def test_a_cancel_gives_pages_back_within_the_turn(bench: Bench) -> None:
    admitted = bench.admit(prompt_of(100), local=True, max_tokens=500)
    assert bench.say(ch.Cancel(admitted.key, "client_gone")) == [ch.Ended(admitted.key, None)]
    assert bench.at_baseline()


def test_a_cancel_during_a_receive_quarantines_until_the_stream_is_closed(bench: Bench) -> None:
    admitted = bench.admit(prompt_of(100), local=False)
    bench.say(ch.ReceiveOpened(admitted.key, 1))
    bench.say(ch.Cancel(admitted.key, "client_gone"))
    counts = bench.pool.snapshot_counts()
    assert (counts.leased, counts.quarantined) == (0, 7)
    bench.say(ch.ReceiveClosed(admitted.key, 1))
    assert bench.at_baseline()


def test_a_commit_that_lost_against_a_cancel_ends_again_and_harms_nobody(bench: Bench) -> None:
    prompt = prompt_of(50)
    admitted = bench.admit(prompt, local=False)
    bench.deliver(admitted, prompt)
    bench.say(ch.Cancel(admitted.key, "client_gone"))
    (ended,) = bench.commit(admitted, prompt)
    assert ended.error.type == "LeaseUnknown"
    bench.say(ch.ReceiveClosed(admitted.key, 1))
    assert bench.at_baseline()


def test_a_cancel_that_lost_against_a_commit_still_ends_it(bench: Bench) -> None:
    prompt = prompt_of(50)
    admitted = bench.admit(prompt, local=False, max_tokens=500)
    bench.deliver(admitted, prompt)
    bench.commit(admitted, prompt, max_tokens=500)
    assert bench.say(ch.Cancel(admitted.key, "client_gone"), ch.ReceiveClosed(admitted.key, 1))[0].error is None
    assert bench.at_baseline()


def test_an_incomplete_commit_fails_the_request_and_closes_its_receive(bench: Bench) -> None:
    admitted = bench.admit(prompt_of(50), local=False)
    bench.say(ch.ReceiveOpened(admitted.key, 1), ch.BlocksReceived(admitted.key, 1, (0, 1)))
    ended, close = bench.commit(admitted, prompt_of(50))
    assert ended.error.type == "HandoffRefused"
    assert close == ch.CloseReceive(admitted.key)
    bench.say(ch.IntakeClosed(admitted.key), ch.ReceiveClosed(admitted.key, 1))
    assert bench.at_baseline()


def test_a_rearm_keeps_what_arrived_and_ignores_the_older_commit(bench: Bench) -> None:
    prompt = prompt_of(50)
    admitted = bench.admit(prompt, local=False)
    bench.deliver(admitted, prompt)
    (rearmed,) = bench.say(ch.Rearm(admitted.key, admitted.lease, 2))
    assert rearmed == ch.Rearmed(admitted.key, 2, (0, 1, 2, 3))
    assert bench.commit(admitted, prompt, epoch=1) == []
    bench.say(ch.ReceiveOpened(admitted.key, 2), ch.ReceiveClosed(admitted.key, 1))
    bench.commit(admitted, prompt, epoch=2)
    assert bench.finish(admitted.key)[admitted.key] == answer(prompt)
    bench.say(ch.ReceiveClosed(admitted.key, 2))
    assert bench.at_baseline()


@pytest.mark.parametrize(("lease", "epoch", "error"), [(b"x" * 16, 2, "LeaseUnknown"), (None, 3, "StaleEpoch")])
def test_a_wrong_rearm_is_refused(bench: Bench, lease: bytes | None, epoch: int, error: str) -> None:
    admitted = bench.admit(prompt_of(50), local=False)
    (refused,) = bench.say(ch.Rearm(admitted.key, lease or admitted.lease, epoch))
    assert refused.error.type == error


def test_a_lease_without_progress_is_swept_and_its_pages_wait_for_the_fence(bench: Bench) -> None:
    admitted = bench.admit(prompt_of(50), local=False, ttl_s=5.0)
    bench.now = 4.0
    bench.say(ch.ReceiveOpened(admitted.key, 1))
    bench.now = 20.0
    assert bench.say() == [], "an open stream is watched by its keepalive"
    bench.say(ch.ReceiveClosed(admitted.key, 1))
    bench.now = 24.0
    assert bench.say() == []
    assert bench.loop.patience() == pytest.approx(1.0)
    bench.now = 25.5
    ended, close = bench.say()
    assert (ended.error.type, close) == ("LeaseUnknown", ch.CloseReceive(admitted.key))
    assert bench.loop.snapshot().leases_swept == 1
    bench.say(ch.ReceiveOpened(admitted.key, 1))
    assert bench.pool.snapshot_counts().quarantined == 4, "that receive was on its way in the channel"
    bench.say(ch.ReceiveClosed(admitted.key, 1))
    assert bench.pool.snapshot_counts().quarantined == 4
    bench.say(ch.IntakeClosed(admitted.key))
    assert bench.at_baseline()


def test_the_youngest_is_preempted_and_its_answer_stays_the_same() -> None:
    bench = Bench(pages=12)
    keys = [bench.admit(prompt_of(30, n), local=True, max_tokens=60).key for n in range(3)]
    got = bench.finish(*keys)
    assert [got[k] for k in keys] == [answer(prompt_of(30, n), max_tokens=60) for n in range(3)]
    assert bench.loop.scheduler.preemptions > 0
    assert bench.at_baseline()


def test_a_sequence_that_outgrows_the_whole_pool_fails_alone_with_the_pools_size() -> None:
    bench = Bench(pages=4)
    key = bench.admit(prompt_of(30), local=True, max_tokens=200).key
    bench.finish(key)
    (ended,) = [m for m in bench.tape.sent if isinstance(m, ch.Ended)]
    assert ended.error.type == "PoolExhausted"
    assert "4 pages" in ended.error.message
    assert bench.at_baseline()


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ([], "InvalidRequest"),
        ([VOCAB], "InvalidRequest"),
        ([1] * CONTEXT, "ContextTooLong"),
        ([1] * 1040, "ContextTooLong"),
    ],
)
def test_what_can_never_be_served_is_refused_by_name(bench: Bench, prompt: list[int], error: str) -> None:
    assert bench.admit(prompt, local=True).error.type == error
    assert bench.at_baseline()


def test_a_full_pool_refuses_with_a_retryable_error(bench: Bench) -> None:
    bench.admit(prompt_of(900), local=False)
    assert bench.admit(prompt_of(200), local=False).error.type == "PoolExhausted"


def test_a_draining_engine_finishes_what_it_has(bench: Bench) -> None:
    key = bench.admit(prompt_of(30), local=True).key
    bench.say(ch.Drain())
    assert bench.admit(prompt_of(30), local=True).error.type == "Draining"
    assert bench.finish(key)[key] == answer(prompt_of(30))


class Poisoned(PacedRunner):
    """Raises for every step that holds the bad token: a sequence that can't be computed."""

    def run(self, plan: StepPlan) -> StepResult:
        if any(13 in item.tokens for item in plan.items):
            raise RuntimeError("boom")
        return super().run(plan)


def test_a_sequence_that_can_not_be_computed_fails_alone() -> None:
    bench = Bench(runner=Poisoned("bad", step_seconds=lambda s: 0.0, **MODEL))
    good = [list(range(20, 40 + n)) for n in range(5)]
    keys = [bench.admit(p, local=False).key for p in good]  # nothing runs yet: all meet in one step
    for key in keys:
        bench.say(ch.Cancel(key, "warm up"))
    messages = [ch.Admit(100 + n, request(n, p, max_tokens=3), True, 0.0) for n, p in enumerate(good)]
    bench.say(*messages, ch.Admit(200, request(9, [1, 13, 2]), True, 0.0))
    got = bench.finish(*range(100, 105))
    assert [len(got[100 + n]) for n in range(5)] == [3] * 5
    ended = [m for m in bench.tape.sent if isinstance(m, ch.Ended) and m.key == 200]
    assert "boom" in ended[0].error.message
    assert bench.at_baseline()


def test_cache_changes_and_load_are_reported_at_most_ten_times_a_second(bench: Bench) -> None:
    key = bench.admit(prompt_of(40), local=True, max_tokens=30).key
    for _ in range(40):
        bench.now += 0.01
        bench.loop.turn([])
    bench.now += 0.1
    bench.loop.turn([])
    stats = [m for m in bench.tape.sent if isinstance(m, ch.Stats)]
    added = [h for m in bench.tape.sent if isinstance(m, ch.CacheChanged) for h in m.added]
    assert len(stats) <= 7
    assert len(added) == (40 + 30 - 1) // 16
    assert stats[-1].tokens_decoded == 29
    assert stats[-1].cached_pages == 4
    assert bench.tokens(key) == answer(prompt_of(40), max_tokens=30)


def test_evicted_blocks_are_told_before_the_end_of_the_answer_that_evicted_them() -> None:
    bench = Bench(pages=8)
    bench.pool.watch_idle()  # there are lower tiers, from which nothing is lifted that is believed on the device
    first, second = prompt_of(100), prompt_of(100, salt=1)
    bench.finish(bench.admit(first, local=True, max_tokens=2).key)
    bench.now += 1.0
    bench.say()  # reports
    before = len(bench.tape.sent)
    bench.finish(bench.admit(second, local=True, max_tokens=2).key)
    sent = bench.tape.sent[before:]
    root = prefix.root(bench.runner.spec.fingerprint, bench.runner.spec.layout.fidelity)
    lost = set(prefix.block_hashes(root, tuple(first))) - set(bench.pool.findable())
    assert lost
    told = [i for i, m in enumerate(sent) if isinstance(m, ch.CacheChanged) and lost & set(m.removed)]
    ended = [i for i, m in enumerate(sent) if isinstance(m, ch.Tokens)]
    assert told
    assert ended
    assert max(told) < min(ended)


def test_a_sequence_without_a_page_waits_for_shared_pages_a_while_and_not_for_ever() -> None:
    bench, prompt = Bench(pages=8), prompt_of(64)
    cached = bench.admit(prompt, local=True, max_tokens=1)
    bench.finish(cached.key)
    root = prefix.root(bench.runner.spec.fingerprint, bench.runner.spec.layout.fidelity)
    bench.say(ch.Pin(-1, tuple(prefix.chain(root, prompt))))  # somebody reads them, and stops reading
    grows = bench.admit(prompt_of(60, salt=1), local=True, max_tokens=40)
    bench.finish(grows.key)
    ended = [m for m in bench.tape.sent if isinstance(m, ch.Ended)]
    assert not ended, "the pages may come back"
    bench.now += SHARED_S / 2
    assert not bench.loop.turn([])
    bench.now += SHARED_S
    bench.loop.turn([])
    [ended] = [m for m in bench.tape.sent if isinstance(m, ch.Ended)]
    assert ended.key == grows.key
    assert "don't fit the pool" in ended.error.message
    bench.say(ch.Unpin(-1))
    assert bench.at_baseline()


@pytest.mark.parametrize("local", [True, False])
def test_an_admission_that_fails_at_any_line_leaves_nothing_behind(local: bool) -> None:
    bench, key, refused = Bench(), itertools.count(100), 0
    parts = ("loop", "admission", "handoffs", "requests", "leases", "scheduler", "job")
    for fault in each_line(*(f"decode_worker/engine/{part}.py" for part in parts)):
        admit = ch.Admit(next(key), request(1, prompt_of(40)), local, 0.0)
        with fault:
            bench.loop.take(admit)
        kinds = (ch.Admitted, ch.Refused, ch.Ended)
        [said] = [m for m in bench.tape.sent if isinstance(m, kinds) and m.key == admit.key]
        if isinstance(said, ch.Refused):
            refused += 1
            assert bench.at_baseline(), fault.where
        bench.say(ch.Cancel(admit.key, "over"))
        assert bench.at_baseline(), fault.where
    assert refused > 15
