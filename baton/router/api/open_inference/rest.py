"""The Open Inference Protocol over REST, binary tensors and Triton's ``generate`` included.

Knows nothing of what tensors mean (``open_inference.tensors``). Errors are ``{"error": "…"}``, as the protocol has
them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Sequence

import msgspec
import orjson
from fastapi import APIRouter, Request
from pydantic import ConfigDict, Field
from starlette.responses import Response

from baton.protos.errors import BatonError, InvalidRequest, NoWorker
from baton.protos.json import Json, JsonValue
from baton.router.answer.service import GenerationService
from baton.router.answer.validate import check_count
from baton.router.api.body import Body, body_docs, read_body_of
from baton.router.api.disconnect import until_disconnect
from baton.router.api.errors import json_response, retry_headers
from baton.router.api.large import parsed
from baton.router.api.limits import read_body
from baton.router.api.open_inference import tensors as oip
from baton.router.api.open_inference.tensors import Tensor, TensorValue
from baton.router.api.openai.prepared_call import answer_headers, full_answer, respond
from baton.router.api.openai.schemas import CompletionBody
from baton.router.api.sse import EventStyle, event_bytes

HEADER_LENGTH = "inference-header-content-length"
Handler = Callable[[Request], Awaitable[Response]]


class InferInput(Body):
    """Describes one input tensor: its values are in ``data``, or in ``parameters.binary_data_size`` bytes after the
    JSON.
    """

    name: str
    datatype: str
    shape: list[int] = Field(max_length=8)
    parameters: Json = {}
    data: list[JsonValue] | None = None


class InferOutput(Body):
    """Names one output tensor that the client wants; ``parameters.binary_data`` asks for it in binary."""

    name: str
    parameters: Json = {}


class InferBody(Body):
    """Describes the body of POST /v2/models/{model}/infer."""

    id: str = ""
    parameters: Json = {}
    inputs: list[InferInput] = Field(max_length=16)
    outputs: list[InferOutput] = Field(default=[], max_length=16)


class GenerateBody(Body):
    """Describes the body of /v2/models/{model}/generate and generate_stream; ``parameters`` are fields of
    /v1/completions, and so is every other member, as Triton's generate extension has it.
    """

    model_config = ConfigDict(extra="allow")

    id: str = ""
    text_input: str
    parameters: Json = {}

    def fields(self) -> Json:
        """Returns the fields of a completion body that were given. Raises InvalidRequest for one given twice."""
        beside = self.model_extra or {}
        for name in beside.keys() & self.parameters.keys():
            raise InvalidRequest(f"{name} is given twice: beside parameters and in them", name)
        return oip.completion_fields(beside | self.parameters)


def open_inference_routes(service: GenerationService) -> APIRouter:
    """Returns the routes below ``/v2`` of the Open Inference Protocol."""
    routes = APIRouter()

    @routes.get("/v2")
    async def server() -> Response:
        return json_response(oip.server_metadata())

    @routes.get("/v2/health/live")
    async def live() -> Response:
        return json_response({"live": True})

    @routes.get("/v2/health/ready")
    async def ready() -> Response:
        return _readiness(service.serving.ready())

    @routes.post("/v2/repository/index")
    async def index() -> Response:
        entries = service.catalog.entries()
        return json_response([{"name": e.name, "version": oip.VERSION, "state": "READY"} for e in entries])

    for path in ("/v2/models/{model:path}/versions/{version}", "/v2/models/{model:path}"):
        _model_routes(routes, service, path)
    return routes


def _model_routes(routes: APIRouter, service: GenerationService, path: str) -> None:
    """A model's endpoints, the longer paths first: a model's name may hold slashes."""
    kind = "" if "version" not in path else " of a version"

    async def infer(request: Request) -> Response:
        return await _answered(request, _infer(service, request))

    async def generate(request: Request) -> Response:
        return await _answered(request, _generate(service, request, stream=False))

    async def generate_stream(request: Request) -> Response:
        return await _answered(request, _generate(service, request, stream=True))

    async def ready(request: Request) -> Response:
        return await _answered(request, _model_ready(service, request))

    async def metadata(request: Request) -> Response:
        return await _answered(request, _metadata(service, request))

    posts: list[tuple[str, Handler, type[Body]]] = [
        ("infer", infer, InferBody),
        ("generate", generate, GenerateBody),
        ("generate_stream", generate_stream, GenerateBody),
    ]
    for name, handler, body in posts:
        routes.add_api_route(
            f"{path}/{name}", handler, methods=["POST"], name=name + kind, openapi_extra=_docs(path, body)
        )
    routes.add_api_route(
        f"{path}/ready", ready, methods=["GET"], name="model_ready" + kind, openapi_extra=_docs(path)
    )
    routes.add_api_route(path, metadata, methods=["GET"], name="metadata" + kind, openapi_extra=_docs(path))


def _docs(path: str, body: type[Body] | None = None) -> Json:
    names = ["model", "version"] if "version" in path else ["model"]
    schema = {"type": "string", "minLength": 1}
    parameters = [{"name": name, "in": "path", "required": True, "schema": schema} for name in names]
    return {"parameters": parameters} | (body_docs(body) if body else {})


async def _answered(request: Request, work: Coroutine[object, None, Response]) -> Response:
    """``work``'s response, or the error as the protocol words it."""
    try:
        if request.method == "POST" and "content-encoding" in request.headers:
            work.close()
            raise InvalidRequest("content-encoding is not supported: send the body as it is", "content-encoding")
        return await work
    except BatonError as error:
        return json_response({"error": error.message}, error.http_status, retry_headers(error))


