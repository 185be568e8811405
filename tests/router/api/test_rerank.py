"""Reranking and scoring over a real socket: order, the words of each client, and what is refused."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from pathlib import Path

import jsonschema
import pytest
from tokenizers import AddedToken, Tokenizer

from baton.router.api import rerank
from baton.router.request.request import ServedModel
from baton.router.text.reranking import JudgePrompt
from baton.router.text.room import LEAST_LONG
from tests.router import conftest as parts

WORDS = ["yes", "no", "<|im_start|>", "<|im_end|>"]
LONG, SHORT = "The quick brown fox jumps over the lazy dog", "x"


@pytest.fixture(scope="module")
def judge_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("judge")
    parts.train_tokenizer(directory)
    file = directory / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.add_tokens([AddedToken(word, special=word[0] == "<") for word in WORDS])
    tokenizer.save(str(file))
    return directory


@pytest.fixture
async def judge(start_router, fake, model_dir: Path, judge_dir: Path) -> AsyncIterator[parts.Clients]:
    vocab = Tokenizer.from_file(str(judge_dir / "tokenizer.json")).get_vocab_size()
    fake.served = (ServedModel("judge", 1024, vocab, (1,)), ServedModel("tiny", 1024, vocab, (1,)))
    async with start_router(fake, {"judge": judge_dir, "tiny": model_dir}) as clients:
        yield clients


def score(tokens: int) -> float:
    """Returns the score that the fake's likelihoods of yes and no make."""
    return 1 / (1 + math.exp(-1.0 - tokens / 10 + 10.0))


async def test_documents_come_best_first_with_their_places_and_texts(judge, fake) -> None:
    body = {"model": "judge", "query": "fox", "documents": [SHORT, {"text": LONG}, "a dog"]}
    found = (await judge.http.post("/v1/rerank", json=body)).json()
    scores = {r["index"]: r["relevance_score"] for r in found["results"]}
    lengths = [len(request.token_ids) for request in fake.requests]
    assert [scores[at] for at in range(3)] == pytest.approx([score(n) for n in lengths])
    assert list(scores.values()) == sorted(scores.values(), reverse=True)
    assert {r["index"]: r["document"]["text"] for r in found["results"]} == {0: SHORT, 1: LONG, 2: "a dog"}
    assert found["usage"]["total_tokens"] == sum(lengths)
    assert {(r.sampling.max_tokens, len(r.sampling.logprob_token_ids)) for r in fake.requests} == {(1, 2)}


async def test_a_prompt_is_worded_as_the_model_was_trained(judge, fake, judge_dir: Path) -> None:
    body = {"model": "judge", "query": "which?", "documents": ["that"], "instruction": "Find it"}
    await judge.http.post("/v1/rerank", json=body)
    tokenizer = Tokenizer.from_file(str(judge_dir / "tokenizer.json"))
    text = tokenizer.decode(list(fake.requests[0].token_ids), skip_special_tokens=False)
    assert text.startswith("<|im_start|>system")
    assert "<Instruct>: Find it" in text
    assert "<Query>: which?" in text
    assert text.rstrip().endswith("</think>")
    [yes, no] = fake.requests[0].sampling.logprob_token_ids
    assert (tokenizer.id_to_token(yes), tokenizer.id_to_token(no)) == ("yes", "no")


