"""Grammars that cost too much: refused with the remedy, at nobody else's expense, wherever their cost shows."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.engine.backends.paced.runner import paced_spec
from baton.engine.grammar import running as grammar
from baton.engine.grammar.running import Grammars
from baton.engine.grammar.state import GrammarState
from baton.grammars.limits import ProcessBounds
from baton.grammars.messages import NextMask
from baton.protos.errors import InvalidRequest, Overloaded
from baton.protos.nouns import EngineRequest, Grammar, Sampling

SPEC = paced_spec("test", kv_bytes_per_token=32, vocab_size=400, max_model_len=4096)
TIGHT = ProcessBounds(compile_cpu_s=0.1, step_cpu_s=0.1, memory_bytes=64 << 20)
POISON = "start: A\nA: /(.*a.{22}.*)/ & ~/(.*b.{22}.*)/"
# Shows its cost after some x: the lexer looks no further than it has to, and a first mask sees y.
LATE_POISON = "start: A\nA: /y|x{8}(.*a.{22}.*)/ & ~/x{8}(.*b.{22}.*)/"


def begun(grammars: Grammars, spec: str, kind: str = "grammar", tenant: bytes = b"") -> GrammarState:
    request = EngineRequest("r", (1,), 1, Sampling(grammar=Grammar(kind, spec)), tenant_salt=tenant)
    state = grammars.begin(request)
    assert state is not None
    return state


def until(condition: Callable[[], bool], grammars: Grammars, within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)
        grammars.turn()


def forked(grammars: Grammars) -> list[int]:
    """Ids of the grammar processes that live, in the order of their beginnings; the last is a spare."""
    process = grammars._server._process
    assert process is not None
    return sorted(map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()))


def exceeds(pid: int) -> None:
    """Ends a process that stands still as the kernel ends one that is over its CPU time."""
    os.kill(pid, signal.SIGPROF)
    os.kill(pid, signal.SIGCONT)


def test_a_grammar_that_compiles_for_minutes_is_refused_within_its_cpu_time() -> None:
    state = begun(Grammars(SPEC, bounds=TIGHT), POISON)
    with pytest.raises(InvalidRequest, match=r"over 0\.1 s of CPU to compile.*shorter repeats"):
        state.mask(400)


def test_a_grammar_that_takes_too_much_memory_is_refused() -> None:
    grammars = Grammars(SPEC, bounds=ProcessBounds(memory_bytes=4 << 20))
    with pytest.raises(InvalidRequest, match="4 MiB of memory"):
        begun(grammars, json.dumps({"enum": [f"v{i}" for i in range(6000)]}), "json_schema").mask(400)


def test_a_grammar_that_explodes_while_it_is_followed_ends_in_a_refusal() -> None:
    state = begun(Grammars(SPEC, bounds=TIGHT), LATE_POISON)
    assert state.mask(400)[ord("y")]
    for _ in range(8):
        state.take(ord("x"))
    with pytest.raises(InvalidRequest, match="the grammar"):
        state.mask(400)


def test_a_process_that_dies_of_a_token_ends_that_sequence_alone() -> None:
    grammars = Grammars(SPEC, bounds=ProcessBounds(step_cpu_s=9.0))
    poisoned, beside = begun(grammars, "[a-z]{3}", "regex"), begun(grammars, "[a-z]{3}", "regex")
    elsewhere = begun(grammars, "[a-x]{3}", "regex")
    for state in (poisoned, beside, elsewhere):
        assert state.mask(400)[ord("k")]
    elsewhere.take(ord("k"))
    os.kill(forked(grammars)[0], signal.SIGSTOP)
    poisoned.take(ord("k"))
    beside.take(ord("k"))
    exceeds(forked(grammars)[0])
    with pytest.raises(InvalidRequest, match="too complex"):
        poisoned.mask(400)
    assert beside.mask(400)[ord("k")], "it reads its tokens again in a new process"
    beside.take(ord("k"))
    beside.take(ord("k"))
    assert beside.done
    assert elsewhere.mask(400)[ord("k")]


def test_a_process_that_dies_of_a_preview_costs_the_drafts_alone() -> None:
    grammars = Grammars(SPEC, bounds=ProcessBounds(step_cpu_s=8.0))
    state = begun(grammars, "[a-z]{3}", "regex")
    state.mask(400)
    os.kill(forked(grammars)[0], signal.SIGSTOP)
    state.preview((ord("k"), ord("l")))
    exceeds(forked(grammars)[0])
    assert state.mask_after(1, 400).all()
    assert state.followed == 0
    assert not state.follows_drafts
    assert state.mask(400)[ord("k")], "its tokens are read again in a new process"
    for token in b"kkk":
        state.take(token)
    assert state.done


def previewed(grammars: Grammars) -> GrammarState:
    state = begun(grammars, "[a-z]{3}", "regex")
    state.mask(400)
    state.preview((ord("k"), ord("l")))
    state.mask_after(2, 400)
    assert state.followed == 2
    return state


def goes_on_without_previews(state: GrammarState) -> None:
    assert state.mask(400)[ord("k")], "its tokens are read again in a new process"
    assert not state.follows_drafts
    while not state.done:
        state.take(ord("k"))
    assert bytes(state.tokens) == b"kkk"


def test_a_token_that_dies_after_previews_is_tried_without_them() -> None:
    state = previewed(grammars := Grammars(SPEC, bounds=ProcessBounds(step_cpu_s=7.0)))
    os.kill(forked(grammars)[0], signal.SIGSTOP)
    state.take(ord("k"))
    exceeds(forked(grammars)[0])
    goes_on_without_previews(state)


def test_a_token_that_fails_after_previews_is_tried_without_them() -> None:
    state = previewed(grammars := Grammars(SPEC, bounds=ProcessBounds(step_cpu_s=6.0)))
    os.kill(forked(grammars)[0], signal.SIGSTOP)
    state.take(ord("k"))
    failed = NextMask(state._seq, 1, False, "too many states of the lexer", b"", 0)
    state.process._hear(failed)
    goes_on_without_previews(state)


def test_a_process_that_grew_by_previews_begins_again_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    state = previewed(grammars := Grammars(SPEC))
    monkeypatch.setattr(grammar, "TENANT_BYTES", 0)
    grammars.turn()
    monkeypatch.undo()
    goes_on_without_previews(state)
    monkeypatch.setattr(grammar, "TENANT_BYTES", 0)
    grammars.turn()
    assert state.error is not None, "the grammar itself is too large"


def test_a_poisonous_tenant_delays_nobody_elses_ordinary_schema() -> None:
    grammars = Grammars(SPEC, bounds=ProcessBounds(compile_cpu_s=1.0))
    poisons = [begun(grammars, POISON.replace("22", str(n)), tenant=b"poisonous") for n in range(20, 28)]
    ordinary = begun(grammars, '{"type": "integer"}', "json_schema", tenant=b"ordinary")
    assert ordinary.mask(400)[ord("7")]
    assert sum(state.ready for state in poisons) <= 1
    assert len(grammars._compiling) <= 1
    until(lambda: len(forked(grammars)) <= 3, grammars)  # one that was ended may not be buried yet


def test_a_grammar_whose_client_left_stops_compiling_and_the_next_one_begins() -> None:
    grammars = Grammars(SPEC, bounds=ProcessBounds(compile_cpu_s=600.0, memory_bytes=1 << 30))
    left, waits = begun(grammars, POISON), begun(grammars, POISON.replace("22", "21"))
    compiling = left.process
    until(lambda: compiling.child is not None and compiling.child.begun, grammars)
    del left, waits
    following = begun(grammars, "a", "regex")
    assert following.mask(400)[ord("a")]
    until(lambda: len(forked(grammars)) <= 2, grammars)
    assert len(grammars._processes) == 1


def test_a_tenants_grammars_beyond_their_memory_are_let_go_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = Grammars(SPEC)
    kept = [begun(grammars, "a", "regex"), begun(grammars, "b", "regex"), begun(grammars, "c", "regex", b"other")]
    begun(grammars, "d", "regex").mask(400)
    for state in kept:
        state.mask(400)
    monkeypatch.setattr(grammar, "TENANT_BYTES", sum(state.process.grown for state in kept[:2]))
    grammars.turn()
    assert [process.grammar.spec for process in grammars._processes.values()] == ["a", "b", "c"], (
        "nobody followed d"
    )
    monkeypatch.setattr(grammar, "TENANT_BYTES", kept[2].process.grown)
    grammars.turn()
    assert [state.error is None for state in kept].count(False) == 1
    assert kept[2].error is None
    refused = next(state for state in kept if state.error is not None)
    assert isinstance(refused.error, Overloaded)
    monkeypatch.undo()
    assert begun(grammars, refused.process.grammar.spec, "regex").mask(400).any(), (
        "compiled again when there is room"
    )


def test_a_tenant_never_meets_what_another_has_compiled() -> None:
    grammars = Grammars(SPEC)
    states = [begun(grammars, "a", "regex", tenant) for tenant in (b"one", b"two", b"one")]
    assert states[0].process is states[2].process is not states[1].process


def test_the_processes_that_follow_grammars_come_back_after_they_died() -> None:
    grammars = Grammars(SPEC, bounds=ProcessBounds(compile_cpu_s=3.0))
    before = begun(grammars, "[ab]{3}", "regex")
    assert before.mask(400)[ord("a")]
    process = grammars._server._process
    assert process is not None
    process.kill()
    process.wait()
    before.take(ord("a"))
    assert before.mask(400)[ord("b")], "its own process goes on"
    assert begun(grammars, "[cd]{3}", "regex").mask(400)[ord("c")]


SCHEMAS = st.recursive(
    st.sampled_from(
        [
            {"type": "string"},
            {"type": "number", "multipleOf": 0.01},
            {"type": "string", "pattern": "^(.*a.{9}.*)$"},
            {"enum": [f"v{i}" for i in range(500)]},
            {"type": "string", "format": "date-time", "maxLength": 30},
        ]
    ),
    lambda inner: st.one_of(
        st.builds(lambda items: {"type": "array", "items": items, "maxItems": 5000}, inner),
        st.builds(lambda parts: {"allOf": parts}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(lambda parts: {"anyOf": parts}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(
            lambda pattern, of: {
                "type": "object",
                "patternProperties": {pattern: of},
                "additionalProperties": {"type": "null"},
            },
            st.sampled_from(["^a.*b.{11}", "(x|y){3,90}$"]),
            inner,
        ),
    ),
    max_leaves=6,
)
PATTERNS = st.recursive(
    st.sampled_from(["a", ".", "[^b]", "(x|y)", r"\w"]),
    lambda inner: st.one_of(
        st.builds(lambda of, most: f"({of}){{0,{most}}}", inner, st.integers(1, 2000)),
        st.builds("".join, st.lists(inner, min_size=1, max_size=3)),
        st.builds(lambda of: f"({of})*", inner),
    ),
    max_leaves=8,
)
GRAMMARS = st.one_of(
    st.builds(lambda schema: Grammar("json_schema", json.dumps(schema)), SCHEMAS),
    st.builds(lambda depth: Grammar("json_schema", '{"items":' * depth + "{}" + "}" * depth), st.integers(1, 6000)),
    st.builds(lambda pattern: Grammar("regex", pattern), PATTERNS),
    st.builds(lambda a, b: Grammar("grammar", f"start: A\nA: /{a}/ & ~/{b}/"), PATTERNS, PATTERNS),
    st.builds(lambda n: Grammar("grammar", "start: " + "start | " * n + '"a"'), st.integers(1, 3000)),
    st.builds(lambda n: Grammar("grammar", 'start: "a" | ' + "(" * n + "start" + ")" * n), st.integers(1, 20_000)),
    st.builds(lambda n: Grammar("grammar", "root ::= " + "".join(f"r{i}\nr{i} ::= " for i in range(n)) + '"a"'),
              st.integers(1, 4000)),
    st.builds(lambda text, n: Grammar("grammar", text * n), st.sampled_from(["\n", "#\n", " \t", "root"]),
              st.integers(1, 16_000)),
)  # fmt: skip


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(asked=GRAMMARS, tokens=st.binary(max_size=12))
def test_every_grammar_ends_in_masks_or_in_a_typed_refusal(asked: Grammar, tokens: bytes) -> None:
    grammars = Grammars(SPEC, bounds=TIGHT)
    state = begun(grammars, asked.spec, asked.kind)
    with suppress(InvalidRequest):  # whatever else, and what never ends, fails
        state.mask(400)
        for token in tokens:
            if state.done or not state.mask(400)[token]:
                break
            state.take(token)
        assert state.done or state.mask(400).any()
    assert state.ready
