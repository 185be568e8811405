"""Declares who is compared: our engine in this process, each peer in a process of its own environment.

All answer the same two questions with seconds: a step that advances ``batch`` sequences with CONTEXT tokens behind
them, and a prompt of so many tokens up to its first token. Knows nothing of rows or of how a peer does it.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any, Protocol

from baton.bench.engine.memory import MemoryRead
from baton.bench.engine.models import random_runner
from baton.engine.backends.loading import load
from baton.engine.backends.native.runner import NativeRunner
from baton.engine.config import EngineConfig
from baton.evaluate.workload import CONTEXT, PROMPT, STEPS, Workload
from baton.protos.errors import ConfigError
from bench.peers.answering import clock
from bench.peers.environments import python_of
from bench.peers.random_gguf import NAME

PEERS = {
    "llama.cpp": "llama_cpp", "OpenVINO": "openvino", "transformers": "transformers",
    "bitsandbytes": "bitsandbytes",
}  # fmt: skip
FILE = "the peers' file"  # what our engine on the peers' own blocks is called
WITHOUT = {"llama_cpp": "llama_cpp_without_amx"}  # the build that is taken where a signal ended the first one


class Side(Protocol):
    """One engine with one model."""

    name: str

    def decode_seconds(self, batch: int) -> float:
        """Returns the mean seconds of a decode step of ``batch`` sequences."""

    def prompt_seconds(self, tokens: int) -> float:
        """Returns the mean seconds of reading a prompt of ``tokens`` tokens."""

    def close(self) -> None:
        """Ends the engine's process."""


class BatonPeer:
    """Runs our engine, with weights rounded by ``scheme`` or those of the peers' own file."""

    def __init__(self, name: str, runner: NativeRunner, most: int, weight_bytes: int, prompt: int = PROMPT) -> None:
        self.name, self.weight_bytes = name, weight_bytes  # of weights that a decode step reads
        self._work = Workload(runner, most, runner.spec.vocab_size, clock, prompt)
        self.kv_bytes = self._work.kv_bytes

    @classmethod
    def rounded(cls, size: str, scheme: str, most: int, prompt: int = PROMPT) -> BatonPeer:
        """Returns our engine with weights in our own form of ``scheme``, as ``--quantization`` gives them."""
        runner, read = random_runner(size, scheme, "bf16")
        return cls(scheme, runner, most, read, prompt)

    @classmethod
    def of_file(cls, folder: Path, most: int, prompt: int = PROMPT) -> BatonPeer:
        """Returns our engine with the blocks of the peers' file as they are."""
        runner = load(EngineConfig(model=str(folder), dtype="float32", kv_cache_dtype="bf16"))
        if not isinstance(runner, NativeRunner):
            raise ConfigError("the comparison needs the native kernels: install a C++ compiler", "device")
        assert runner.work is not None
        return cls(FILE, runner, most, int(runner.work.step_bytes), prompt)

    def decode_seconds(self, batch: int) -> float:
        """Returns the mean seconds of a decode step of ``batch`` sequences."""
        return self._work.decode_seconds(batch)

    def prompt_seconds(self, tokens: int) -> float:
        """Returns the mean seconds of reading a prompt of ``tokens`` tokens."""
        return self._work.prompt_seconds(tokens)

    def close(self) -> None:
        """Does nothing, because the engine runs in this process."""


class Memory:
    """Reads memory in the same rounds, which bounds the decoding of one sequence; it is no engine."""

    name = "memory read"

    def __init__(self) -> None:
        self._read = MemoryRead()

    def decode_seconds(self, batch: int) -> float:
        """Returns the seconds of reading a gigabyte."""
        return 1e9 / self._read.rate()

    def prompt_seconds(self, tokens: int) -> float:
        """Returns the same as ``decode_seconds``, because there is no prompt to read."""
        return self.decode_seconds(1)

    def close(self) -> None:
        """Does nothing, because nothing is open."""


class Peer:
    """A peer's process, asked by lines of JSON."""

    def __init__(self, name: str, folder: Path, threads: int, most: int, tokens: int = CONTEXT + 2 * STEPS) -> None:
        script = Path(__file__).with_name(f"{PEERS[name]}_side.py")
        arguments = [script, folder / NAME, threads, most, tokens]
        self._script, self._log = script.name, folder / f"{PEERS[name]}.log"
        about, built = self._start(PEERS[name], arguments), ""
        if about is None and (other := WITHOUT.get(PEERS[name])):
            about, built = self._start(other, arguments), f" ({other.partition('_cpp_')[2].replace('_', ' ')})"
        if about is None:
            raise SystemExit(f"{self._script} was ended by signal {-self._process.wait()}; see {self._log}")
        self.name = f"{name} {about['version']}{built}"

    def _start(self, environment: str, arguments: list[Any]) -> dict[str, Any] | None:
        """Starts the peer from an environment; returns how it greets, None where a signal ended it."""
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [str(part) for part in (python_of(environment), *arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        try:
            return self._read()
        except SystemExit:
            if self._process.wait() < 0:
                return None
            raise

    def decode_seconds(self, batch: int) -> float:
        """Returns the mean seconds of a decode step of ``batch`` sequences."""
        return self._ask(batch=batch, context=CONTEXT, steps=STEPS)

    def prompt_seconds(self, tokens: int) -> float:
        """Returns the mean seconds of reading a prompt of ``tokens`` tokens."""
        return self._ask(prompt=tokens)

    def close(self) -> None:
        """Ends the engine's process."""
        self._process.communicate(timeout=60)

    def _ask(self, **question: Any) -> float:
        assert self._process.stdin
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return float(self._read()["seconds"])

    def _read(self) -> dict[str, Any]:
        """The next line that is JSON: some peers greet on stdout."""
        assert self._process.stdout
        for line in self._process.stdout:
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        raise SystemExit(f"{self._script} ended with {self._process.wait()}; it said why in {self._log}")
