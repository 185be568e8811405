"""The Open Inference Protocol: the unmodified tritonclient over HTTP and gRPC, JSON and binary, and bad tensors."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import struct
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.protos.errors import InvalidRequest
from baton.protos.v1 import open_inference_pb2 as pb
from baton.protos.v1 import open_inference_pb2_grpc as pb_grpc
from baton.router.access.gate import AccessGate
from baton.router.access.keys import KeyRing, add_key, revoke_key
from baton.router.api.large import MAX_NUMBERS
from baton.router.api.open_inference.tensors import DTYPES, Tensor, body_of, packed, unpacked

CLIENT = Path(__file__).with_name("triton_client.py")
SAID = "The quick brown fox jumps"
INFER = "/v2/models/tiny/infer"


def text_input(*texts: str, **changes: object) -> dict:
    return {"name": "text_input", "datatype": "BYTES", "shape": [len(texts)], "data": list(texts)} | changes


@pytest.mark.skipif(importlib.util.find_spec("tritonclient") is None, reason="tritonclient is not installed")
async def test_the_unmodified_tritonclient_works_over_http_and_grpc(router) -> None:
    place = (router.address.host, router.address.port, router.address.grpc_port)
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(CLIENT), *map(str, place), stdout=asyncio.subprocess.PIPE
    )
    output, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0
    found = json.loads(output)
    for way in ("http", "grpc"):
        seen = found[way]
        assert (seen["live"], seen["ready"], seen["model"], seen["missing"]) == (True, True, True, False)
        assert "text_input" in seen["inputs"]
        assert seen["server"] == "baton"
        assert seen["answer"] == {
            "text": ["The quick brown fox jumps"] * 2,
            "reason": ["length"] * 2,
            "tokens": [10],
        }
        assert "temperature" in seen["refused"]
        assert "huge" in seen["unknown"]
    assert found["http"]["plain"] == ["The quick brown fox jumps"] * 2
    assert found["http"]["id"] == "r1"
    assert found["grpc"]["streamed"]["text"] == "The quick brown fox jumps"
    assert found["grpc"]["streamed"]["pieces"] > 1
    assert "temperature" in found["grpc"]["streamed"]["error"]


async def test_generate_answers_whole_and_streamed(router) -> None:
    body = {"text_input": "x", "parameters": {"temperature": 0, "max_tokens": 5}}
    whole = await router.http.post("/v2/models/tiny/versions/1/generate", json=body)
    assert whole.json() == {"model_name": "tiny", "model_version": "1", "text_output": "The quick brown fox jumps"}
    stream = await router.http.post("/v2/models/tiny/generate_stream", json=body)
    pieces = [json.loads(line[6:])["text_output"] for line in stream.text.splitlines() if line]
    assert "".join(pieces) == "The quick brown fox jumps"


async def test_fields_of_generate_hold_beside_its_parameters_as_well(router, fake) -> None:
    body = {"text_input": "x", "max_tokens": 2, "parameters": {"top_k": 7}}
    whole = await router.http.post("/v2/models/tiny/generate", json=body)
    assert (whole.status_code, fake.requests[0].sampling.max_tokens, fake.requests[0].sampling.top_k) == (200, 2, 7)
    for wrong in ({"max_tokens": -1}, {"use_beam_search": True}, {"top_k": 6}):
        refused = await router.http.post("/v2/models/tiny/generate", json=body | wrong)
        assert refused.status_code == 400
        assert next(iter(wrong)) in refused.json()["error"]


async def test_ids_go_in_as_a_tensor_and_parameters_are_fields(router, fake) -> None:
    ids = {"name": "input_ids", "datatype": "INT32", "shape": [1, 3], "data": [[5, 6, 7]]}
    body = {"inputs": [ids], "parameters": {"max_tokens": 2, "top_k": 7, "sequence_id": 9}}
    assert (await router.http.post(INFER, json=body)).status_code == 200
    assert fake.requests[0].token_ids == (5, 6, 7)
    assert fake.requests[0].sampling.top_k == 7


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({"inputs": []}, 400, "text_input"),
        ({"inputs": [text_input("a", shape=[2])]}, 400, "shape"),
        ({"inputs": [text_input("a", shape=[-1])]}, 400, "shape"),
        ({"inputs": [text_input("a", datatype="WORDS")]}, 400, "WORDS"),
        ({"inputs": [text_input("a", data=[1])]}, 400, "BYTES"),
        ({"inputs": [text_input("a", name="prompt")]}, 400, "prompt"),
        ({"inputs": [text_input("a")], "outputs": [{"name": "logits"}]}, 400, "logits"),
        ({"inputs": [text_input("a"), text_input("[", name="sampling_parameters")]}, 400, "JSON"),
        ({"inputs": [text_input("a", parameters={"binary_data_size": 99}, data=None)]}, 400, "99"),
        ({}, 400, "inputs"),
    ],
)  # fmt: skip
async def test_a_bad_request_is_an_error_that_says_why(router, body, status, says) -> None:
    response = await router.http.post(INFER, json=body)
    assert response.status_code == status, response.text
    assert says in response.json()["error"]


async def test_unknown_models_and_versions_are_404(router) -> None:
    for path in ("/v2/models/huge", "/v2/models/tiny/versions/2", "/v2/models/huge/ready"):
        response = await router.http.get(path)
        assert response.status_code == 404
        assert isinstance(response.json()["error"], str)


async def test_a_grpc_refusal_has_its_status(router) -> None:
    stub = pb_grpc.GRPCInferenceServiceStub(router.channel)
    with pytest.raises(grpc.aio.AioRpcError) as bad:
        await stub.ModelInfer(pb.ModelInferRequest(model_name="tiny", raw_input_contents=[b"x"]))
    assert bad.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(grpc.aio.AioRpcError) as missing:
        await stub.ModelMetadata(pb.ModelMetadataRequest(name="huge"))
    assert missing.value.code() is grpc.StatusCode.NOT_FOUND


def infer_request(stream: bool) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="tiny")
    for name, datatype in (("text_input", "BYTES"), ("stream", "BOOL")):
        request.inputs.add(name=name, datatype=datatype, shape=[1])
    request.inputs[0].contents.bytes_contents.append(b"x")
    request.inputs[1].contents.bool_contents.append(stream)
    request.parameters["max_tokens"].int64_param = 5
    request.parameters["temperature"].double_param = 0.0
    return request


@pytest.mark.parametrize("stream", [False, True])
async def test_a_streaming_call_answers_at_once_if_the_request_declines_pieces(router, stream: bool) -> None:
    stub = pb_grpc.GRPCInferenceServiceStub(router.channel)
    found = [each.infer_response async for each in stub.ModelStreamInfer(iter([infer_request(stream)]))]
    assert [each.parameters["triton_final_response"].bool_param for each in found[-1:]] == [True]
    assert (len(found) > 1) == stream
    if not stream:
        assert unpacked("text_output", "BYTES", found[0].raw_output_contents[0]) == [SAID.encode()]


async def test_a_stream_ends_with_its_callers_key(fake, model_dir: Path, start_router, tmp_path: Path) -> None:
    path, now, answered = tmp_path / "keys.json", [0.0], asyncio.Event()
    key = add_key(path, "acme", 0.0)
    gate = AccessGate(KeyRing(path, lambda: now[0]))

    async def requests() -> AsyncIterator[pb.ModelInferRequest]:
        yield infer_request(stream=False)
        await answered.wait()
        revoke_key(path, key.split("-")[1])
        now[0] += 2
        yield infer_request(stream=False)

    async with start_router(fake, {"tiny": model_dir}, gate=gate) as router:
        stub = pb_grpc.GRPCInferenceServiceStub(router.channel)
        answers = stub.ModelStreamInfer(requests(), metadata=(("authorization", f"Bearer {key}"),))
        assert (await answers.read()).error_message == ""
        answered.set()
        with pytest.raises(grpc.aio.AioRpcError, match="not valid any more") as ended:
            await answers.read()
    assert ended.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_call_with_one_answer_refuses_to_stream(router) -> None:
    stub = pb_grpc.GRPCInferenceServiceStub(router.channel)
    with pytest.raises(grpc.aio.AioRpcError, match="use ModelStreamInfer"):
        await stub.ModelInfer(infer_request(stream=True))


def test_parameters_of_many_values_are_refused_before_they_are_read() -> None:
    heavy = '{"x":[' + "[]," * 400_000 + "[]]}"
    given = [
        Tensor("text_input", "BYTES", [1], [b"a"]),
        Tensor("sampling_parameters", "BYTES", [1], [heavy.encode()]),
    ]
    with pytest.raises(InvalidRequest, match="at most 24576") as refused:
        body_of("tiny", given, {}, False)
    assert refused.value.param == "sampling_parameters"


def test_values_of_a_tensor_are_counted_before_they_are_all_read() -> None:
    with pytest.raises(InvalidRequest, match=f"text_input has {MAX_NUMBERS + 1} entries"):
        unpacked("text_input", "BYTES", bytes(8 << 20))


@given(st.lists(st.binary(max_size=9), max_size=5))
def test_raw_bytes_survive_the_trip(values) -> None:
    assert unpacked("x", "BYTES", packed(Tensor("x", "BYTES", [len(values)], values))) == values


@given(st.sampled_from(sorted([*DTYPES, "BYTES", "X"])), st.binary(max_size=40))
def test_any_raw_bytes_are_read_or_refused(datatype, raw) -> None:
    with contextlib.suppress(InvalidRequest):
        assert isinstance(unpacked("x", datatype, raw), list)


def test_a_raw_value_that_claims_too_much_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="middle"):
        unpacked("x", "BYTES", struct.pack("<I", 2**32 - 1) + b"abc")


async def test_pieces_of_several_answers_say_which_they_are_of_and_the_last_has_the_counts(router) -> None:
    stub = pb_grpc.GRPCInferenceServiceStub(router.channel)
    request = infer_request(stream=True)
    request.parameters["n"].int64_param = 2
    found = [each.infer_response async for each in stub.ModelStreamInfer(iter([request]))]
    told = {0: b"", 1: b""}
    for each in found:
        [text] = unpacked("text_output", "BYTES", each.raw_output_contents[0])
        told[each.parameters["index"].int64_param] += text
    assert told == {0: SAID.encode(), 1: SAID.encode()}
    assert [output.name for output in found[-1].outputs][2:] == ["num_input_tokens", "num_output_tokens"]
    assert unpacked("n", "UINT32", found[-1].raw_output_contents[3]) == [10]

    body = {"text_input": "x", "parameters": {"n": 2, "max_tokens": 5, "temperature": 0}}
    stream = await router.http.post("/v2/models/tiny/generate_stream", json=body)
    texts = {0: "", 1: ""}
    for line in filter(None, stream.text.splitlines()):
        piece = json.loads(line[6:])
        texts[piece["index"]] += piece["text_output"]
    assert texts == {0: SAID, 1: SAID}


@pytest.mark.parametrize(("name", "value"), [("logprobs", 0), ("prompt_logprobs", 1), ("return_token_ids", True)])
async def test_what_no_output_tells_is_refused_by_name(router, name: str, value: object) -> None:
    for path in ("generate", "generate_stream"):
        body = {"text_input": "x", "parameters": {name: value}}
        answer = await router.http.post(f"/v2/models/tiny/{path}", json=body)
        assert (answer.status_code, name in answer.json()["error"]) == (400, True)
    off = {"text_input": "x", "parameters": {name: False if value is True else None, "max_tokens": 1}}
    assert (await router.http.post("/v2/models/tiny/generate", json=off)).status_code == 200


@pytest.mark.parametrize("binary", [False, True])
async def test_a_whole_answer_says_what_it_ignored_and_its_way(router, binary: bool) -> None:
    tensor = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["Hello"]}
    asked = {"inputs": [tensor], "parameters": {"no_such_field": 1, "binary_data_output": binary}}
    answers = [
        await router.http.post(INFER, json=asked),
        await router.http.post("/v2/models/tiny/generate", json={"text_input": "Hello", "no_such_field": 1}),
    ]
    for answer in answers:
        assert answer.status_code == 200, answer.text
        assert "no_such_field" in answer.headers["x-baton-ignored"]
        assert "prefill=p0" in answer.headers["x-baton-route"]
