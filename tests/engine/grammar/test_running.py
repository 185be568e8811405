"""Tests grammars: what they allow, that replays rebuild them, that bad ones fail alone and big ones are refused."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import jsonschema
import msgspec
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from baton.engine.backends.paced.runner import PacedRunner, paced_answer, paced_spec
from baton.engine.grammar import running as grammar
from baton.engine.grammar.running import Grammars
from baton.engine.grammar.state import GrammarState
from baton.engine.plan import SampleSpec
from baton.engine.sampling import choose
from baton.engine.sequence import SequenceState
from baton.kernels.registry import kernels
from baton.protos.errors import InvalidRequest
from baton.protos.nouns import EngineRequest, Grammar, Sampling
from tests.conformance.checkpoints import write_tokenizer
from tests.conformance.drive import Driver

SHAPE = {"kv_bytes_per_token": 32, "vocab_size": 400, "max_model_len": 4096}
SPEC = paced_spec("test", **SHAPE)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def sampling(kind: str, spec: str, **fields: object) -> Sampling:
    return Sampling(grammar=Grammar(kind, spec), **({"max_tokens": 300} | fields))  # type: ignore[arg-type]


def begun(asked: Sampling, emitted: tuple[int, ...] = (), grammars: Grammars | None = None) -> GrammarState:
    state = (grammars or Grammars(SPEC)).begin(EngineRequest("r", (1, *emitted), 1, asked))
    assert state is not None
    return state


def walk(state: GrammarState, rng: random.Random, vocab: int = 400, most: int = 300) -> list[int]:
    """A random answer that the masks allow, to its end."""
    taken: list[int] = []
    while not state.done and len(taken) < most:
        taken.append(int(rng.choice(np.flatnonzero(state.mask(vocab)).tolist())))
        state.take(taken[-1])
    return taken


@pytest.mark.parametrize("vocab", [600, 700], ids=["every id a token", "ids beyond the tokenizer's"])
def test_a_model_that_has_no_end_token_answers_to_a_grammar(tmp_path: Path, vocab: int) -> None:
    """Its answer ends where the grammar does, and ids that no text stands for are never allowed."""
    write_tokenizer(tmp_path, 600)
    spec = paced_spec("test", kv_bytes_per_token=32, vocab_size=vocab, max_model_len=4096)
    grammars, words = Grammars(spec, tmp_path / "tokenizer.json"), Tokenizer.from_file(f"{tmp_path}/tokenizer.json")
    assert not spec.eos_token_ids
    for seed in range(3):
        state = begun(sampling("regex", "(foo|bar)-[0-9]{4}"), grammars=grammars)
        grammars.wait(state, for_ever=True)
        taken = walk(state, random.Random(seed), vocab)
        assert state.done
        assert re.fullmatch("(foo|bar)-[0-9]{4}", words.decode(taken))


def test_an_end_token_beyond_the_tokenizers_ids_ends_a_grammar(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 600)
    shape = paced_spec("test", kv_bytes_per_token=32, vocab_size=700, max_model_len=4096)
    spec = msgspec.structs.replace(shape, eos_token_ids=(0, 650))
    grammars, words = Grammars(spec, tmp_path / "tokenizer.json"), Tokenizer.from_file(f"{tmp_path}/tokenizer.json")
    state = begun(sampling("regex", "(foo|bar)+"), grammars=grammars)
    grammars.wait(state, for_ever=True)
    *_, last = taken = walk(state, random.Random(0), 700)
    assert last in spec.eos_token_ids
    assert re.fullmatch("(foo|bar)+", words.decode(taken))
    assert all(token < 600 for token in taken[:-1])


@pytest.mark.parametrize("seed", range(8))
def test_any_answer_within_the_masks_is_valid_json_of_the_schema(seed: int) -> None:
    state = begun(sampling("json_schema", json.dumps(PERSON)))
    answer = bytes(walk(state, random.Random(seed)))
    assert state.done
    jsonschema.validate(json.loads(answer), PERSON)


@pytest.mark.parametrize(
    ("kind", "spec", "pattern"),
    [
        ("regex", r"[a-c]{3}-\d{2}", r"[a-c]{3}-\d{2}"),
        ("choice", '["yes", "no \\"quoted\\"", "日本"]', 'yes|no "quoted"|日本'),
        ("grammar", 'root ::= item ("," item)? ";"\nitem ::= [0-9] | "x"', r"[0-9x](,[0-9x])?;"),
        ("grammar", 'start: "a" "b"~2 /c|d/', r"abb[cd]"),
    ],
)
def test_each_kind_ends_by_itself_and_matches(kind: str, spec: str, pattern: str) -> None:
    for seed in range(5):
        state = begun(sampling(kind, spec))
        text = bytes(walk(state, random.Random(seed))).decode()
        assert state.done
        assert re.fullmatch(pattern, text)


def test_a_replay_stands_where_the_unbroken_answer_stood() -> None:
    asked = sampling("json_schema", json.dumps(PERSON))
    answer = walk(begun(asked), random.Random(3))
    for cut in range(0, len(answer), 3):
        unbroken, replayed = begun(asked), begun(asked, tuple(answer[:cut]))
        for token in answer[:cut]:
            unbroken.take(token)
        assert (unbroken.mask(400) == replayed.mask(400)).all()


def test_the_models_own_tokenizer_and_end_token_are_used(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(['{"name": "Zoë 日本", "age": 12}'] * 9, trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    grammars = Grammars(paced_spec("t", 32, 333, 99, eos_token_ids=(0,)), tmp_path / "tokenizer.json")
    for seed in range(6):
        state = begun(sampling("json_schema", json.dumps(PERSON)), grammars=grammars)
        ids = walk(state, random.Random(seed), vocab=333)
        jsonschema.validate(json.loads(tokenizer.decode(ids)), PERSON)
    state = begun(sampling("regex", "(ab)+"), grammars=grammars)
    for token in tokenizer.encode("abab").ids:
        state.take(token)
    assert state.mask(333)[0]
    assert not state.done
    state.take(0)
    assert state.done


def test_a_vocabulary_without_an_end_token_is_never_asked_for_one() -> None:
    state = begun(sampling("regex", "[ab]{0,3}"))
    for token in b"ab":
        assert set(np.flatnonzero(state.mask(400))) == set(b"ab")
        state.take(token)
    assert not state.done
    state.take(ord("a"))
    assert state.done


def test_the_sampler_takes_the_likeliest_allowed_token_and_a_mask_outranks_a_ban() -> None:
    logits = torch.zeros(1, 400)
    logits[0, 7], logits[0, ord("n")] = 9.0, 1.0
    state = begun(sampling("choice", '["yes", "no"]', temperature=0.0))
    sequence = SequenceState(0, EngineRequest("r", (1,), 1, sampling("choice", '["yes", "no"]')), (), 99, state)

    def chosen(spec: SampleSpec) -> int:
        return choose(logits, [0], [spec], kernels().sample)[0].token_id

    greedy = Sampling(temperature=0.0)
    assert chosen(SampleSpec(greedy, 0, 1, [1], 1, (), sequence.sample_spec().allowed)) == ord("n")
    run = sequence.append(ord("n"))
    assert run.finish_reason == ""
    spec = SampleSpec(greedy, 0, 2, [1, ord("n")], 1, (), sequence.sample_spec().allowed)
    assert chosen(spec) == ord("o")
    assert sequence.append(ord("o")).finish_reason == "stop"
    assert sequence.stop_token_id is None


class Slow:
    """Follows a grammar as ``state`` does, whose answers aren't there yet while ``is_late``."""

    def __init__(self, state: GrammarState) -> None:
        self.state, self.is_late = state, False

    @property
    def ready(self) -> bool:
        return not self.is_late and self.state.ready

    @property
    def done(self) -> bool:
        return not self.is_late and self.state.done

    def __getattr__(self, name: str) -> object:
        return getattr(self.state, name)


