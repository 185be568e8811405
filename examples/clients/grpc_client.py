"""Talk to a running `make serve` over gRPC (`baton.v1.Inference`), unary and streamed.

.venv/bin/python examples/clients/grpc_client.py [--target 127.0.0.1:8001] [--key bt-…]
"""

from __future__ import annotations

import argparse

import grpc

from baton.protos.v1 import common_pb2, inference_pb2, inference_pb2_grpc


def main() -> None:
    """List the models, then one answer whole and one streamed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="127.0.0.1:8001")
    parser.add_argument("--key", default="", help="an API key (baton keys add), if the router asks for one")
    given = parser.parse_args()
    key = [("authorization", f"Bearer {given.key}")] if given.key else []
    with grpc.insecure_channel(given.target) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        for model in stub.ListModels(inference_pb2.ListModelsRequest(), metadata=key).models:
            print(f"model: {model.id}, up to {model.max_model_len} tokens")

        sampling = common_pb2.Sampling(max_tokens=48, seed=1)
        request = inference_pb2.GenerateRequest(text="The river ran", sampling=sampling)
        reply = stub.Generate(request, metadata=key, timeout=60)
        print(f"\nunary: The river ran{reply.choices[0].text}\n{reply.usage}")

        chat = inference_pb2.Conversation(
            messages=[inference_pb2.ChatMessage(role="user", content="What is a river?")]
        )
        print("streamed: ", end="")
        request = inference_pb2.GenerateRequest(chat=chat, sampling=sampling)
        for chunk in stub.GenerateStream(request, metadata=key, timeout=60):
            for choice in chunk.choices:
                print(choice.text, end="", flush=True)
        print(f"\n{chunk.usage}")


if __name__ == "__main__":
    main()
