"""A peer's side of the pipe: a line of JSON asks, ``{"batch": 4, "context": 512, "steps": 8}`` for decoding or
``{"prompt": 512}``, and one answers the seconds of a step or of the prompt.

Runs in each peer's own environment, so it knows the standard library only, and nothing of us.
"""

import json
import sys


def answer(model, **about):
    """Greet with ``about``, then answer each line until the input ends, by ``model.prompt`` or ``model.decode``."""
    print(json.dumps(about), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        seconds = model.prompt(asked["prompt"]) if "prompt" in asked else model.decode(**asked)
        print(json.dumps({"seconds": seconds}), flush=True)
