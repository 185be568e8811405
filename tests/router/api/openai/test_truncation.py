"""Prompts that are cut on request: which tokens stay, what usage says, and that a tokenizer's own tokens stay."""

from __future__ import annotations

import pytest

from tests.router.conftest import CONTEXT

IDS = list(range(10, 30))
TEXT = "The quick brown fox jumps over the lazy dog. " * 20


async def ask(router, path: str, **fields) -> dict:
    answer = await router.http.post(path, json={"model": "tiny", **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize(("side", "kept"), [({}, IDS[-5:]), ({"truncation_side": "right"}, IDS[:5])])
@pytest.mark.parametrize(("path", "name"), [("/v1/completions", "prompt"), ("/v1/embeddings", "input")])
async def test_so_many_tokens_of_a_prompt_are_used_and_counted(router, fake, path, name, side, kept) -> None:
    answer = await ask(router, path, **{name: [IDS, [7]]}, truncate_prompt_tokens=5, **side)
    assert [list(request.token_ids) for request in fake.requests] == [kept, [7]]
    assert answer["usage"]["prompt_tokens"] == 6


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("limit", [2, 8, 900])
async def test_a_text_is_cut_as_transformers_cuts_it(router, fake, model_dir, side, limit) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast.from_pretrained(str(model_dir), truncation_side=side)
    text = TEXT[:300]
    await ask(
        router, "/v1/embeddings", input=text, truncate_prompt_tokens=min(limit, CONTEXT), truncation_side=side
    )
    assert list(fake.requests[0].token_ids) == theirs(text, truncation=True, max_length=limit)["input_ids"]


async def test_minus_one_is_as_much_as_the_model_takes_beside_the_answer(router, fake) -> None:
    long = {"truncate_prompt_tokens": -1}
    await ask(router, "/v1/completions", prompt=IDS * 20, max_tokens=20, **long)
    await ask(router, "/v1/completions", prompt=IDS * 20, **long)
    await ask(router, "/v1/embeddings", input=[IDS * 20], **long)
    await ask(router, "/v1/chat/completions", messages=[{"role": "user", "content": TEXT * 3}], **long)
    lengths = [len(request.token_ids) for request in fake.requests]
    assert lengths == [CONTEXT - 20, CONTEXT - 16, CONTEXT - 1, CONTEXT - 1]


async def test_an_echo_is_of_what_was_used(router, tokenizer) -> None:
    answer = await ask(
        router, "/v1/completions", prompt=TEXT, truncate_prompt_tokens=6, echo=True, max_tokens=2, temperature=0
    )
    used = tokenizer.decode(tokenizer.encode(TEXT, False)[-5:])
    assert answer["choices"][0]["text"].startswith(used)
    assert len(answer["choices"][0]["text"]) < 60


@pytest.mark.parametrize("tokens", [0, -2, CONTEXT + 1, "5"])
async def test_a_length_that_cannot_be_is_a_400(router, tokens) -> None:
    for path, fields in (("/v1/completions", {"prompt": "x"}), ("/v1/embeddings", {"input": "x"})):
        answer = await router.http.post(path, json=fields | {"truncate_prompt_tokens": tokens})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "truncate_prompt_tokens")
