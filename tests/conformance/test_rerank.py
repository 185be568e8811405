"""A reranker over REST against transformers: how likely yes is, of yes and no, colocated and disaggregated."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
import torch
from tokenizers import AddedToken, Tokenizer

from baton.router.text.reranking import BEFORE, BEHIND
from tests.conformance.checkpoints import make, reference, write_tokenizer
from tests.e2e.fleet import Fleet

WORDS = ["yes", "no", "<|im_start|>", "<|im_end|>"]
DOCUMENTS = ["The initializer range is large.", "Knows nothing of engines.", "a"]


@pytest.mark.thorough
@pytest.mark.parametrize("colocated", [True, False])
async def test_scores_are_transformers(tmp_path: Path, colocated: bool) -> None:
    directory = make(tmp_path / "qwen3", "qwen3")
    write_tokenizer(directory, 1000)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(word, special=word[0] == "<") for word in WORDS])
    tokenizer.save(str(directory / "tokenizer.json"))
    body = {"query": "greedy", "documents": DOCUMENTS, "instruction": "Find it"}
    with Fleet(1, 1, colocated=colocated, worker={"model": str(directory), "dtype": "float32"}) as fleet:
        async with httpx.AsyncClient(timeout=100) as client:
            answer = await client.post(f"{fleet.url}/v1/rerank", json=body)
    assert answer.status_code == 200, answer.text
    found = {each["index"]: each["relevance_score"] for each in answer.json()["results"]}
    model, [yes, no] = reference(directory), [tokenizer.token_to_id(word) for word in ("yes", "no")]
    for at, document in enumerate(DOCUMENTS):
        pair = f"<Instruct>: Find it\n<Query>: greedy\n<Document>: {document}"
        ids = [i for part in (BEFORE, pair, BEHIND) for i in tokenizer.encode(part, add_special_tokens=False).ids]
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, -1]
        assert found[at] == pytest.approx(float((logits[yes] - logits[no]).sigmoid()), abs=1e-4)
