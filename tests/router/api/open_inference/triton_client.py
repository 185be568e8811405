"""The unmodified tritonclient against a router: prints what it saw as JSON. A process of its own: the client
brings descriptors of the same protobuf package as ours.

    python triton_client.py HOST PORT GRPC_PORT
"""

import json
import queue
import sys

import numpy as np
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

HOST, PORT, GRPC_PORT = sys.argv[1:]
PROMPTS = np.array([b"x", b"two"], dtype=object)


def inputs(module, prompts=PROMPTS, **settings):
    text = module.InferInput("text_input", [len(prompts)], "BYTES")
    text.set_data_from_numpy(prompts)
    sampling = module.InferInput("sampling_parameters", [1], "BYTES")
    sampling.set_data_from_numpy(np.array([json.dumps(settings).encode()], dtype=object))
    return [text, sampling]


def answer(result):
    return {
        "text": [text.decode() for text in result.as_numpy("text_output")],
        "reason": [reason.decode() for reason in result.as_numpy("finish_reason")],
        "tokens": result.as_numpy("num_output_tokens").tolist(),
    }


def refusal(call):
    try:
        call()
    except InferenceServerException as error:
        return error.message()
    return "none"


def about(client, metadata):
    return {
        "live": client.is_server_live(),
        "ready": client.is_server_ready(),
        "model": client.is_model_ready("tiny"),
        "missing": client.is_model_ready("huge"),
        "inputs": metadata,
    }


def over_http():
    client = triton_http.InferenceServerClient(f"{HOST}:{PORT}")
    metadata = [tensor["name"] for tensor in client.get_model_metadata("tiny")["inputs"]]
    asked = inputs(triton_http, temperature=0, max_tokens=5)
    shown = [triton_http.InferRequestedOutput("text_output", binary_data=False)]
    plain = client.infer("tiny", asked, outputs=shown, request_id="r1")
    return about(client, metadata) | {
        "server": client.get_server_metadata()["name"],
        "answer": answer(client.infer("tiny", asked)),
        "plain": plain.get_response()["outputs"][0]["data"],
        "id": plain.get_response()["id"],
        "refused": refusal(lambda: client.infer("tiny", inputs(triton_http, temperature=9))),
        "unknown": refusal(lambda: client.infer("huge", asked)),
    }


def over_grpc():
    client = triton_grpc.InferenceServerClient(f"{HOST}:{GRPC_PORT}")
    metadata = [tensor.name for tensor in client.get_model_metadata("tiny").inputs]
    asked = inputs(triton_grpc, temperature=0, max_tokens=5)
    return about(client, metadata) | {
        "server": client.get_server_metadata().name,
        "answer": answer(client.infer("tiny", asked, parameters={"seed": 3})),
        "streamed": streamed(client),
        "refused": refusal(lambda: client.infer("tiny", inputs(triton_grpc, temperature=9))),
        "unknown": refusal(lambda: client.infer("huge", asked)),
    }


def streamed(client):
    found = queue.Queue()
    client.start_stream(callback=lambda result, error: found.put((result, error)))
    client.async_stream_infer("tiny", inputs(triton_grpc, PROMPTS[:1], temperature=0, max_tokens=5), request_id="s")
    client.async_stream_infer("tiny", inputs(triton_grpc, PROMPTS[:1], temperature=9))
    pieces, final = [], False
    while not final:
        result, error = found.get(timeout=10)
        assert error is None, error
        pieces.append(result.as_numpy("text_output")[0].decode())
        final = result.get_response().parameters["triton_final_response"].bool_param
    _, error = found.get(timeout=10)
    client.stop_stream()
    return {"pieces": len(pieces), "text": "".join(pieces), "error": str(error)}


print(json.dumps({"http": over_http(), "grpc": over_grpc()}))
