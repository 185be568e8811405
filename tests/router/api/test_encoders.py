"""Encoders over a real socket: how pairs are worded, what their scores become, and what is refused by name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from baton.engine.models import architectures
from baton.protos.errors import CheckpointError
from baton.router.request.request import ServedModel
from baton.router.text.embedding_style import embedding_style
from baton.router.text.encoder_style import ENCODERS, EncoderStyle, encoder_style
from tests.conformance.encoders import write_wordpiece
from tests.engine.test_models import program

VOCAB = 300
BERT = {"model_type": "bert", "vocab_size": VOCAB, "type_vocab_size": 2}
HEAD = {"architectures": ["BertForSequenceClassification"]}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("encoder")
    write_wordpiece(directory, VOCAB)
    return directory


@pytest.fixture
async def ask(start_router, fake, home: Path) -> Any:
    fake.served = (ServedModel("encoder", 40, 2 * VOCAB, ()),)

    async def post(path: str, config: dict[str, Any], **body: Any) -> tuple[int, Any]:
        (home / "config.json").write_text(json.dumps(config))
        async with start_router(fake, {"encoder": home}) as clients:
            answer = await clients.http.post(path, json=body)
        return answer.status_code, answer.json()

    return post


async def test_a_pair_is_one_prompt_whose_second_half_is_of_the_second_segment(ask, fake, home) -> None:
    status, found = await ask("/v1/score", BERT | HEAD, text_1="one text", text_2=["another", "text " * 90])
    assert status == 200, found
    tokenizer = Tokenizer.from_file(str(home / "tokenizer.json"))
    pair = tokenizer.encode("one text", "another")
    short, long = (list(request.token_ids) for request in fake.requests)
    assert short == [i + VOCAB * of for i, of in zip(pair.ids, pair.type_ids, strict=True)]
    assert len(long) == 39
    assert long[-1] == short[-1]
    assert {request.sampling.pooling for request in fake.requests} == {"score"}
    assert [each["score"] for each in found["data"]] == pytest.approx([1 / (1 + math.exp(-3.0))] * 2)


async def test_scores_stay_as_they_are_where_the_model_says_so(ask) -> None:
    for said in (
        {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
        {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
    ):
        _, found = await ask("/v1/rerank", BERT | HEAD | said, query="q", documents=["d"])
        assert found["results"][0]["relevance_score"] == 3.0


@pytest.mark.parametrize(
    ("path", "config", "body", "said"),
    [
        ("/v1/completions", BERT, {"prompt": "a"}, "is an encoder, which writes no text: use /v1/embeddings"),
        ("/v1/completions", BERT | HEAD, {"prompt": "a"}, "use /v1/rerank or /v1/score"),
        ("/v1/embeddings", BERT | HEAD, {"input": "a"}, "use /v1/rerank or /v1/score"),
        ("/v1/rerank", BERT, {"query": "a", "documents": ["b"]}, "no head that scores pairs"),
        ("/v1/rerank", BERT | HEAD, {"query": "a", "documents": ["b"], "instruction": "x"}, "no instruction"),
        ("/v1/rerank", BERT | HEAD, {"query": "a b " * 30, "documents": ["b"]}, "leaves no room for the second"),
        ("/v1/embeddings", {"model_type": "llama"}, {"input": "a", "pooling": "cls"}, "is of encoders"),
    ],
)  # fmt: skip
async def test_what_a_model_does_not_make_is_refused_by_name(ask, path: str, config, body, said: str) -> None:
    status, found = await ask(path, config, **body)
    assert status == 400, found
    assert said in found["error"]["message"]


def test_the_router_and_the_engine_know_the_same_encoders() -> None:
    found = {name for name in architectures() if program(name).is_encoder}
    assert found == {name.replace("-", "_") for name in ENCODERS}


def test_segments_are_those_that_the_model_has(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BERT | {"model_type": "modernbert"}))
    assert encoder_style(tmp_path) == EncoderStyle(VOCAB)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        encoder_style(tmp_path)


def test_a_model_with_another_module_than_pooling_is_told(tmp_path: Path) -> None:
    kinds = [{"type": f"sentence_transformers.models.{kind}"} for kind in ("Transformer", "Pooling", "Dense")]
    (tmp_path / "modules.json").write_text(json.dumps(kinds))
    assert "Dense" in embedding_style(tmp_path).unknown
    (tmp_path / "modules.json").write_text(json.dumps([*kinds[:2], {"type": "a.Normalize"}]))
    assert embedding_style(tmp_path).unknown == ""
