"""Embeddings with the unmodified client: order, length, cut, forms, and what is refused."""

from __future__ import annotations

import itertools
import json
import math
import shutil

import openai
import pytest

from baton.protos.errors import Overloaded
from baton.router.answer import stream as answer


async def test_each_input_has_its_vector_of_length_one_in_order(router, fake) -> None:
    answer = await router.openai.embeddings.create(model="tiny", input=["x", "x and more words"])
    assert [entry.index for entry in answer.data] == [0, 1]
    assert all(math.hypot(*entry.embedding) == pytest.approx(1, abs=1e-6) for entry in answer.data)
    assert answer.data[0].embedding != answer.data[1].embedding
    assert answer.usage.prompt_tokens == sum(len(request.token_ids) for request in fake.requests)
    assert {(r.sampling.pooling, r.sampling.max_tokens) for r in fake.requests} == {("mean", 1)}


async def test_numbers_and_base64_say_the_same_and_a_cut_has_length_one_again(router) -> None:
    plain = await router.openai.embeddings.create(model="tiny", input=[5, 6, 7], encoding_format="float")
    packed = await router.openai.embeddings.create(model="tiny", input=[5, 6, 7])  # the client asks for base64
    assert packed.data[0].embedding == pytest.approx(plain.data[0].embedding, abs=1e-7)
    cut = await router.openai.embeddings.create(model="tiny", input=[5, 6, 7], dimensions=2)
    assert cut.data[0].embedding == pytest.approx([0.6, 0.8], abs=1e-6)


async def test_the_last_state_can_be_asked_for(router, fake) -> None:
    await router.openai.embeddings.create(model="tiny", input="x", extra_body={"pooling": "last"})
    assert fake.requests[0].sampling.pooling == "last"


@pytest.fixture
async def styled(start_router, fake, model_dir, tmp_path):
    """A model that says how its vectors are made, as Qwen3-Embedding does."""
    shutil.copytree(model_dir, tmp_path / "styled")
    (tmp_path / "styled" / "1_Pooling").mkdir()
    modes = {"word_embedding_dimension": 4, "pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}
    (tmp_path / "styled" / "1_Pooling" / "config.json").write_text(json.dumps(modes))
    said = {"prompts": {"query": "Instruct: find it\nQuery:", "document": ""}, "default_prompt_name": None}
    (tmp_path / "styled" / "config_sentence_transformers.json").write_text(json.dumps(said))
    async with start_router(fake, {"tiny": tmp_path / "styled"}) as clients:
        yield clients


async def test_a_models_own_pooling_and_prompts_are_taken(styled, fake, tokenizer) -> None:
    for extra in ({}, {"prompt_name": "query"}, {"prompt_name": "document", "pooling": "mean"}):
        await styled.openai.embeddings.create(model="tiny", input=["x"], extra_body=extra)
    assert [request.sampling.pooling for request in fake.requests] == ["last", "last", "mean"]
    texts = [tokenizer.decode(list(request.token_ids)) for request in fake.requests]
    assert texts == ["x", "Instruct: find it\nQuery:x", "x"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"prompt_name": "passage"}, "prompt_name"), ({"input": [[5]], "prompt_name": "query"}, "prompt_name")],
)
async def test_a_prompt_that_cannot_be_put_before_an_input_is_refused(styled, fields, param) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await styled.openai.embeddings.create(model="tiny", **({"input": "x"} | {"extra_body": fields}))
    assert bad.value.param == param


async def test_a_mean_that_leaves_the_prompt_out_is_refused_with_a_prompt_and_computed_without(
    start_router, fake, model_dir, tmp_path
) -> None:
    shutil.copytree(model_dir, tmp_path / "m")
    (tmp_path / "m" / "1_Pooling").mkdir()
    (tmp_path / "m" / "1_Pooling" / "config.json").write_text(
        '{"pooling_mode_mean_tokens": true, "include_prompt": false}'
    )
    (tmp_path / "m" / "config_sentence_transformers.json").write_text(
        '{"prompts": {"query": "Find: ", "document": ""}, "default_prompt_name": "query"}'
    )
    async with start_router(fake, {"tiny": tmp_path / "m"}) as router:
        with pytest.raises(openai.BadRequestError, match="pools without its prompts") as bad:
            await router.openai.embeddings.create(model="tiny", input="x")
        assert bad.value.param == "prompt_name"
        await router.openai.embeddings.create(model="tiny", input="x", extra_body={"prompt_name": "document"})


