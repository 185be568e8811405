"""Embeddings with the unmodified client: order, length, cut, forms, and what is refused."""

from __future__ import annotations

import math

import openai
import pytest


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


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": [""]}, "input"),
        ({"input": [[99999]]}, "input"),
        ({"input": ["x"] * 100}, "input"),
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
