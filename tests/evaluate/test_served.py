"""Tests servers: a model behind HTTP has the figures of the model, by ids or by texts; what goes wrong has a
remedy.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.evaluate.evaluation import Questions, evaluate
from baton.evaluate.local import LocalSubject
from baton.evaluate.served import ServerSubject
from baton.evaluate.tokenizers import tokenizer_of
from baton.protos.errors import CheckpointError, ConfigError, InvalidRequest, Unavailable
from tests.evaluate.completions_server import CompletionsServer

ASKED = Questions(("a river in the hills", "the night train"), parts=("loss", "paths"), prompts=2, answer_tokens=6)


@pytest.fixture
def plain(server: CompletionsServer) -> Iterator[CompletionsServer]:
    server.says_ids = False
    yield server
    server.says_ids = True


def test_a_model_behind_a_server_is_the_model(local: LocalSubject, server: CompletionsServer) -> None:
    found = {figure.name: figure.value for figure in evaluate(ASKED, ServerSubject(server.url), local)}
    assert found["added loss"] == pytest.approx(0, abs=1e-6)
    assert found["KL"] == pytest.approx(0, abs=1e-6)
    assert found["answers that change"] == 0
    assert found["tokens before the first that differs"] == 6


def test_a_server_that_names_tokens_by_text_is_compared_by_text(
    local: LocalSubject, plain: CompletionsServer, model: Path
) -> None:
    served = ServerSubject(plain.url, tokenizer=tokenizer_of(model))
    found = {figure.name: figure.value for figure in evaluate(ASKED, served, local)}
    assert found["added loss"] == pytest.approx(0, abs=1e-6)
    assert found["another likeliest token"] == 0
    assert found["answers that change"] == 0


def test_requests_carry_the_servers_model_and_its_context_is_kept(server: CompletionsServer) -> None:
    served = ServerSubject(server.url + "/v1")
    served.answers([[1, 2]], 2)
    assert server.asked[-1][1]["model"] == "tiny"
    assert server.asked[-1][1]["repetition_penalty"] == 1.0, "the checkpoint's own is no greedy answer"
    assert served.context == server.local.context - 1, "it writes a token to each text that it scores"


def test_a_text_longer_than_the_context_is_scored_in_windows_that_a_server_takes(
    local: LocalSubject, server: CompletionsServer
) -> None:
    text = "a river in the hills " * local.context
    asked = Questions((text[: 8 * local.context],), parts=("loss",), window=local.context)
    found = {figure.name: figure.value for figure in evaluate(asked, ServerSubject(server.url), local)}
    assert found["added loss"] == pytest.approx(0, abs=1e-6)


def test_an_answer_ends_before_any_of_many_stop_strings(local: LocalSubject, server: CompletionsServer) -> None:
    prompt = local.encode("the night train")
    text = local.answers([prompt], 12)[0].text
    stop = text[len(text) // 2 :][:2]
    found = ServerSubject(server.url).answers([prompt], 12, ("\0a", "\0b", "\0c", "\0d", stop))[0]
    assert found.text == text[: text.index(stop)]
    assert len(server.asked[-1][1]["stop"]) == 4


def test_a_server_that_is_full_is_asked_again_as_often_as_it_may_pass(
    server: CompletionsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    paused = list[float]()
    monkeypatch.setattr("baton.evaluate.served.time.sleep", paused.append)
    served, server.busy = ServerSubject(server.url), 3
    assert len(served.answers([[1, 2]], 2)) == 1
    assert paused == 3 * [0.5]
    server.busy = 100
    with pytest.raises(InvalidRequest, match="answered 429: the queue is full"):
        served.answers([[1, 2]], 2)
    assert len(paused) == 8
    server.busy = 0


def test_a_server_without_tokenize_asks_for_a_tokenizer(plain: CompletionsServer) -> None:
    with pytest.raises(ConfigError, match="--tokenizer"):
        ServerSubject(plain.url).encode("river")


def test_nothing_at_the_url_is_said_in_one_sentence() -> None:
    with pytest.raises(Unavailable, match="nothing answers at"):
        ServerSubject("http://127.0.0.1:9")


def test_a_folder_without_a_tokenizer_is_told_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json, .*save_pretrained"):
        tokenizer_of(tmp_path)
