"""Talk to a running `make serve` with the unmodified `openai` package, whole and streamed.

.venv/bin/python examples/clients/openai_client.py [--url http://127.0.0.1:8000] [--key bt-…]
"""

from __future__ import annotations

import argparse

import openai


def main() -> None:
    """A completion and a chat, each whole and streamed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--key", default="unused", help="an API key (baton keys add), if the router asks for one")
    given = parser.parse_args()
    client = openai.OpenAI(base_url=given.url + "/v1", api_key=given.key)
    model = client.models.list().data[0].id
    print(f"model: {model}")

    whole = client.completions.create(model=model, prompt="The river ran", max_tokens=48, seed=1)
    print(f"\ncompletion: The river ran{whole.choices[0].text}\n{whole.usage}")

    print("\nstreamed completion: In the beginning", end="")
    for piece in client.completions.create(
        model=model, prompt="In the beginning", max_tokens=48, seed=2, stream=True
    ):
        print(piece.choices[0].text, end="", flush=True)

    asked = [{"role": "user", "content": "What is a river?"}]
    answer = client.chat.completions.create(model=model, messages=asked, max_tokens=64, seed=3)
    print(f"\n\nchat: {answer.choices[0].message.content!r} ({answer.choices[0].finish_reason})")

    print("\nstreamed chat: ", end="")
    stream = client.chat.completions.create(
        model=model,
        messages=asked,
        max_tokens=64,
        seed=4,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        if chunk.usage:
            print(f"\n{chunk.usage}")


if __name__ == "__main__":
    main()
