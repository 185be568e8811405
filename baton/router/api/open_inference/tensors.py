"""Conversion between the Open Inference Protocol's tensors and a completion, shared by REST and gRPC.

Knows nothing of either. Tensors follow Triton's backends for language models: ``text_input`` in, ``text_output``
out, ``sampling_parameters`` as JSON. Specification: https://github.com/kserve/open-inference-protocol
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import cast

import msgspec
import numpy as np

from baton.protos.errors import InvalidRequest, ModelNotFound
from baton.protos.json import Json
from baton.protos.version import product_version
from baton.router.answer.service import GenerationService
from baton.router.answer.validate import check_count
from baton.router.api.body import read_body_of
from baton.router.api.large import MAX_NUMBERS, require_light
from baton.router.api.openai.prepared_call import Headers, PreparedCall, completion_call
from baton.router.api.openai.schemas import CompletionBody
from baton.router.text.catalog import ModelEntry

TensorValue = bool | int | float | str | bytes
VERSION = "1"
EXTENSIONS = ("binary_tensor_data", "generate", "model_repository(index)", "parameters")
INPUTS = (("text_input", "BYTES", [-1]), ("input_ids", "INT32", [-1]), ("sampling_parameters", "BYTES", [1]),
          ("stream", "BOOL", [1]))  # fmt: skip
OUTPUTS = (("text_output", "BYTES", [-1]), ("finish_reason", "BYTES", [-1]), ("num_input_tokens", "UINT32", [1]),
           ("num_output_tokens", "UINT32", [1]))  # fmt: skip
DTYPES = {
    "BOOL": "?", "INT8": "i1", "INT16": "<i2", "INT32": "<i4", "INT64": "<i8", "UINT8": "u1", "UINT16": "<u2",
    "UINT32": "<u4", "UINT64": "<u8", "FP16": "<f2", "FP32": "<f4", "FP64": "<f8",
}  # fmt: skip
UNTOLD = ("logprobs", "prompt_logprobs", "return_token_ids")  # fields that ask for what no output has
NOT_OURS = frozenset({"prompt", "stream", "stream_options", "model", "priority"})  # the protocol has its own


class Tensor(msgspec.Struct, frozen=True):
    """Describes a tensor; ``values`` are flattened in row-major order, those of datatype BYTES are ``bytes``.

    Raises InvalidRequest if the values don't fill ``shape``, or are too many.
    """

    name: str
    datatype: str
    shape: list[int]
    values: Sequence[TensorValue]

    def __post_init__(self) -> None:
        check_count(f"{self.name}.shape", len(self.shape), MAX_DIMENSIONS)
        check_count(self.name, len(self.values), MAX_NUMBERS)
        count = int(np.prod(self.shape, dtype=object)) if self.shape else 1
        if any(size < 0 for size in self.shape) or count != len(self.values):
            text = f"{self.name} has {len(self.values)} values, which don't fill its shape {self.shape}"
            raise InvalidRequest(text, self.name)


MAX_DIMENSIONS = 8  # dimensions of an input's shape


def unpacked(name: str, datatype: str, raw: bytes) -> Sequence[TensorValue]:
    """Returns the values of a tensor in binary form: little-endian numbers, or BYTES each after its uint32 length.

    Raises InvalidRequest.
    """
    if datatype == "BYTES":
        return _unpacked_bytes(name, raw)
    if datatype not in DTYPES:
        raise InvalidRequest(f"{name} has datatype {datatype!r}: use BYTES, {', '.join(DTYPES)}", name)
    dtype = np.dtype(DTYPES[datatype])
    if len(raw) % dtype.itemsize:
        raise InvalidRequest(f"{name} has {len(raw)} bytes, no multiple of {dtype.itemsize}", name)
    check_count(name, len(raw) // dtype.itemsize, MAX_NUMBERS)
    values: list[TensorValue] = np.frombuffer(raw, dtype).tolist()
    return values


def packed(tensor: Tensor) -> bytes:
    """Returns a tensor's values in binary form: little-endian numbers, or BYTES each after its uint32 length."""
    if tensor.datatype == "BYTES":
        return b"".join(struct.pack("<I", len(value)) + value for value in cast(Sequence[bytes], tensor.values))
    return np.array(tensor.values, DTYPES[tensor.datatype]).tobytes()


def body_of(model: str, inputs: Sequence[Tensor], parameters: Mapping[str, object], stream: bool) -> CompletionBody:
    """Returns the completion body that input tensors and parameters ask for; ``stream`` says whether the call may
    answer in pieces, which the input of that name can decline.

    Raises InvalidRequest naming the tensor or parameter.
    """
    given = {tensor.name: tensor for tensor in inputs}
    unknown = given.keys() - {name for name, _, _ in INPUTS}
    if unknown:
        name = min(unknown)
        raise InvalidRequest(f"{name} is no input of this model: give {', '.join(n for n, _, _ in INPUTS)}", name)
    fields = completion_fields(parameters) | _sampling_parameters(given)
    prompt = _prompt(given)
    asked = {"model": model or None, "prompt": prompt, "stream": _streams(given, stream)}
    return read_body_of(CompletionBody, fields | asked)


