"""A peer's side of the pipe: a line of JSON asks, ``{"batch": 4, "context": 512, "steps": 8}`` for decoding or
``{"prompt": 512}``, and one answers the seconds of a step or of the prompt, by the clock that PEER_CLOCK names.

Runs in each peer's own environment, so it knows the standard library only, and nothing of us. PEER_CLOCK is "cpu"
for the CPU seconds of the process, which other work on the machine hardly changes, else seconds of the day.
"""

import json
import os
import sys
import time

clock = time.process_time if os.environ.get("PEER_CLOCK") == "cpu" else time.perf_counter  # in seconds


def answer(model, **about):
    """Greet with ``about``, then answer each line until the input ends, by ``model.prompt`` or ``model.decode``."""
    print(json.dumps(about), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        seconds = model.prompt(asked["prompt"]) if "prompt" in asked else model.decode(**asked)
        print(json.dumps({"seconds": seconds}), flush=True)