@pytest.mark.parametrize(("said", "reason"), [("no", "stop"), ("ye", "length")])
@pytest.mark.parametrize("is_late", [False, True])
def test_the_last_token_that_fits_ends_an_answer_as_its_grammar_says_however_late(
    said: str, reason: str, is_late: bool
) -> None:
    asked = sampling("choice", '["yes", "no"]', max_tokens=2)
    slow = Slow(begun(asked))
    sequence = SequenceState(0, EngineRequest("r", (1,), 1, asked), (), 99, slow)  # type: ignore[arg-type]
    assert sequence.append(ord(said[0])).finish_reason == ""
    slow.is_late = is_late
    run = sequence.append(ord(said[1]))
    assert run.finish_reason == ("" if is_late else reason)
    assert sequence.late_end() is None
    slow.is_late = False
    state = slow.state
    assert state.done == (reason == "stop")  # waits for the grammar
    if is_late:
        late = sequence.late_end()
        assert late is not None
        assert (late.output_index, late.token_ids, late.finish_reason) == (2, (), reason)
    assert sequence.late_end() is None


def test_an_answer_that_goes_on_after_its_grammar_was_complete_ends_with_the_end_token() -> None:
    asked = sampling("choice", '["yes", "no"]')
    state = begun(asked, emitted=tuple(b"no"))
    assert state.done  # waits for the grammar, without whose answer no token is chosen
    sequence = SequenceState(0, EngineRequest("r", (1, *b"no"), 1, asked), (7,), 99, state)
    allowed = sequence.sample_spec().allowed
    assert allowed is not None
    assert np.flatnonzero(allowed(400)).tolist() == [7]
    assert sequence.append(7).finish_reason == "stop"