def _streams(given: Mapping[str, Tensor], possible: bool) -> bool:
    tensor = given.get("stream")
    if tensor is None:
        return possible
    if tensor.datatype != "BOOL" or len(tensor.values) != 1:
        raise InvalidRequest("stream should be one BOOL", "stream")
    if tensor.values[0] and not possible:
        raise InvalidRequest("this call answers at once: leave out stream, or use ModelStreamInfer", "stream")
    return bool(tensor.values[0])


def completion_fields(parameters: Mapping[str, object]) -> Json:
    """Returns the ``parameters`` that are validated as fields of a completion body: all but those that the protocol
    itself sets.
    """
    return {name: value for name, value in parameters.items() if name not in NOT_OURS}


async def call_of(service: GenerationService, headers: Headers, body: CompletionBody, version: str) -> PreparedCall:
    """Returns the validated call of a completion body.

    Raises InvalidRequest, also for what no output tells, and ModelNotFound for a model or version.
    """
    require_version(version)
    for name in UNTOLD:
        if (asked := getattr(body, name)) is not None and asked is not False:
            raise InvalidRequest(f"{name}: no output of this protocol tells them; use /v1/completions", name)
    return await completion_call(service, headers, body)


def outputs_of(completion: Json, wanted: Sequence[str]) -> list[Tensor]:
    """Returns a completion (or a chunk of one) as tensors; ``wanted`` names the outputs, empty means all.

    Raises InvalidRequest for an unknown name.
    """
    choices, usage = completion["choices"], completion.get("usage") or {}
    texts = [choice["text"].encode() for choice in choices]
    reasons = [(choice["finish_reason"] or "").encode() for choice in choices]
    found = [Tensor("text_output", "BYTES", [len(texts)], texts)]
    found.append(Tensor("finish_reason", "BYTES", [len(reasons)], reasons))
    if usage:
        found.append(Tensor("num_input_tokens", "UINT32", [1], [usage["prompt_tokens"]]))
        found.append(Tensor("num_output_tokens", "UINT32", [1], [usage["completion_tokens"]]))
    if not wanted:
        return found
    known = {name for name, _, _ in OUTPUTS}
    for name in wanted:
        if name not in known:
            raise InvalidRequest(f"{name} is no output of this model: ask for {', '.join(sorted(known))}", name)
    return [tensor for tensor in found if tensor.name in wanted]


def require_version(version: str) -> None:
    """Raises ModelNotFound unless ``version`` is "" or VERSION, the only one served."""
    if version not in ("", VERSION):
        raise ModelNotFound(f"version {version!r} is not served: there is {VERSION}", "version")


def model_metadata(entry: ModelEntry) -> Json:
    """Returns a model's metadata in the protocol's form: names, datatypes and shapes of inputs and outputs."""

    def tensors(known: Sequence[tuple[str, str, list[int]]]) -> list[Json]:
        return [{"name": name, "datatype": datatype, "shape": shape} for name, datatype, shape in known]

    return {
        "name": entry.name,
        "versions": [VERSION],
        "platform": "baton",
        "inputs": tensors(INPUTS),
        "outputs": tensors(OUTPUTS),
    }


def server_metadata() -> Json:
    """Returns the server's name, version and extensions in the protocol's form."""
    return {"name": "baton", "version": product_version(), "extensions": list(EXTENSIONS)}


def served(service: GenerationService, model: str) -> bool:
    """Returns whether ``model`` is in the catalog and a request could be given to a worker now."""
    return service.serving.ready() and any(entry.name == model for entry in service.catalog.entries())


def _prompt(given: Mapping[str, Tensor]) -> list[object]:
    if ("text_input" in given) == ("input_ids" in given):
        raise InvalidRequest("give either text_input or input_ids", "text_input")
    if "text_input" in given:
        return [_text(value, "text_input") for value in given["text_input"].values]
    return [given["input_ids"].values]


def _sampling_parameters(given: Mapping[str, Tensor]) -> Json:
    tensor = given.get("sampling_parameters")
    if tensor is None or not tensor.values:
        return {}
    text = _text(tensor.values[0], tensor.name)
    require_light(text, tensor.name)
    try:
        said = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        said = None
    if not isinstance(said, dict):
        raise InvalidRequest("sampling_parameters should be the text of a JSON object", tensor.name)
    return completion_fields(said)


def _text(value: object, name: str) -> str:
    try:
        return value.decode() if isinstance(value, bytes) else str(value)
    except UnicodeDecodeError:
        raise InvalidRequest(f"{name} should be UTF-8", name) from None


def _unpacked_bytes(name: str, raw: bytes) -> list[bytes]:
    values, at = [], 0
    while at < len(raw):
        if at + 4 > len(raw) or at + 4 + struct.unpack_from("<I", raw, at)[0] > len(raw):
            raise InvalidRequest(f"{name} ends in the middle of a value", name)
        size = struct.unpack_from("<I", raw, at)[0]
        values.append(raw[at + 4 : at + 4 + size])
        at += 4 + size
        check_count(name, len(values), MAX_NUMBERS)
    return values
