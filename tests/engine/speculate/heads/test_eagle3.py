"""Tests EAGLE-3 as published: its arithmetic over a whole text, drafts after any acceptance, what is refused by
name.
"""

from __future__ import annotations

import math
import random
from pathlib import Path

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.speculate.heads import eagle3 as eagle3_module
from baton.engine.speculate.heads.eagle3 import Eagle3
from baton.engine.speculate.heads.eagle3_layer import Eagle3Layer
from baton.engine.speculate.heads.files import HeadFiles, Target, packing
from baton.kernels.abi import native
from baton.protos.errors import CheckpointError, ConfigError
from baton.protos.nouns import Sampling
from tests.engine.speculate.heads import published
from tests.engine.speculate.texts import Written, greedy

HIDDEN, VOCAB, LAYERS = 64, 192, 8
TABLE = published.drawn(77, VOCAB, HIDDEN)
TARGET = Target(HIDDEN, VOCAB, LAYERS)
pytestmark = pytest.mark.skipif(native.library() is None, reason="no native kernels here")


class Reference:
    """The published code's arithmetic without a cache: one pass over all positions for each token."""

    def __init__(self, tensors: dict[str, Tensor], table: Tensor, heads: int = 4, kv: int = 2, width: int = 16):
        self.t, self.table = tensors, table
        self.heads, self.kv, self.width = heads, kv, width

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.t[f"{name}.weight"]

    def rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        inverse = 1.0 / 10000.0 ** (torch.arange(0, self.width, 2) / self.width)
        angles = torch.cat((positions[:, None] * inverse,) * 2, -1)[:, None]
        low, high = x.chunk(2, -1)
        return x * angles.cos() + torch.cat((-high, low), -1) * angles.sin()

    def layer(self, embedded: Tensor, states: Tensor, first: int) -> Tensor:
        t, rows = self.t, len(states)
        positions = torch.arange(first, first + rows)
        both = torch.cat(
            (self.norm(embedded, "midlayer.input_layernorm"), self.norm(states, "midlayer.hidden_norm")), -1
        )
        q, k, v = (
            (both @ t[f"midlayer.self_attn.{name}_proj.weight"].T).view(rows, -1, self.width) for name in "qkv"
        )
        q, k = self.rotated(q, positions), self.rotated(k, positions)
        k, v = (x.repeat_interleave(self.heads // self.kv, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(self.width)
        weights = (scores + torch.full((rows, rows), -torch.inf).triu(1)).softmax(-1)
        attended = torch.einsum("hqk,khd->qhd", weights, v).flatten(1)
        x = states + attended @ t["midlayer.self_attn.o_proj.weight"].T
        m = self.norm(x, "midlayer.post_attention_layernorm")
        gate, up = (m @ t[f"midlayer.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        return x + (F.silu(gate) * up) @ t["midlayer.mlp.down_proj.weight"].T

    def drafts(self, tokens: list[int], states: Tensor, count: int, first: int = 0) -> list[int]:
        """``states`` (tokens - 1, 3 x hidden) of the target from ``first`` on; each pairs with the next token."""
        given, found = states @ self.t["fc.weight"].T, list[int]()
        while len(found) < count:
            behind = [*tokens[first + 1 :], *found]
            out = self.layer(self.table[torch.tensor(behind)], given, first)
            given = torch.cat((given, out[-1:]))
            draft = int((self.norm(out[-1:], "norm") @ self.t["lm_head.weight"].T).argmax())
            found.append(draft + int(self.t["d2t"][draft]))
        return found


def eagle(directory: Path, dtype: str = "float32") -> Eagle3:
    def embed(tokens):
        return TABLE[torch.tensor(list(tokens))].numpy()

    return Eagle3(Eagle3Layer(HeadFiles(str(directory)), TARGET, embed, packing(dtype, "none")), VOCAB)


def states_of(tokens: list[int]) -> Tensor:
    """Returns made-up states of a target, each depending on its position's token and all before it."""
    rows = [published.drawn(sum(tokens[: at + 1]) * 31 + at, 3 * HIDDEN) * 8 for at in range(len(tokens))]
    return torch.stack(rows)


@pytest.mark.parametrize("own_table", [False, True])
def test_drafts_are_the_published_arithmetics_after_any_acceptance(tmp_path: Path, own_table: bool) -> None:
    tensors = published.eagle3(tmp_path, HIDDEN, VOCAB, own_table)
    reference = Reference(tensors, tensors.get("embed_tokens.weight", TABLE))
    one, rng = eagle(tmp_path), random.Random(3)
    assert (one.layers, one.every_row) == ((2, 4, 5), True)
    texts = [greedy(seq, rng.choices(range(VOCAB), k=5 + 9 * seq)) for seq in range(3)]
    for text in texts:  # prompts in two chunks: of each position but the last token's
        states = states_of(text.tokens[:-1]).numpy()
        one.saw(text, 0, states[:4])
        one.saw(text, 4, states[4:]) if len(states) > 4 else None
    for taken in (0, 3, 1, 2):
        one.prepare(texts, 3)
        for text in texts:
            draft = one.propose(text, 3)
            assert draft is not None
            assert list(draft.tokens) == reference.drafts(text.tokens, states_of(text.tokens[:-1]), 3)
            before = len(text.tokens) - 1
            text.tokens += [*list(draft.tokens)[:taken], rng.randrange(VOCAB)]
            one.saw(text, before, states_of(text.tokens[:-1]).numpy()[before:])


def test_where_trees_are_verified_second_and_third_guesses_stand_beside_the_chain(tmp_path: Path) -> None:
    tensors = published.eagle3(tmp_path, HIDDEN, VOCAB)
    one, text = eagle(tmp_path), greedy(1, list(range(20)))
    one.branches = True
    states = states_of(text.tokens[:-1])
    one.saw(text, 0, states.numpy())
    one.prepare([text], 3)
    draft = one.propose(text, 3)
    assert draft is not None
    chain = Reference(tensors, TABLE).drafts(text.tokens, states, 3)
    assert list(draft.chain().tokens) == chain
    paths = draft.paths()
    assert len(paths) == 3 * eagle3_module.GUESSES
    assert all(path[:-1] == chain[: len(path) - 1] for path in paths)
    one.prepare([text], 3)
    assert one.propose(text, 3) == draft, "guesses are forgotten with their draft"


def test_a_gap_begins_anew_and_what_is_not_current_is_not_drafted(tmp_path: Path) -> None:
    tensors = published.eagle3(tmp_path, HIDDEN, VOCAB)
    one, text = eagle(tmp_path), greedy(1, list(range(20)))
    one.saw(text, 0, states_of(text.tokens[:8]).numpy())
    one.prepare([text], 2)
    assert one.propose(text, 2) is None
    late = states_of(text.tokens[:-1])[12:]
    one.saw(text, 12, late.numpy())
    one.prepare([text], 2)
    draft = one.propose(text, 2)
    assert draft is not None
    assert list(draft.tokens) == Reference(tensors, TABLE).drafts(text.tokens, late, 2, first=12)
    one.end(text)
    assert not one._known


def test_a_long_text_keeps_bounded_keys_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eagle3_module, "KEEP", 16)
    published.eagle3(tmp_path, HIDDEN, VOCAB)
    one, text = eagle(tmp_path), greedy(1, [1, 2])
    for _ in range(100):
        one.saw(text, len(text.tokens) - 2, states_of(text.tokens[-3:-1]).numpy()[-1:])
        one.prepare([text], 2)
        assert one.propose(text, 2) is not None
        text.tokens.append(5)
    rows = one._known[1].rows
    assert 16 <= rows.count < 32
    assert rows.end == len(text.tokens) - 2


def test_states_that_nobody_asks_about_do_not_pile_up(tmp_path: Path) -> None:
    tensors = published.eagle3(tmp_path, HIDDEN, VOCAB)
    one, text = eagle(tmp_path), greedy(1, [1, 2])
    for at in range(200):
        one.saw(text, at, states_of(text.tokens[at : at + 1]).numpy())
        text.tokens.append((7 * at) % VOCAB)
        assert one._known[1].waiting <= eagle3_module.MOST_WAITING + 1
    states = torch.cat([states_of(text.tokens[at : at + 1]) for at in range(200)])
    text.tokens = text.tokens[:201]
    one.prepare([text], 2)
    draft = one.propose(text, 2)
    assert draft is not None
    assert list(draft.tokens) == Reference(tensors, TABLE).drafts(text.tokens, states, 2)


def test_a_sampled_text_is_drafted_by_its_positions_own_number(tmp_path: Path) -> None:
    published.eagle3(tmp_path, HIDDEN, VOCAB)
    found = []
    for seed in (1, 1, 2):
        one, text = eagle(tmp_path), Written(1, list(range(10)))
        text.request = msgspec.structs.replace(text.request, sampling=Sampling(temperature=1.5, seed=seed))
        one.saw(text, 0, states_of(text.tokens[:-1]).numpy())
        one.prepare([text], 6)
        draft = one.propose(text, 6)
        assert draft is not None
        assert all(token % 2 == 0 for token in draft.tokens)  # of the draft's own vocabulary
        found.append(list(draft.tokens))
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize(
    ("fields", "error", "named"),
    [
        ({"vocab_size": 100, "draft_vocab_size": 50}, ConfigError, "vocab_size is 100, the model has 192 tokens"),
        ({"hidden_size": 32}, ConfigError, "hidden_size is 32, it has no embed_tokens"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, ConfigError, r"layers \(1, 2, 9\), the model has 8"),
        ({"num_hidden_layers": 2}, CheckpointError, "num_hidden_layers"),
        ({"rms_norm_eps": "x"}, CheckpointError, "rms_norm_eps"),
    ],
)
def test_layers_of_another_model_are_refused_by_name(tmp_path: Path, fields, error, named: str) -> None:
    published.eagle3(tmp_path, HIDDEN, VOCAB, **{k: v for k, v in fields.items() if k != "num_hidden_layers"})
    if "num_hidden_layers" in fields:
        config = tmp_path / "config.json"
        config.write_text(config.read_text().replace('"num_hidden_layers": 1', '"num_hidden_layers": 2'))
    with pytest.raises(error, match=named):
        eagle(tmp_path)


def test_a_layer_that_takes_other_states_is_refused_by_name(tmp_path: Path) -> None:
    published.eagle3(tmp_path, 48, VOCAB, own_table=True, hidden_size=64)
    with pytest.raises(ConfigError, match="fc takes 144 numbers, 3 states of the model 64 each"):
        eagle(tmp_path)