async def _infer(service: GenerationService, request: Request) -> Response:
    asked, inputs = await _read_infer(await read_body(request, service.limits.max_body_bytes), request)
    body = oip.body_of(request.path_params["model"], inputs, asked.parameters, stream=False)
    call = await oip.call_of(service, request.headers, body, request.path_params.get("version", ""))
    content, summary = await until_disconnect(request.receive, full_answer(service, call))
    outputs = oip.outputs_of(content, [output.name for output in asked.outputs])
    binary = {o.name for o in asked.outputs if o.parameters.get("binary_data")}
    if asked.parameters.get("binary_data_output") and not asked.outputs:
        binary = {tensor.name for tensor in outputs}
    told = {"model_name": content["model"], "model_version": oip.VERSION, "id": asked.id}
    return _infer_response(told, outputs, binary, answer_headers(call, summary))


async def _read_infer(raw: bytes, request: Request) -> tuple[InferBody, list[Tensor]]:
    """The JSON and, behind it, the binary tensors in the order of the inputs that have them."""
    said = request.headers.get(HEADER_LENGTH, "")
    if said and not (said.isdecimal() and int(said) <= len(raw)):
        raise InvalidRequest(f"{HEADER_LENGTH} is {said!r}: give the bytes of the JSON", HEADER_LENGTH)
    length = int(said) if said else len(raw)
    asked, at, tensors = await parsed(InferBody, raw[:length]), length, []
    for one in asked.inputs:
        size = one.parameters.get("binary_data_size")
        if size is None:
            values = _flat(one)
        elif type(size) is int and 0 <= size <= len(raw) - at:
            values, at = oip.unpacked(one.name, one.datatype, raw[at : at + size]), at + size
        else:
            raise InvalidRequest(f"{one.name}: the body doesn't hold its {size} binary bytes", one.name)
        tensors.append(Tensor(one.name, one.datatype, one.shape, values))
    return asked, tensors


