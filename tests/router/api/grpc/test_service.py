"""The gRPC twin on a real socket: answers, rich errors, deadlines, health and reflection."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from baton.protos.errors import Overloaded
from baton.protos.nouns import Grammar
from baton.protos.v1 import common_pb2, inference_pb2_grpc, worker_pb2
from baton.protos.v1 import inference_pb2 as pb
from baton.router.answer.quotas import Quotas
from baton.router.answer.service import LEAST_DETOKENIZED
from tests.router.conftest import entry

SAID = "The quick brown fox jumps over the lazy dog. 日本語 and 🦊 too!"
GREEDY = common_pb2.Sampling(temperature=0)


@pytest.fixture
def stub(router) -> inference_pb2_grpc.InferenceStub:
    return inference_pb2_grpc.InferenceStub(router.channel)


def details(error: grpc.aio.AioRpcError) -> dict[str, object]:
    """The rich error of the trailers, by message name."""
    raw = dict(error.trailing_metadata())["grpc-status-details-bin"]
    found: dict[str, object] = {}
    kinds = (
        error_details_pb2.ErrorInfo,
        error_details_pb2.BadRequest,
        error_details_pb2.RetryInfo,
        worker_pb2.WireError,
    )
    for packed in status_pb2.Status.FromString(raw).details:
        kind = next(kind for kind in kinds if packed.Is(kind.DESCRIPTOR))
        found[kind.__name__] = kind.FromString(packed.value)
    return found


async def test_text_ids_and_chat_are_answered(stub, fake, tokenizer) -> None:
    chat = pb.Conversation(messages=[pb.ChatMessage(role="user", content="Hello")])
    ids = pb.TokenIds(ids=tokenizer.encode("Hello", False))
    for prompt in ({"text": "Hello"}, {"tokens": ids}, {"chat": chat}):
        answer = await stub.Generate(pb.GenerateRequest(**prompt, sampling=GREEDY, return_token_ids=True))
        [choice] = answer.choices
        assert (choice.text, choice.finish_reason, answer.model) == (SAID, "stop", "tiny")
        assert answer.usage.completion_tokens == len(choice.token_ids)
        assert answer.usage.prompt_tokens == len(fake.requests[-1].token_ids)


async def test_a_prompt_is_cut_and_a_turn_goes_on_as_over_rest(stub, fake, tokenizer) -> None:
    ids, turn = list(range(10, 20)), pb.ChatMessage(role="assistant", content="One, ")
    fields = {"truncate_prompt_tokens": 3, "sampling": GREEDY}
    await stub.Generate(pb.GenerateRequest(tokens=pb.TokenIds(ids=ids), **fields))
    await stub.Generate(pb.GenerateRequest(tokens=pb.TokenIds(ids=ids), truncation_side="right", **fields))
    open_end = pb.Conversation(messages=[turn], continue_final_message=True)
    await stub.Generate(pb.GenerateRequest(chat=open_end, sampling=GREEDY))
    asked = [list(request.token_ids) for request in fake.requests]
    assert asked[:2] == [ids[-3:], ids[:3]]
    assert tokenizer.decode(asked[2], skip_special_tokens=False) == "<|begin|><|assistant|>One,"
    for bad in ({"truncate_prompt_tokens": -2}, {"truncation_side": "up"}):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Generate(pb.GenerateRequest(text="x", **bad))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert next(iter(bad)) in refused.value.details()


async def test_a_stream_joins_to_the_whole_and_ends_with_the_usage(stub, fake) -> None:
    request = pb.GenerateRequest(text="x", sampling=GREEDY, n=2, request_id="mine")
    chunks = [chunk async for chunk in stub.GenerateStream(request)]
    for index in (0, 1):
        pieces = [c for chunk in chunks for c in chunk.choices if c.index == index]
        assert "".join(piece.text for piece in pieces) == SAID
        assert [piece.finish_reason for piece in pieces if piece.finish_reason] == ["stop"]
    assert chunks[-1].usage.completion_tokens > 0
    assert not any(chunk.HasField("usage") for chunk in chunks[:-1])
    assert {chunk.request_id for chunk in chunks} == {"mine"}
    assert fake.requests[-1].context.asked_id == "mine"  # by which ``explain`` finds it


async def test_logprobs_and_stop_strings_work(stub, fake) -> None:
    sampling = common_pb2.Sampling(temperature=0, logprobs=2)
    answer = await stub.Generate(pb.GenerateRequest(text="x", sampling=sampling, stop=["brown"]))
    assert answer.choices[0].text == "The quick "
    assert [len(entry.top) for entry in answer.choices[0].logprobs] == [2] * answer.usage.completion_tokens


async def test_a_prediction_reaches_dispatch_as_tokens_and_usage_tells_of_drafts(stub, fake, tokenizer) -> None:
    request = pb.GenerateRequest(model="tiny", text="Say it", prediction="The fox")
    request.sampling.max_tokens = 4
    fake.accepted_drafts, fake.rejected_drafts = 1, 2
    answer = await stub.Generate(request)
    assert tokenizer.decode(list(fake.requests[0].prediction)) == "The fox"
    assert (answer.usage.accepted_prediction_tokens, answer.usage.rejected_prediction_tokens) == (1, 2)


async def test_grammars_bad_words_and_prompt_logprobs_work(stub, fake) -> None:
    words = [common_pb2.TokenSequence(ids=[7, 8])]
    grammar = common_pb2.Grammar(kind="regex", spec="[a-z]+")
    sampling = common_pb2.Sampling(temperature=0, grammar=grammar, bad_words=words, prompt_logprobs=2)
    fake.scores = (entry(5, 2), entry(6, 2))
    answer = await stub.Generate(pb.GenerateRequest(tokens=pb.TokenIds(ids=[4, 5, 6]), sampling=sampling))
    assert fake.requests[0].sampling.grammar == Grammar("regex", "[a-z]+")
    assert fake.requests[0].sampling.bad_words == ((7, 8),)
    assert [found.chosen.token_id for found in answer.choices[0].prompt_logprobs] == [5, 6]
    for bad in ({"grammar": common_pb2.Grammar(kind="regex", spec="(")}, {"pooling": "mean"}):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Generate(pb.GenerateRequest(text="x", sampling=common_pb2.Sampling(**bad)))
        assert details(refused.value)["BadRequest"].field_violations[0].field == next(iter(bad))


async def test_a_bad_field_is_a_rich_invalid_argument(stub) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await stub.Generate(pb.GenerateRequest(text="x", sampling=common_pb2.Sampling(top_p=1.5)))
    assert failed.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    found = details(failed.value)
    assert found["ErrorInfo"].reason == "INVALID_REQUEST"
    assert found["BadRequest"].field_violations[0].field == "top_p"
    assert found["WireError"].type == "InvalidRequest"


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (pb.GenerateRequest(), "INVALID_ARGUMENT"),
        (pb.GenerateRequest(model="huge", text="x"), "NOT_FOUND"),
        (pb.GenerateRequest(text="x", adapter="none"), "NOT_FOUND"),
        (pb.GenerateRequest(tokens=pb.TokenIds()), "INVALID_ARGUMENT"),
        (pb.GenerateRequest(tokens=pb.TokenIds(ids=[-5])), "INVALID_ARGUMENT"),
        (pb.GenerateRequest(tokens=pb.TokenIds(ids=[5] * 256)), "INVALID_ARGUMENT"),
        (pb.GenerateRequest(chat=pb.Conversation()), "INVALID_ARGUMENT"),
        (
            pb.GenerateRequest(chat=pb.Conversation(messages=[pb.ChatMessage(role="boss", content="x")])),
            "INVALID_ARGUMENT",
        ),
        (pb.GenerateRequest(text="x", n=999), "INVALID_ARGUMENT"),
        (pb.GenerateRequest(text="x", sampling=common_pb2.Sampling(temperature=float("nan"))), "INVALID_ARGUMENT"),
    ],
)
async def test_bad_requests_have_their_status_streamed_or_not(stub, request_, code: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await stub.Generate(request_)
    assert failed.value.code().name == code
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await stub.GenerateStream(request_).read()
    assert failed.value.code().name == code


async def test_overload_says_when_to_try_again(stub, fake) -> None:
    fake.refuse = Overloaded("full", retry_after_s=1.5)
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await stub.Generate(pb.GenerateRequest(text="x"))
    assert failed.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert details(failed.value)["RetryInfo"].retry_delay.ToMilliseconds() == 1500


async def test_a_defect_is_internal_and_tells_nothing_of_the_inside(stub, fake) -> None:
    fake.open = lambda request: 1 / 0
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await stub.Generate(pb.GenerateRequest(text="x"))
    assert failed.value.code() == grpc.StatusCode.INTERNAL
    assert "division" not in failed.value.details()


async def test_the_callers_deadline_reaches_dispatch_and_frees_the_request(stub, fake) -> None:
    fake.pace_s, asked = 0.2, common_pb2.Sampling(max_tokens=200)
    for seconds in (0.6, 5.0, 20.0):  # the longer ones on a machine on which it passed on the way to dispatch
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await stub.Generate(pb.GenerateRequest(text="x", sampling=asked), timeout=seconds)
        assert failed.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        if fake.requests:
            break
    await fake.idle()
    loop_now = asyncio.get_running_loop().time()
    assert fake.requests[0].context.deadline < loop_now + seconds
    assert fake.cancelled == ["client_gone"]


async def test_a_cancelled_stream_frees_every_choice(stub, fake) -> None:
    fake.pace_s = 0.05
    call = stub.GenerateStream(pb.GenerateRequest(text="x", n=3, sampling=common_pb2.Sampling(max_tokens=200)))
    await call.read()
    call.cancel()
    await fake.idle()
    assert fake.cancelled == ["client_gone"] * 3


async def test_tokenizer_and_models_answer(stub, tokenizer) -> None:
    ids = (await stub.Tokenize(pb.TokenizeRequest(text="Zwölf 🦊", skip_special_tokens=True))).ids
    assert list(ids) == tokenizer.encode("Zwölf 🦊", False)
    assert (await stub.Detokenize(pb.DetokenizeRequest(ids=ids))).text == "Zwölf 🦊"
    models = (await stub.ListModels(pb.ListModelsRequest())).models
    assert [(model.id, model.max_model_len) for model in models] == [("tiny", 256)]


async def test_what_is_refused_is_not_charged(router, stub, monkeypatch: pytest.MonkeyPatch) -> None:
    charged: list[int] = []

    async def charge(quotas: Quotas, entry: object, tokens: int) -> None:
        charged.append(tokens)

    monkeypatch.setattr(Quotas, "charge_tokenizer", charge)
    for ids in ([1 << 20], [1] * (LEAST_DETOKENIZED + 1)):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Detokenize(pb.DetokenizeRequest(ids=ids))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (await router.http.post("/detokenize", json={"tokens": ids})).status_code in (400, 413)
    assert charged == []
    await stub.Detokenize(pb.DetokenizeRequest(ids=[1, 2]))
    assert charged == [2]


async def test_health_and_reflection_are_there(router) -> None:
    health = health_pb2_grpc.HealthStub(router.channel)
    answer = await health.Check(health_pb2.HealthCheckRequest(service="baton.v1.Inference"))
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    reflection = reflection_pb2_grpc.ServerReflectionStub(router.channel)
    call = reflection.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    services = [s.name async for answer in call for s in answer.list_services_response.service]
    assert "baton.v1.Inference" in services


async def test_health_is_listed_and_watched(router) -> None:
    health = health_pb2_grpc.HealthStub(router.channel)
    listed = await health.List(health_pb2.HealthListRequest())
    assert {"", "baton.v1.Inference", "inference.GRPCInferenceService"} == set(listed.statuses)
    watch = health.Watch(health_pb2.HealthCheckRequest(service="baton.v1.Inference"))
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    watch.cancel()


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/baton.v1.Inference/Generate", "unary_unary"),
        ("/baton.v1.Inference/GenerateStream", "unary_stream"),
        ("/inference.GRPCInferenceService/ModelStreamInfer", "stream_stream"),
    ],
)
async def test_bytes_that_are_no_message_are_the_callers_fault(router, path: str, kind: str) -> None:
    call = getattr(router.channel, kind)(path)(iter([b"\x00"]) if kind == "stream_stream" else b"\x00")
    assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "no message of this method's type" in await call.details()


@pytest.mark.parametrize(("count", "size"), [(1, 1 << 20), (20_000, 40)], ids=["large", "many"])
async def test_metadata_beyond_its_bound_is_refused_before_anything_is_read_of_the_call(
    router, count: int, size: int
) -> None:
    unbound = [("grpc.max_metadata_size", 1 << 30), ("grpc.absolute_max_metadata_size", 1 << 30)]
    address = router.grpc_address
    async with grpc.aio.insecure_channel(address, options=unbound) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.ListModels(
                pb.ListModelsRequest(), metadata=[(f"x-{i}", "a" * size) for i in range(count)], timeout=60
            )
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await stub.ListModels(pb.ListModelsRequest(), timeout=60)).models, "others are served as before"
