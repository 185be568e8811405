"""Encoders over REST against transformers: embeddings from prefill and decode workers, pairs' scores from one."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
import torch

from tests.conformance.encoders import ENCODERS, Encoded, make_encoder, write_wordpiece
from tests.e2e.fleet import Fleet

TEXTS = ["Knows nothing of engines.", "a", "tokenizer = Tokenizer(models.WordPiece) " * 12]
VOCAB = ENCODERS["bert"]["vocab_size"]


def served(directory: Path) -> dict[str, str]:
    return {"model": str(directory), "model_name": "encoder"}


def close(found: list[float], wanted: torch.Tensor) -> bool:
    return found == pytest.approx((wanted / wanted.norm()).tolist(), abs=1e-5)


async def test_embeddings_are_transformers_and_whole_prompts_are_found_again(tmp_path: Path) -> None:
    directory = make_encoder(tmp_path / "bert", "bert")
    tokenizer = write_wordpiece(directory, VOCAB)
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    model = Encoded(directory)
    states = [model.states(tokenizer.encode(text).ids) for text in TEXTS]
    router = {"local_prefill_max_tokens": 0}
    worker = served(directory) | {"prefill_chunk_tokens": 48}
    with Fleet(1, 1, worker=worker, router=router) as fleet:
        async with httpx.AsyncClient(timeout=100, base_url=fleet.url) as client:
            for pooling, wanted in ((None, [s[0] for s in states]), ("mean", [s.mean(0) for s in states])):
                for _ in range(2):  # the second time its blocks are cached
                    body = {"input": TEXTS, "pooling": pooling}
                    answer = (await client.post("/v1/embeddings", json=body)).json()
                    assert all(map(close, [each["embedding"] for each in answer["data"]], wanted))
            refused = await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})
            pair = await client.post("/v1/rerank", json={"query": "a", "documents": TEXTS})
        assert fleet.wait_for_baseline()["prefill-0"].steps
    assert (refused.status_code, pair.status_code) == (400, 400)
    assert "is an encoder, which writes no text: use /v1/embeddings" in refused.json()["error"]["message"]
    assert "is no reranker" in pair.json()["error"]["message"]


@pytest.mark.thorough
async def test_a_cross_encoders_scores_are_transformers(tmp_path: Path) -> None:
    directory = make_encoder(tmp_path / "bert", "bert", scores=True)
    tokenizer, model = write_wordpiece(directory, VOCAB), Encoded(directory, scores=True)
    with Fleet(0, 1, colocated=True, worker=served(directory)) as fleet:
        async with httpx.AsyncClient(timeout=100, base_url=fleet.url) as client:
            body = {"query": "which models?", "documents": TEXTS[:2]}
            answer = (await client.post("/v1/rerank", json=body)).json()
            refused = await client.post("/v1/embeddings", json={"input": "a"})
    found = {each["index"]: each["relevance_score"] for each in answer["results"]}
    for at, text in enumerate(TEXTS[:2]):
        pair = tokenizer.encode("which models?", text)
        assert set(pair.type_ids) == {0, 1}
        assert found[at] == pytest.approx(
            torch.tensor(model.score(pair.ids, pair.type_ids)).sigmoid().item(), abs=1e-5
        )
    assert "scores pairs of texts" in refused.json()["error"]["message"]
