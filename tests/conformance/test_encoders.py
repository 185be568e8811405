"""Tests encoders against transformers: states by every pooling and scores of pairs, in parts, together and
alone.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from baton.engine.config import EngineConfig
from baton.engine.load import load_runner
from baton.engine.plan import Runner
from baton.protos.nouns import Sampling
from tests.conformance.checkpoints import prompts
from tests.conformance.drive import Driver
from tests.conformance.encoders import ENCODERS, Encoded, make_encoder


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("encoders")


def encoder(home: Path, kind: str, scores: bool = False) -> Path:
    directory = home / f"{kind}{scores}"
    return directory if directory.exists() else make_encoder(directory, kind, scores)


def load(directory: Path, **changes: object) -> Runner:
    return load_runner(EngineConfig(str(directory), threads=1, **changes))  # type: ignore[arg-type]


def texts(vocab: int) -> list[list[int]]:
    return [[3 + i % (vocab - 3) for i in text[:150]] for text in prompts(vocab, count=8)]


def vectors(runner: Runner, asked: list[list[int]], pooling: str, chunk: int = 48) -> list[np.ndarray]:
    driver = Driver(runner, pages=120, chunk=chunk)
    driver.answer(asked, Sampling(temperature=0.0, max_tokens=1, pooling=pooling))
    return [np.frombuffer(driver.read[key][1], "<f4") for key in range(len(asked))]


@pytest.mark.parametrize("kind", ENCODERS)
def test_states_are_those_of_transformers(home: Path, kind: str) -> None:
    directory = encoder(home, kind)
    runner, wanted = load(directory), Encoded(directory)
    asked = texts(ENCODERS[kind]["vocab_size"])
    states = [wanted.states(text).numpy() for text in asked]
    for pooling, of in {"cls": lambda s: s[0], "mean": lambda s: s.mean(0), "last": lambda s: s[-1]}.items():
        for found, each in zip(vectors(runner, asked, pooling), states, strict=True):
            assert found == pytest.approx(of(each), abs=1e-4)


@pytest.mark.parametrize("kind", ENCODERS)
def test_scores_of_pairs_are_those_of_transformers(home: Path, kind: str) -> None:
    directory = encoder(home, kind, scores=True)
    runner, wanted, vocab = load(directory), Encoded(directory, scores=True), ENCODERS[kind]["vocab_size"]
    types = runner.spec.vocab_size // vocab
    asked = texts(vocab)
    split = [[int(types > 1 and at > len(text) // 2) for at in range(len(text))] for text in asked]
    pairs = [[i + vocab * t for i, t in zip(*each, strict=True)] for each in zip(asked, split, strict=True)]
    for found, text, of in zip(vectors(runner, pairs, "score"), asked, split, strict=True):
        assert found.tolist() == pytest.approx([wanted.score(text, of if types > 1 else None)], abs=1e-4)


@pytest.mark.parametrize("kind", ENCODERS)
def test_a_text_has_the_same_bits_alone_together_and_in_parts(home: Path, kind: str) -> None:
    runner = load(encoder(home, kind))
    asked = texts(ENCODERS[kind]["vocab_size"])
    together = vectors(runner, asked, "cls", chunk=1024)
    for chunk in (16, 23):
        assert all(map(np.array_equal, vectors(runner, asked, "cls", chunk), together))
    assert all(
        np.array_equal(vectors(runner, [text], "cls")[0], one) for text, one in zip(asked, together, strict=True)
    )