def _flat(one: InferInput) -> Sequence[TensorValue]:
    """JSON data, nested or not, flattened to any depth that a shape may have."""
    check_count(f"{one.name}.shape", len(one.shape), oip.MAX_DIMENSIONS)
    values = one.data or []
    for _ in range(len(one.shape) - 1):
        if values and all(isinstance(value, list) for value in values):
            values = [inner for value in values for inner in value]
    kinds: tuple[type, ...] = (str,) if one.datatype == "BYTES" else (bool, int, float)
    if one.datatype != "BYTES" and one.datatype not in oip.DTYPES:
        raise InvalidRequest(f"{one.name} has datatype {one.datatype!r}, which is unknown", one.name)
    if not all(isinstance(value, kinds) for value in values):
        raise InvalidRequest(f"{one.name}.data holds a value that is no {one.datatype}", one.name)
    return [value.encode(errors="surrogatepass") if isinstance(value, str) else value for value in values]


def _infer_response(told: Json, outputs: list[Tensor], binary: set[str], headers: dict[str, str]) -> Response:
    shown, behind = [], []
    for tensor in outputs:
        json: Json = {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}
        if tensor.name in binary:
            behind.append(oip.packed(tensor))
            shown.append(json | {"parameters": {"binary_data_size": len(behind[-1])}})
        else:
            values = [v.decode() if isinstance(v, bytes) else v for v in tensor.values]
            shown.append(json | {"data": values})
    content = told | {"outputs": shown}
    if not behind:
        return json_response(content, headers=headers)
    header = orjson.dumps(content)
    headers = {HEADER_LENGTH: str(len(header)), **headers}
    return Response(header + b"".join(behind), 200, headers, media_type="application/octet-stream")


async def _generate(service: GenerationService, request: Request, stream: bool) -> Response:
    asked = await parsed(GenerateBody, await read_body(request, service.limits.max_body_bytes))
    fields = asked.fields()
    model = request.path_params["model"]
    fields |= {"prompt": asked.text_input, "model": model, "stream": stream}
    call = await oip.call_of(
        service,
        request.headers,
        read_body_of(CompletionBody, fields),
        request.path_params.get("version", ""),
    )
    if stream:
        several = len(call.generation.prompts) * call.generation.options.n > 1
        styled = msgspec.structs.replace(call, style=_GENERATED_SEVERAL if several else _GENERATED)
        return await until_disconnect(request.receive, respond(service, styled))
    content, summary = await until_disconnect(request.receive, full_answer(service, call))
    return json_response(_generated(content), headers=answer_headers(call, summary))


def _generated(completion: Json) -> Json:
    """Triton's shape of a completion, or of a chunk of one."""
    if "error" in completion:
        return completion
    texts = [choice["text"] for choice in completion["choices"]]
    text = texts[0] if len(texts) == 1 else texts
    return {"model_name": completion["model"], "model_version": oip.VERSION, "text_output": text}


def _of_several(chunk: Json) -> Json:
    """A chunk that says which of several answers it is of."""
    told = _generated(chunk)
    return told if "error" in told else told | {"index": chunk["choices"][0]["index"]}


def _failed(error: BaseException) -> Json:
    return {"error": error.message if isinstance(error, BatonError) else "the server had an error"}


_GENERATED = EventStyle(lambda chunk: event_bytes(_generated(chunk)), _failed, b"")
_GENERATED_SEVERAL = EventStyle(lambda chunk: event_bytes(_of_several(chunk)), _failed, b"")


async def _metadata(service: GenerationService, request: Request) -> Response:
    oip.require_version(request.path_params.get("version", ""))
    return json_response(oip.model_metadata(await service.catalog.described(request.path_params["model"])))


async def _model_ready(service: GenerationService, request: Request) -> Response:
    oip.require_version(request.path_params.get("version", ""))
    entry = await service.catalog.described(request.path_params["model"])
    return _readiness(oip.served(service, entry.name))


def _readiness(is_ready: bool) -> Response:
    if is_ready:
        return json_response({"ready": True})
    return json_response({"error": "not ready: a request could not be placed now"}, NoWorker.http_status)