@pytest.mark.parametrize("path", ["/v1/rerank", "/v1/score"])
async def test_a_query_that_counts_with_too_many_documents_is_refused_before_any_prompt_is_made(
    judge, fake, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(rerank, "MOST_TOKENS", 2_000)
    many, words = [SHORT] * 40, " ".join([LONG] * 10)
    body = {"query": words, "documents": many} if path == "/v1/rerank" else {"text_1": words, "text_2": many}
    made: list[str] = []
    of_a_pair = JudgePrompt.prompt

    async def counted(self, text, asked, document, most):
        made.append(document)
        return await of_a_pair(self, text, asked, document, most)

    monkeypatch.setattr(JudgePrompt, "prompt", counted)
    refused = await judge.http.post(path, json={"model": "judge"} | body)
    assert refused.status_code == 400
    assert "send fewer documents, or shorten the query" in refused.json()["error"]["message"]
    assert (made, fake.requests) == ([], [])
    body |= {"query": "q"} if path == "/v1/rerank" else {"text_1": "q"}
    assert (await judge.http.post(path, json={"model": "judge"} | body)).status_code == 400, "frames count as well"
    assert 0 < len(made) < 40


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
async def test_only_the_best_are_told_and_without_their_texts_where_that_is_asked(judge, path: str) -> None:
    body = {"model": "judge", "query": "q", "documents": ["a", "b", LONG], "top_n": 1, "return_documents": False}
    found = (await judge.http.post(path, json=body | {"rank_fields": ["text"]})).json()
    assert [set(each) for each in found["results"]] == [{"index", "relevance_score"}]
    assert found["results"][0]["index"] == 2


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
async def test_one_query_or_one_for_each_text_is_scored_in_order(judge, fake, path: str) -> None:
    one = (await judge.http.post(path, json={"model": "judge", "text_1": "q", "text_2": [SHORT, LONG]})).json()
    assert [(each["index"], each["object"]) for each in one["data"]] == [(0, "score"), (1, "score")]
    assert [each["score"] for each in one["data"]] == pytest.approx(
        [score(len(r.token_ids)) for r in fake.requests]
    )
    each = await judge.http.post(path, json={"model": "judge", "text_1": ["q", "q"], "text_2": [SHORT, LONG]})
    assert each.json()["data"] == one["data"]


async def test_a_document_that_is_too_long_loses_its_end(judge, fake) -> None:
    body = {"model": "judge", "query": "q", "documents": [LONG * 200], "max_tokens_per_doc": 30}
    assert (await judge.http.post("/v1/rerank", json=body)).status_code == 200
    body["max_tokens_per_doc"] = 9999
    assert (await judge.http.post("/v1/rerank", json=body)).status_code == 200
    short, long = (len(request.token_ids) for request in fake.requests)
    assert long == 1023
    await judge.http.post("/v1/rerank", json=body | {"documents": [LONG * 200], "max_tokens_per_doc": 1})
    assert len(fake.requests[2].token_ids) == short - 29
    assert fake.requests[0].token_ids[-3:] == fake.requests[1].token_ids[-3:]


async def test_of_long_texts_as_much_is_read_as_decides(judge, fake, read: list[int]) -> None:
    long, short = LONG * 16_000, LONG * 200
    for document in (long, short):
        body = {"model": "judge", "query": "q", "documents": [document]}
        assert (await judge.http.post("/v1/rerank", json=body)).status_code == 200
    assert fake.requests[0].token_ids == fake.requests[1].token_ids
    refused = await judge.http.post("/v1/rerank", json={"model": "judge", "query": long, "documents": ["x", "y"]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "query")
    assert sum(read) < 6 * LEAST_LONG


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("rerank", {"documents": []}, "documents"),
        ("rerank", {"documents": ["x"] * 2049}, "documents"),
        ("rerank", {"documents": [{"title": "x"}]}, "documents[0]"),
        ("rerank", {"query": ""}, "query"),
        ("rerank", {"query": LONG * 200}, "query"),
        ("rerank", {"query": LONG * 200, "max_tokens_per_doc": 5}, "query"),
        ("rerank", {"top_n": 0}, "top_n"),
        ("rerank", {"model": "tiny"}, "model"),
        ("rerank", {"instruction": ""}, "instruction"),
        ("score", {"text_1": ["a", "b"], "text_2": ["x"]}, "text_1"),
        ("score", {"text_2": []}, "text_2"),
        ("score", {"text_1": LONG * 200}, "text_1"),
    ],
    ids=str,
)
async def test_a_bad_field_is_a_400_that_names_it(judge, path: str, fields: dict, param: str) -> None:
    good = {"query": "q", "documents": ["x"]} if path == "rerank" else {"text_1": "q", "text_2": ["x"]}
    answer = await judge.http.post(f"/v1/{path}", json={"model": "judge"} | good | fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_answers_are_as_described(judge) -> None:
    document = (await judge.http.get("/openapi.json")).json()
    for path, body in (
        ("/v1/rerank", {"query": "q", "documents": ["x", "y"]}),
        ("/v2/rerank", {"query": "q", "documents": ["x"], "return_documents": False}),
        ("/v1/score", {"text_1": "q", "text_2": "x"}),
    ):
        answer = await judge.http.post(path, json={"model": "judge"} | body)
        schema = document["paths"][path]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
        assert schema["$ref"].endswith(("Reranked", "Scored"))
        jsonschema.validate(answer.json(), schema | {"components": document["components"]})
