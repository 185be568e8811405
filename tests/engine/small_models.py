"""Small checkpoints of the conformance suite's kinds, loaded, and what must hold of the answers of each.

Knows nothing of what is special in a kind.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine.backends.native.runner import NativeRunner
from baton.engine.backends.torch.runner import TorchRunner
from baton.engine.checkpoints.safetensors import Checkpoint
from baton.engine.config import EngineConfig
from baton.engine.load import load_runner
from baton.engine.models import program_for
from baton.engine.program.config import ModelConfig
from baton.protos.nouns import Sampling
from tests.conformance.checkpoints import make
from tests.conformance.drive import Driver

Asked = list[list[int]]


def model(home: Path, kind: str) -> Path:
    """The checkpoint of ``kind``, made once in ``home``."""
    directory = home / kind
    return directory if directory.exists() else make(directory, kind)


def load(directory: Path, cache: Path, threads: int = 1, **fields: Any) -> NativeRunner:
    """A checkpoint on the native backend."""
    found = load_runner(EngineConfig(str(directory), threads=threads, cache_dir=str(cache), **fields))
    assert isinstance(found, NativeRunner)
    return found


def require_the_same_bits(
    fresh: Callable[[], NativeRunner],
    mine: Asked,
    greedy: Sampling,
    chunks: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Asserts that ``mine`` are answered alike alone, batched, and op by op against the references.

    ``chunks`` are the tokens of a step, batched and alone.
    """
    plain = Driver(fresh(), pages=100, chunk=chunks[0])
    together = plain.answer(mine, greedy)
    alone = Driver(fresh(), pages=40, chunk=chunks[1])
    assert [alone.answer([prompt], greedy)[0] for prompt in mine] == together
    monkeypatch.setenv("BATON_STEP", "ops")
    monkeypatch.setenv("BATON_CHECK_STEP", "1")
    checked = Driver(fresh(), pages=100, chunk=chunks[0])
    assert checked.answer(mine, greedy) == together
    assert checked.logprobs == plain.logprobs


def require_the_references_tokens(directory: Path, found: NativeRunner, mine: Asked, greedy: Sampling) -> None:
    """Asserts that torch's ops give the tokens of ``found``."""
    program = program_for(ModelConfig.read(directory))
    weights = dict(Checkpoint(directory).weights(program.weights, torch.float32, "cpu"))
    reference = TorchRunner(found.spec, program, weights)
    assert Driver(reference, pages=100).answer(mine, greedy) == Driver(found, pages=100).answer(mine, greedy)
