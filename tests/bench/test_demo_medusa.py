"""Medusa heads that the benchmark trains guess what they learnt, read back as the engine reads published ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from baton.engine.speculate.heads.files import Target, packing
from baton.engine.speculate.heads.medusa import read_medusa
from baton.kernels.abi import native
from bench.demo_draft import PROMPT, Demo
from bench.demo_medusa import HEADS, examples, passages, train, written

HIDDEN, VOCAB, ROWS = 32, 48, 256


@pytest.mark.skipif(native.library() is None, reason="no native kernels here")
def test_heads_guess_what_they_learnt_from_states(tmp_path: Path) -> None:
    states = torch.randn(ROWS, HIDDEN)
    wanted = torch.stack([(states @ torch.randn(HIDDEN, VOCAB)).argmax(1) for _ in range(HEADS)], 1)
    heads = train(torch.randn(VOCAB, HIDDEN) / HIDDEN**0.5, states, wanted, epochs=60, rate=0.03)
    heads.save(tmp_path)
    read = read_medusa(str(tmp_path), Target(HIDDEN, VOCAB, 1), packing("float32", "none"))
    assert len(read) == HEADS
    for at, head in enumerate(read):
        assert float((head.logits(states).argmax(1) == wanted[:, at]).float().mean()) > 0.9


@pytest.mark.skipif(native.library() is None, reason="no native kernels here")
def test_examples_are_states_of_the_models_own_answers_and_the_tokens_behind_them() -> None:
    demo = Demo(1)
    text = written(demo, 1)[0]
    assert text[:PROMPT] == passages(demo, 1, 0, trained_on=True)[0]
    states, wanted = examples(demo, [text])
    assert len(states) == len(wanted) == len(text) - PROMPT - HEADS
    assert wanted[0].tolist() == text[PROMPT + 1 : PROMPT + 1 + HEADS]
    assert wanted[-1].tolist() == text[-HEADS:]
