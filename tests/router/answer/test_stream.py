"""Runs of ids -> pieces: the same answer however the runs were cut, and nothing left open."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from baton.cluster.metering.telemetry import RouterMetrics
from baton.protos.errors import WorkerLost
from baton.protos.nouns import Sampling, TokenRun
from baton.router.answer.generation import Generation, GenerationOptions
from baton.router.answer.metering import Meter
from baton.router.answer.stream import ChoiceText, TextDelta
from baton.router.api.openai.shapes import collected
from baton.router.observe.tallies import Tallies
from baton.router.request.request import ChoiceStream, ChoiceSummary
from baton.router.text.catalog import ModelEntry
from baton.router.text.model import TextModel, load_text

TALLIES = Tallies(RouterMetrics(CollectorRegistry()))
ENTRY = ModelEntry("tiny", 4096, 400, (1,))


@pytest.fixture(scope="session")
def text(model_dir: Path) -> TextModel:
    return load_text(model_dir, 400)


def choice_of(text: TextModel, options: GenerationOptions, sampling: Sampling) -> ChoiceText:
    generation = Generation("r", ENTRY, options, ((5, 6),), (sampling,))
    stream = ChoiceStream(0, ChoiceSummary(prompt_tokens=2))
    meter = Meter(TALLIES, 0.0, "tiny", stream.summary, True)
    return ChoiceText(0, stream, generation, 0, text, meter)


def answer(
    text: TextModel, options: GenerationOptions, sampling: Sampling, ids: list[int], cuts: set[int]
) -> TextDelta:
    """The whole answer when ``ids`` come in runs that end before each of ``cuts``; a last id of 1 is the end."""
    choice, pieces, at = choice_of(text, options, sampling), [], 0
    for end in sorted({c for c in cuts if 0 < c < len(ids)} | {len(ids)}):
        is_last = end == len(ids)
        stopped = is_last and ids[-1] == 1
        reason = ("stop" if stopped else "length") if is_last else ""
        pieces.append(choice.take(TokenRun(at, tuple(ids[at:end]), (), reason, 1 if stopped else None)))
        if pieces[-1].finish_reason:
            break
        at = end
    return collected([pieces])[0]


@given(data=st.data())
def test_an_answer_is_the_same_however_its_runs_are_cut(text: TextModel, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(2, 399), min_size=1, max_size=30))
    ids += data.draw(st.sampled_from([[], [1]]))
    options = GenerationOptions(
        {}, stops=tuple(data.draw(st.lists(st.text("aeo �", min_size=1, max_size=2), max_size=2)))
    )
    sampling = Sampling(min_tokens=data.draw(st.integers(0, 8)))
    whole = answer(text, options, sampling, ids, set())
    cut = answer(text, options, sampling, ids, data.draw(st.sets(st.integers(1, 30))))
    single = answer(text, options, sampling, ids, set(range(31)))
    assert whole == cut == single
    if not options.stops:
        assert whole.text == text.tokenizer.decode([i for i in ids if i != 1])
        assert whole.token_ids == tuple(ids)


def test_an_end_token_that_is_no_special_one_stays_out_of_the_text(text: TextModel) -> None:
    fox, dog = text.tokenizer.encode(" fox", False), text.tokenizer.encode(" dog", False)
    piece = choice_of(text, GenerationOptions({}), Sampling()).take(TokenRun(0, (*fox, dog[0]), (), "stop", dog[0]))
    assert (piece.text, piece.token_ids) == (" fox", (*fox, dog[0]))


@pytest.mark.parametrize("stops", [(), ("zzz",)])
def test_an_end_token_that_a_grammar_knows_late_as_the_end_stays_out_of_the_text(
    text: TextModel, stops: tuple[str, ...]
) -> None:
    fox, options = text.tokenizer.encode(" fox", False), GenerationOptions({"grammar": None}, stops=stops)
    options = msgspec.structs.replace(options, skip_special=False)
    count = len(fox) + 1
    late, whole, middle = (choice_of(text, options, Sampling()) for _ in range(3))
    pieces = [late.take(TokenRun(0, (*fox, 1))), late.take(TokenRun(count, (), (), "stop", 1))]
    at_once = whole.take(TokenRun(0, (*fox, 1), (), "stop", 1))
    assert collected([pieces]) == collected([[at_once]])
    assert (at_once.text, at_once.token_ids, late.tokens) == (" fox", (*fox, 1), count)
    begun = middle.take(TokenRun(0, (*fox, 1))).text
    rest = middle.take(TokenRun(count, tuple(fox), (), "length")).text
    assert begun + rest == text.tokenizer.decode([*fox, 1, *fox], skip_special_tokens=False)


def test_the_end_of_a_grammar_that_another_worker_chooses_anew_stays_out_of_the_text_as_well(
    text: TextModel,
) -> None:
    fox, options = text.tokenizer.encode(" fox", False), GenerationOptions({"grammar": None}, skip_special=False)
    choice = choice_of(text, options, Sampling())
    pieces = [choice.take(TokenRun(0, (*fox, 1))), choice.take(TokenRun(len(fox) + 1, (1,), (), "stop", 1))]
    assert "".join(piece.text for piece in pieces) == " fox"
    assert (pieces[-1].finish_reason, choice.tokens) == ("stop", len(fox) + 2)


def test_a_stop_string_may_be_kept_in_the_text(text: TextModel) -> None:
    ids = text.tokenizer.encode("one two three", False)
    piece = choice_of(text, GenerationOptions({}, stops=(" two",), include_stop=True), Sampling()).take(
        TokenRun(0, tuple(ids))
    )
    assert (piece.text, piece.finish_reason) == ("one two", "stop")
    assert len(piece.token_ids) < len(ids)


def test_a_stop_string_is_not_looked_for_before_min_tokens(text: TextModel) -> None:
    ids = text.tokenizer.encode("a b a b a b", False)
    piece = choice_of(text, GenerationOptions({}, stops=("b",)), Sampling(min_tokens=len(ids))).take(
        TokenRun(0, tuple(ids[:-1]))
    )
    assert (piece.text, piece.finish_reason) == (text.tokenizer.decode(ids[:-1]), "")


async def test_what_came_before_an_error_is_given_out_first(text: TextModel) -> None:
    choice = choice_of(text, GenerationOptions({}), Sampling())
    choice.stream.push(TokenRun(0, tuple(text.tokenizer.encode("fox", False))))
    choice.stream.fail(WorkerLost("gone"))
    pieces: list[TextDelta] = []

    async def read() -> None:
        async for piece in choice.pieces():
            pieces.append(piece)  # noqa: PERF401 (kept when the stream breaks off)

    with pytest.raises(WorkerLost):
        await read()
    assert [piece.text for piece in pieces] == ["fox"]