async def test_a_pooling_of_the_models_that_is_not_computed_is_refused_unless_another_is_asked(
    start_router, fake, model_dir, tmp_path
) -> None:
    shutil.copytree(model_dir, tmp_path / "cls")
    (tmp_path / "cls" / "1_Pooling").mkdir()
    (tmp_path / "cls" / "1_Pooling" / "config.json").write_text('{"pooling_mode_max_tokens": true}')
    async with start_router(fake, {"tiny": tmp_path / "cls"}) as router:
        with pytest.raises(openai.BadRequestError, match="pools by pooling_mode_max_tokens"):
            await router.openai.embeddings.create(model="tiny", input="x")
        await router.openai.embeddings.create(model="tiny", input="x", extra_body={"pooling": "last"})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": [""]}, "input"),
        ({"input": [[99999]]}, "input"),
        ({"input": ["x"] * 2049}, "input"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": 999}, "dimensions"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"pooling": "max"}, "pooling"),
    ],
)
async def test_a_bad_field_is_a_400_that_names_it(router, fields, param) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await router.openai.embeddings.create(model="tiny", **({"input": "x"} | {"extra_body": fields}))
    assert bad.value.param == param


def watch_open(fake, refuse_every: int = 0) -> list[int]:
    """Returns the list of how many requests ran as each was opened; every ``refuse_every``-th open finds the queue
    full.
    """
    running: list[int] = []
    opened, calls = fake.open, itertools.count(1)

    def open_one(request):
        if refuse_every and next(calls) % refuse_every == 0 and fake.running:
            raise Overloaded("the queue is full")
        running.append(len(fake.running))
        return opened(request)

    fake.open = open_one
    return running


async def test_two_thousand_inputs_are_answered_in_order_and_few_of_them_are_handed_in_at_once(
    start_router, fake, model_dir
) -> None:
    running = watch_open(fake, refuse_every=100)
    inputs = [[5] * (1 + i % 7) for i in range(2048)]
    async with start_router(fake, {"tiny": model_dir}) as clients:
        created = await clients.openai.embeddings.create(model="tiny", input=inputs, encoding_format="float")
    assert len(created.data) == len(running) == 2048
    assert max(running) < answer.WINDOW
    lengths = {i: created.data[i].embedding for i in range(7)}  # the fake's vector tells the prompt's length
    assert all(entry.embedding == lengths[entry.index % 7] for entry in created.data)
    assert created.usage.prompt_tokens == sum(map(len, inputs))


async def test_a_call_whose_own_prompts_fill_nothing_is_refused_when_the_queue_is_full(router, fake) -> None:
    fake.refuse = Overloaded("the queue is full")
    with pytest.raises(openai.RateLimitError):
        await router.openai.embeddings.create(model="tiny", input=["x"] * 100)


async def test_many_prompts_of_completions_go_the_same_way(router, fake) -> None:
    running = watch_open(fake)
    asked = {"model": "tiny", "prompt": ["x"] * 100, "max_tokens": 2, "n": 2, "temperature": 0}
    content = (await router.http.post("/v1/completions", json=asked)).json()
    assert [choice["index"] for choice in content["choices"]] == list(range(200))
    assert len({choice["text"] for choice in content["choices"]}) == 1
    assert max(running) + 2 <= answer.WINDOW
    refused = await router.http.post("/v1/completions", json=asked | {"prompt": ["x"] * 2000})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")


async def test_a_client_that_leaves_between_its_prompts_leaves_nothing_running(router, fake) -> None:
    fake.pace_s = 0.01
    with pytest.raises(openai.APITimeoutError):
        await router.openai.embeddings.create(model="tiny", input=["x"] * 2000, timeout=0.2)
    await fake.idle()
    asked = len(fake.requests)
    assert asked < 2000
