"""Asks of simulated clients by the Open Inference Protocol, over REST and gRPC.

Knows nothing of what an answer must be, nor of how calls travel.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

import orjson

from baton.drill.parts.engine import MODEL_ID
from baton.drill.scenario import Request
from baton.protos.v1 import open_inference_pb2 as pb

HEADER_LENGTH = "inference-header-content-length"
Fields = Mapping[str, object]  # of /v1/completions


def tensors_path(request: Request) -> str:
    """Returns the path that ``request`` asks over REST; every other client names the model's version."""
    version = "/versions/1" if request.number % 2 else ""
    return f"/v2/models/{MODEL_ID}{version}/{'infer' if request.over_http == 'whole' else 'generate_stream'}"


def tensors_body(request: Request, fields: Fields) -> tuple[bytes, int]:
    """Returns the body of ``request`` over REST, and the bytes of its JSON; 0: all of it is JSON.

    A third of the clients that want a whole answer send the prompt as binary.
    """
    if request.over_http == "stream":
        text = bytes(request.prompt).decode()
        return orjson.dumps({"text_input": text, "parameters": {**fields}}), 0
    asks = orjson.dumps(fields).decode()
    settings = {"name": "sampling_parameters", "datatype": "BYTES", "shape": [1], "data": [asks]}
    ids: dict[str, object] = {"name": "input_ids", "datatype": "INT32", "shape": [len(request.prompt)]}
    if request.number % 3:
        return orjson.dumps({"inputs": [ids | {"data": request.prompt}, settings]}), 0
    raw = _int32(request)
    header = orjson.dumps({"inputs": [ids | {"parameters": {"binary_data_size": len(raw)}}, settings]})
    return header + raw, len(header)


def tensors_message(request: Request, fields: Fields) -> pb.ModelInferRequest:
    """Returns ``request`` as a client of the gRPC service sends it."""
    asks = orjson.dumps(fields)
    tensor = pb.ModelInferRequest.InferInputTensor
    return pb.ModelInferRequest(
        model_name=MODEL_ID,
        id=f"{request.number}",
        inputs=[
            tensor(name="input_ids", datatype="INT32", shape=[len(request.prompt)]),
            tensor(name="sampling_parameters", datatype="BYTES", shape=[1]),
        ],
        raw_input_contents=[_int32(request), struct.pack("<I", len(asks)) + asks],
    )


def _int32(request: Request) -> bytes:
    return struct.pack(f"<{len(request.prompt)}i", *request.prompt)
