"""Grammars in the decode loop: who waits for one holds nobody up, and who has a bad one fails alone."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

from baton.engine.grammar.running import Grammars
from baton.grammars.server import ForkedGrammar
from baton.protos import channel as ch
from baton.protos.nouns import EngineRequest, Grammar, Sampling
from tests.decode_worker.engine.loop_bench import Bench


def admit(key: int, spec: str | None, emitted: bytes = b"", seed: int = 7) -> ch.Admit:
    sampling = Sampling(seed=seed, max_tokens=40, grammar=None if spec is None else Grammar("regex", spec))
    prompt = tuple(range(3, 40))
    return ch.Admit(key, EngineRequest(str(key), (*prompt, *emitted), len(prompt), sampling), True, 0.0)


def outputs(messages: list[Any], key: int) -> list[int]:
    runs = [o.run for m in messages if isinstance(m, ch.Tokens) for o in m.outputs if o.key == key]
    return [token for run in runs for token in run.token_ids]


def until_ended(bench: Bench, *keys: int, told: tuple[Any, ...] = (), within_s: float = 60.0) -> list[Any]:
    """Returns what the loop says, once it was ``told`` something, until each of ``keys`` has ended."""
    said: list[Any] = []
    left = set(keys)
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        said += (news := bench.say(*told))
        told = ()
        left -= {o.key for m in news if isinstance(m, ch.Tokens) for o in m.outputs if o.run.finish_reason}
        left -= {m.key for m in news if isinstance(m, ch.Ended)}
        if not left:
            return said
        time.sleep(0.001)  # a grammar may still compile
    raise AssertionError(f"{left} never ended")


def test_a_completed_grammar_ends_the_choice_with_stop() -> None:
    bench = Bench()
    said = until_ended(bench, 1, told=(admit(1, "[ab]{5}!"),))
    assert re.fullmatch(rb"[ab]{5}!", bytes(outputs(said, 1)))
    last = [o.run for m in said if isinstance(m, ch.Tokens) for o in m.outputs][-1]
    assert (last.finish_reason, last.stop_token_id) == ("stop", None)
    assert bench.pool.snapshot_counts().leases == 0


def test_an_answer_goes_on_elsewhere_in_the_middle_of_its_grammar() -> None:
    whole = Bench()
    answer = outputs(until_ended(whole, 1, told=(admit(1, "[ab]{9}"),)), 1)
    for cut in (1, 5, 8):
        other = Bench()
        said = until_ended(other, 1, told=(admit(1, "[ab]{9}", bytes(answer[:cut])),))
        assert outputs(said, 1) == answer[cut:]


def test_a_grammar_that_still_compiles_holds_up_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    with monkeypatch.context() as held:
        held.setattr(ForkedGrammar, "receive", lambda self: None)
        said = until_ended(bench, 2, told=(admit(1, "[ab]{5}"), admit(2, None)))
        assert len(outputs(said, 2)) == 40
        assert outputs(said, 1) == []
        assert bench.loop.wait_s() < 0.01
    assert len(outputs(until_ended(bench, 1), 1)) == 5


def test_an_answer_whose_grammar_is_slow_to_say_so_ends_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, late = Bench(), Bench()
    expected = outputs(until_ended(whole, 1, told=(admit(1, "[ab]{5}"),)), 1)
    monkeypatch.setattr(Grammars, "wait", lambda *_, **__: None)  # no step waits: every word of it comes late
    said = until_ended(late, 1, 2, told=(admit(1, "[ab]{5}"), admit(2, None)))
    assert outputs(said, 1) == expected
    last = [o.run for m in said if isinstance(m, ch.Tokens) for o in m.outputs if o.key == 1][-1]
    assert (last.output_index, last.token_ids, last.finish_reason) == (5, (), "stop")
    assert late.pool.snapshot_counts().leases == 0


def test_a_bad_grammar_fails_its_own_request_alone() -> None:
    bench = Bench()
    said = until_ended(bench, 1, 2, told=(admit(1, "(a"), admit(2, None)))
    [ended] = [m for m in said if isinstance(m, ch.Ended)]
    assert (ended.key, ended.error.type) == (1, "InvalidRequest")
    assert "regex" in ended.error.message
    assert len(outputs(said, 2)) == 40
