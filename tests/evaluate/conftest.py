"""A tiny model as a subject, plain and rounded, loaded once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.engine.config import EngineConfig
from baton.evaluate.local import LocalSubject
from tests.conformance.checkpoints import make
from tests.evaluate.completions_server import CompletionsServer


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("judged"), "llama2", tokenizer=True)


@pytest.fixture(scope="session")
def local(model: Path) -> LocalSubject:
    return LocalSubject(EngineConfig(str(model), threads=1))


@pytest.fixture(scope="session")
def rounded(model: Path, tmp_path_factory: pytest.TempPathFactory) -> LocalSubject:
    cache = str(tmp_path_factory.mktemp("cache"))
    return LocalSubject(EngineConfig(str(model), threads=1, quantization="int4", cache_dir=cache))


@pytest.fixture(scope="session")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> LocalSubject:
    """A model whose layers keep a recurrent state beside attention."""
    path = make(tmp_path_factory.mktemp("recurrent"), "qwen3_next", tokenizer=True)
    return LocalSubject(EngineConfig(str(path), threads=1))


@pytest.fixture(scope="session")
def server(local: LocalSubject) -> Iterator[CompletionsServer]:
    with CompletionsServer(local) as running:
        yield running
