"""``baton serve`` starts one worker for an encoder, and first asks it something that encoders answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from baton.cluster.config import BatonConfig, load_config
from baton.console.run.serve import first_question, one_worker_for_an_encoder

SIZES = {
    "vocab_size": 100,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
BERT = SIZES | {"model_type": "bert"}
LLAMA = SIZES | {"model_type": "llama"}
RERANKER = BERT | {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "score"}}


@pytest.fixture
def serve(tmp_path: Path):
    def configured(fields: dict[str, Any], **cluster: Any) -> BatonConfig:
        (tmp_path / "config.json").write_text(json.dumps(fields))
        flags = {"worker": {"model": str(tmp_path)}, "cluster": cluster}
        return one_worker_for_an_encoder(load_config(None, flags, search=tmp_path))

    return configured


def test_an_encoder_is_served_by_one_worker_unless_several_are_asked_for(serve) -> None:
    assert serve(BERT).cluster.colocated
    assert not serve(BERT, prefill=2).cluster.colocated
    assert not serve(LLAMA).cluster.colocated


@pytest.mark.parametrize(
    ("fields", "asked"),
    [
        (BERT, "/v1/embeddings"),
        (RERANKER, "/v1/rerank"),
        (LLAMA, "/v1/chat/completions"),
    ],
)
def test_the_first_question_is_one_that_the_model_answers(serve, fields: dict[str, Any], asked: str) -> None:
    path, body = first_question(serve(fields))
    assert (path, "model" in body) == (asked, False)
