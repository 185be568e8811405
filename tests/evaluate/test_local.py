"""The engine in this process: chunks, batches and stop strings change nothing but what they should."""

from __future__ import annotations

import pytest

from baton.evaluate.local import LocalSubject
from baton.evaluate.loss import bits, loss_figures
from baton.evaluate.needle import answer_needles, needle_figures, needles
from baton.evaluate.text import cut
from baton.protos.errors import InvalidRequest

TEXTS = ["a river in the hills\n\nand the sea", "nobody on the platform could say why the night train left late"]


def test_a_prompt_read_in_chunks_has_the_same_likelihoods(
    local: LocalSubject, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = local.encode(TEXTS[1] * 3)
    whole = next(local.scores([ids], 3))
    monkeypatch.setattr(local, "_chunk", 16)
    assert next(local.scores([ids], 3)) == whole
    assert len(whole) == len(ids) - 1


def test_answers_are_the_likeliest_tokens_one_by_one(local: LocalSubject) -> None:
    prompts = [local.encode(text) for text in TEXTS]
    for prompt, answer in zip(prompts, local.answers(prompts, 6, to_the_end=True), strict=True):
        scored = next(local.scores([[*prompt, *(answer.ids or ())]], 1))[-6:]
        assert [token.best for token in scored] == list(answer.tokens)
        assert [token.logprob for token in scored] == pytest.approx(answer.logprobs, abs=1e-4)


def test_a_model_with_recurrent_state_is_judged_as_it_reads_and_writes(
    recurrent: LocalSubject, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [recurrent.encode(text) for text in TEXTS]
    for prompt, answer in zip(prompts, recurrent.answers(prompts, 6, to_the_end=True), strict=True):
        scored = next(recurrent.scores([[*prompt, *(answer.ids or ())]], 1))[-6:]
        assert [token.best for token in scored] == list(answer.tokens)
        assert [token.logprob for token in scored] == pytest.approx(answer.logprobs, abs=1e-4)
    ids = recurrent.encode(TEXTS[1] * 3)
    whole = next(recurrent.scores([ids], 3))
    monkeypatch.setattr(recurrent, "_chunk", 16)
    assert next(recurrent.scores([ids], 3)) == whole


def test_an_answer_ends_before_its_stop_string(local: LocalSubject) -> None:
    prompt = local.encode(TEXTS[0])
    text = local.answers([prompt], 12)[0].text
    stop = text[len(text) // 2 :][:2]
    assert local.answers([prompt], 12, (stop,))[0].text == text[: text.index(stop)]


def test_what_does_not_fit_the_context_is_refused(local: LocalSubject) -> None:
    with pytest.raises(InvalidRequest, match="don't fit a context of"):
        local.answers([[1] * (local.context - 3)], 4)


def test_rounding_adds_to_the_loss_and_a_model_adds_nothing_to_itself(
    local: LocalSubject, rounded: LocalSubject
) -> None:
    documents = cut(TEXTS, local.encode)
    known, found = bits(local, documents), bits(rounded, documents)
    own = list(loss_figures(documents, known, known))
    assert (own[2].value, own[2].low, own[2].high) == (0, 0, 0)
    figures = list(loss_figures(documents, found, known))
    assert figures[2].value == pytest.approx(sum(found) / sum(known) - 1)
    assert figures[2].value != 0
    assert figures[0].value == pytest.approx(sum(found) / sum(len(text.encode()) for text in TEXTS))


def test_a_needle_is_where_it_was_put_and_its_number_is_weighed(local: LocalSubject) -> None:
    hidden = needles(local, TEXTS, [160, 100_000])  # the second doesn't fit and is left out
    assert len(hidden) == 15
    assert {one.length for one in hidden} == {160}
    assert all(len(one.prompt) + len(one.answer) <= 160 + 64 for one in hidden)
    found = answer_needles(local, hidden[:2])
    assert all(one.nats > 0 for one in found)
    names = [figure.name for figure in needle_figures(hidden[:2], found, found)]
    assert "needles lost" in names