def test_the_paced_engine_answers_within_the_grammar_whatever_the_chunks() -> None:
    asked = sampling("json_schema", json.dumps(PERSON), seed=5)
    prompt = list(range(40))
    grammars = Grammars(SPEC)
    expected = paced_answer(prompt, asked, grammar=begun(asked, grammars=grammars), **SHAPE)
    jsonschema.validate(json.loads(bytes(expected)), PERSON)
    for chunk in (7, 500):
        runner = PacedRunner("test", step_seconds=lambda shape: 0.0, **SHAPE)  # type: ignore[arg-type]
        driver = Driver(runner, pages=60, chunk=chunk, grammars=grammars)
        assert driver.answer([prompt], asked) == [expected]


def test_a_grammar_is_compiled_once_and_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "TENANT_KEPT", 2)
    grammars = Grammars(SPEC)
    first = begun(sampling("regex", "a"), grammars=grammars)
    again = begun(sampling("regex", "a"), grammars=grammars)
    assert first.process is again.process
    for i in range(4):
        begun(sampling("regex", f"a{i}"), grammars=grammars).mask(400)
    grammars.turn()
    kept = list(grammars._processes.values())
    assert first.process in kept, "somebody follows it"
    assert len(kept) == 3


@pytest.mark.parametrize(
    ("kind", "spec", "says"),
    [
        ("regex", "(a", "regex parse error"),
        ("json_schema", '{"type": "nonsense"}', "nonsense"),
        ("json_schema", '{"type":', "EOF"),
        ("json_schema", '{"enum": []}', "nsatisfiable"),
        ("grammar", "root ::= " + "(" * 9000, "recursion"),
        ("regex", "a?" * 40_000, "bytes"),
        ("poem", "x", "json_schema, regex"),
    ],
)
def test_a_bad_grammar_is_a_refusal_that_says_why(kind: str, spec: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        begun(sampling(kind, spec)).mask(400)


def test_a_vocabulary_below_a_byte_is_refused_by_name() -> None:
    state = begun(sampling("regex", "a"), grammars=Grammars(paced_spec("t", 32, 100, 99)))
    with pytest.raises(InvalidRequest, match="no tokenizer and only 100 tokens"):
        state.mask(100)


@pytest.mark.parametrize("seed", range(3))
def test_a_preview_has_the_masks_of_the_answer_that_it_shows_and_moves_nothing(seed: int) -> None:
    grammars, asked = Grammars(SPEC), sampling("json_schema", json.dumps(PERSON))
    answer = walk(begun(asked, grammars=grammars), random.Random(seed))
    for start in (0, len(answer) // 2):
        state, taken = (begun(asked, tuple(answer[:start]), grammars) for _ in range(2))
        state.mask(400)
        coming = answer[start : start + 16]
        state.preview(coming)
        for count, token in enumerate(coming[:-1], 1):
            taken.take(token)
            assert (state.mask_after(count, 400) == taken.mask(400)).all()
        state.tell_ahead(coming[:5])
        for token in coming[:5]:
            assert not state.done
            state.take(token)
        assert (state.mask(400) == begun(asked, tuple(answer[: start + 5]), grammars).mask(400)).all()


@pytest.mark.parametrize(("drafts", "followed"), [(b"ab-1", 4), (b"ab-12", 4), (b"ab+1", 2), (b"zzz", 0)])
def test_drafts_are_followed_up_to_the_first_bad_one_or_the_last(drafts: bytes, followed: int) -> None:
    state = begun(sampling("regex", "[ab]{2}-[0-9]{2}"))
    state.mask(400)
    state.preview(tuple(drafts))
    assert state.mask_after(len(drafts), 400).all() == (followed < len(drafts))
    assert state.followed == followed
    assert set(np.flatnonzero(state.mask(400))) == set(b"ab")


def test_what_must_follow_is_told_with_the_mask() -> None:
    state = begun(sampling("regex", "[ab] then [cd]"))
    state.mask(400)
    assert not state.forced
    state.take(ord("a"))
    state.mask(400)
    assert bytes(state.forced) == b" then "
