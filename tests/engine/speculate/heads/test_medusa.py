"""Medusa heads as published: their arithmetic, whose state they read, and what is refused by name."""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.speculate.draft import MOST_NODES
from baton.engine.speculate.heads.files import Target, packing
from baton.engine.speculate.heads.medusa import GUESSES, Medusa, read_medusa
from baton.kernels.abi import native
from baton.protos.errors import CheckpointError, ConfigError
from baton.protos.nouns import Sampling
from tests.engine.speculate.heads import published
from tests.engine.speculate.texts import Written, greedy

HIDDEN, VOCAB = 64, 192
pytestmark = pytest.mark.skipif(native.library() is None, reason="no native kernels here")


def reference(tensors: dict[str, Tensor], state: Tensor) -> list[Tensor]:
    """Returns by head what the published code computes: ResBlock(x) = x + SiLU(Wx + b), then a linear without
    bias.
    """
    found = []
    for head in range(published.MEDUSA_HEADS):
        x = state
        for at in range(published.MEDUSA_LAYERS):
            x = x + F.silu(x @ tensors[f"{head}.{at}.linear.weight"].T + tensors[f"{head}.{at}.linear.bias"])
        found.append(x @ tensors[f"{head}.{published.MEDUSA_LAYERS}.weight"].T)
    return found


def medusa(directory: Path, dtype: str = "float32") -> Medusa:
    target = Target(HIDDEN, VOCAB, layers=5)
    return Medusa(read_medusa(str(directory), target, packing(dtype, "none")), target.layers)


@pytest.mark.parametrize("names", ["published", "vllm"])
def test_heads_guess_what_the_published_arithmetic_gives(tmp_path: Path, names: str) -> None:
    tensors = published.medusa(tmp_path, HIDDEN, VOCAB, names)
    one, states = medusa(tmp_path), published.drawn(5, 3, HIDDEN)
    assert (one.layers, one.every_row) == ((5,), False)
    texts = [greedy(seq, [1, 2, 3, seq]) for seq in range(3)]
    for text, state in zip(texts, states, strict=True):
        one.saw(text, 2, state[None].numpy())
    one.prepare(texts, 2)
    for text, state in zip(texts, states, strict=True):
        draft = one.propose(text, 9)
        assert draft is not None
        wanted = reference(tensors, state)
        assert list(draft.tokens) == [int(logits.argmax()) for logits in wanted[:2]]
        assert draft.grade == min(7, int(8 * float(wanted[0].softmax(-1).max())))
    for head, wanted in zip(one._heads, reference(tensors, states), strict=True):
        assert torch.allclose(head.logits(states), wanted, atol=1e-5)


def test_where_trees_are_verified_the_likeliest_paths_are_drafted(tmp_path: Path) -> None:
    tensors = published.medusa(tmp_path, HIDDEN, VOCAB)
    one, state, text = medusa(tmp_path), published.drawn(5, 1, HIDDEN), greedy(1, [1, 2, 3])
    one.branches = True
    one.saw(text, 1, state.numpy())
    one.prepare([text], 3)
    draft = one.propose(text, 9)
    assert draft is not None
    tops = [logits.softmax(-1)[0].topk(GUESSES) for logits in reference(tensors, state)]
    every = {
        tuple(int(tops[at].indices[rank]) for at, rank in enumerate(ranks)): float(
            np.prod([float(tops[at].values[rank]) for at, rank in enumerate(ranks)])
        )
        for depth in (1, 2, 3)
        for ranks in itertools.product(range(GUESSES), repeat=depth)
    }
    wanted = sorted(every, key=lambda path: -every[path])[:MOST_NODES]
    assert {tuple(path) for path in draft.paths()} == set(wanted)
    assert draft.chain().tokens[0] == int(tops[0].indices[0])
    shallow = one.propose(text, 1)
    assert shallow is not None
    assert all(len(path) == 1 for path in shallow.paths())
    drawing = Written(2, [1, 2, 3])
    drawing.request = msgspec.structs.replace(drawing.request, sampling=Sampling(temperature=1.0, seed=3))
    one.saw(drawing, 1, state.numpy())
    one.prepare([drawing], 3)
    chain = one.propose(drawing, 3)
    assert chain is not None
    assert (len(chain.tokens), chain.parents) == (3, ()), "a draw is one"


def test_only_the_state_that_chose_the_last_token_is_drafted_from(tmp_path: Path) -> None:
    published.medusa(tmp_path, HIDDEN, VOCAB)
    one, text = medusa(tmp_path), Written(1, [1, 2, 3, 4])
    one.saw(text, 0, np.ones((2, HIDDEN), np.float32))
    one.prepare([text], 3)
    assert one.propose(text, 3) is None
    one.saw(text, 1, np.ones((2, HIDDEN), np.float32))
    one.prepare([text], 3)
    assert one.propose(text, 3) is not None
    one.end(text)
    one.prepare([text], 3)
    assert one.propose(text, 3) is None


def test_other_sizes_pickles_and_missing_tensors_are_refused_by_name(tmp_path: Path) -> None:
    published.medusa(tmp_path / "narrow", 32, VOCAB)
    with pytest.raises(ConfigError, match="for 32 numbers and 192 tokens, the model has 64 and 192"):
        medusa(tmp_path / "narrow")
    published.medusa(tmp_path / "words", HIDDEN, 190)
    with pytest.raises(ConfigError, match="for 64 numbers and 190 tokens"):
        medusa(tmp_path / "words")
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "config.json").write_text('{"medusa_num_heads": 3}')
    (tmp_path / "pickled" / "medusa_lm_head.pt").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"medusa_lm_head\.pt would have to be unpickled"):
        medusa(tmp_path / "pickled")
    published.medusa(tmp_path / "few", HIDDEN, VOCAB)
    (tmp_path / "few" / "config.json").write_text('{"medusa_num_heads": 4, "medusa_num_layers": 2}')
    with pytest.raises(CheckpointError, match=r"tensor 3\.2\.weight is missing"):
        medusa(tmp_path / "few")
