"""Peers' prompt look-up over texts that are given, beside their own decoding of them, in their own environments:
llama.cpp's and vLLM's.

Their own classes propose, their own step verifies, and what the model "chose" is the given text, as in
``bench.speculation``. Knows nothing of rows or of our engine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.peers import vllm_environment
from bench.peers.environments import HOME, REQUIREMENTS
from bench.peers.random_checkpoint import checkpoint_of
from bench.peers.random_gguf import NAME, folder_of

ENVIRONMENTS = ("llama_cpp_without_amx", "llama_cpp")  # the first is made where the other crashes
LIMIT_S = 600.0
VLLM_SIDE = Path(__file__).with_name("vllm_lookup_side.py")


def looked_up(
    size: str, texts: Sequence[tuple[list[int], list[int]]], tokens: int
) -> list[tuple[float, float]] | None:
    """Returns for each (prompt, answer) the seconds of ``tokens`` tokens without and with look-up.

    None, with a word on stderr, where llama.cpp isn't set up here. Raises RuntimeError where it fails.
    """
    environment = next((name for name in ENVIRONMENTS if _is_made(name)), None)
    if environment is None:
        print("no llama.cpp here: python -m bench.peers.environments llama_cpp", file=sys.stderr)
        return None
    script, model = Path(__file__).with_name("llama_cpp_lookup_side.py"), folder_of(HOME, size, "int8") / NAME
    asked = json.dumps({"texts": texts, "tokens": tokens})
    command = [str(HOME / environment / "bin" / "python"), str(script), str(model), str(os.cpu_count() or 1)]
    done = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode:
        raise RuntimeError(f"{script.name} ended with {done.returncode}: {done.stderr[-2000:]}")
    last = next(line for line in reversed(done.stdout.splitlines()) if line.startswith("["))
    return [(without, drafted) for without, drafted in json.loads(last)]


def looked_up_by_vllm(
    size: str, texts: Sequence[tuple[list[int], list[int]]], tokens: int
) -> list[tuple[float, float]] | None:
    """Returns the same for vLLM's n-gram look-up, on the same shape in bf16.

    None, with a word on stderr, where vLLM isn't set up here. Raises RuntimeError where it fails.
    """
    if not (HOME / "vllm" / "installed").exists():
        print("no vLLM here: python -m bench.peers.environments vllm", file=sys.stderr)
        return None
    found, folder = vllm_environment.set_up(HOME / "vllm"), checkpoint_of(HOME, size)
    asked = json.dumps({"texts": texts, "tokens": tokens})
    surroundings = os.environ | {"LD_PRELOAD": ":".join(map(str, found.preload))}
    without, drafted = (
        _answered_by_vllm([str(found.python), str(VLLM_SIDE), str(folder), way], asked, surroundings)
        for way in ("none", "ngram")
    )
    return list(zip(without, drafted, strict=True))


def _answered_by_vllm(command: list[str], asked: str, surroundings: dict[str, str]) -> list[float]:
    done = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=LIMIT_S, env=surroundings)
    if done.returncode:
        raise RuntimeError(f"{VLLM_SIDE.name} ended with {done.returncode}: {done.stderr[-2000:]}")
    seconds: list[float] = json.loads(next(line for line in reversed(done.stdout.splitlines()) if line[:1] == "["))
    return seconds


def _is_made(name: str) -> bool:
    stamp = HOME / name / "installed"
    return stamp.exists() and stamp.read_text() == " ".join(REQUIREMENTS[name])
