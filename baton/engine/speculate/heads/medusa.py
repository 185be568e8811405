"""Drafts by Medusa heads: each guesses one place further ahead from the target's last hidden state.

Knows nothing of runners or pages. Published checkpoints are read as they are: ``medusa_lm_head.safetensors`` with
``{head}.{block}.linear`` and ``{head}.{blocks}`` (FasterDecoding's and TGI's names), or
``blocks.{head}.layers.{block}`` and ``lm_heads.{head}`` (vLLM's). Source: "Medusa"
(https://arxiv.org/abs/2401.10774); its trees consist of the likeliest paths, by the heads' own probabilities, in
place of a fixed shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.speculate.draft import MOST_DRAFTS, MOST_NODES, Draft, SequenceView, States, StateSpeculator
from baton.engine.speculate.heads.draws import drawn, grades, likeliest_paths, may_branch
from baton.engine.speculate.heads.files import HeadFiles, Matrix, Packing, Target
from baton.kernels.linear.cpu import linear
from baton.protos.errors import ConfigError

NAME = "medusa"
GUESSES = 4  # tokens of one head in a tree
LEAST = 1e-9  # a chance that can be divided by
PREFIXES = ("", "medusa_head.", "medusa_heads.")  # of tensors' names in published files


class MedusaHead(NamedTuple):
    """Holds the weights of one head: residual blocks (matrix, bias), then the matrix to the vocabulary."""

    blocks: tuple[tuple[Matrix, Tensor], ...]
    out: Matrix

    def logits(self, states: Tensor) -> Tensor:
        """Returns the logits (rows, vocab) float32 for the target's normed hidden states (rows, hidden)."""
        x = states
        for weight, bias in self.blocks:
            x = x + F.silu(linear(x, weight, bias))
        return linear(x, self.out)


class Medusa(StateSpeculator):
    """Drafts by Medusa heads from the final hidden states of rows that choose a token; ``layers`` is the target's
    number of layers.
    """

    name = NAME
    every_row = False

    def __init__(self, heads: Sequence[MedusaHead], layers: int) -> None:
        self._heads, self.layers = tuple(heads[:MOST_DRAFTS]), (layers,)
        self._seen: dict[int, tuple[int, Tensor]] = {}
        self._drafts: dict[int, Draft] = {}

    def saw(self, text: SequenceView, first: int, states: States) -> None:
        """Keeps the state of the last position."""
        self._seen[text.seq] = first + len(states) - 1, torch.from_numpy(states[-1].copy())

    def prepare(self, texts: Sequence[SequenceView], budget: int) -> None:
        """Drafts up to ``budget`` tokens, one per head, for each text whose last state is known."""
        ready = [text for text in texts if self._is_current(text)]
        self._drafts = {}
        if not ready:
            return
        with torch.inference_mode():
            states = torch.stack([self._seen[text.seq][1] for text in ready])
            logits = [head.logits(states) for head in self._heads[:budget]]
            columns = [drawn(found, ready, ahead) for ahead, found in enumerate(logits)]
            ranks = grades(logits[0])
            tops = [self._likeliest(found) for found in logits] if self.branches else []
        for row, text in enumerate(ready):
            draft = Draft([column[row] for column in columns], NAME, ranks[row])
            if tops and may_branch(text):
                paths = likeliest_paths([ids[row] for ids, _ in tops], [p[row] for _, p in tops], MOST_NODES)
                draft = Draft.of_paths(paths, NAME, ranks[row])
            self._drafts[text.seq] = draft

    def propose(self, text: SequenceView, budget: int) -> Draft | None:
        """Returns the draft that ``prepare`` made, at most ``budget`` places deep, or None."""
        found = self._drafts.get(text.seq)
        return None if found is None else found.cut(budget)

    def end(self, text: SequenceView) -> None:
        """Forgets the text's state."""
        self._seen.pop(text.seq, None)

    def _likeliest(self, logits: Tensor) -> tuple[list[list[int]], list[list[float]]]:
        """Returns each row's likeliest tokens, and their probabilities."""
        found = logits.softmax(-1).topk(min(GUESSES, logits.shape[-1]), -1)
        return found.indices.tolist(), found.values.clamp_min(LEAST).tolist()

    def _is_current(self, text: SequenceView) -> bool:
        """Returns whether the state kept is that of the token before the last, which chose the last."""
        seen = self._seen.get(text.seq)
        return seen is not None and seen[0] == len(text.tokens) - 2


def read_medusa(model: str, target: Target, pack: Packing) -> list[MedusaHead]:
    """Returns the heads of a published checkpoint. Raises CheckpointError, or ConfigError if they were made for
    another model.
    """
    files = HeadFiles(model)
    count, depth = files.config.size("medusa_num_heads", 5), files.config.count("medusa_num_layers", 1)
    return [_head(files, head, depth, target, pack) for head in range(count)]


def _head(files: HeadFiles, head: int, depth: int, target: Target, pack: Packing) -> MedusaHead:
    out = files.tensor(files.first_of(*_named(f"{head}.{depth}.weight"), *_named(f"lm_heads.{head}.weight")))
    if tuple(out.shape) != (target.vocab, target.hidden):
        text = (
            f"speculation medusa:{files.directory}: its heads are for {out.shape[-1]} numbers and {out.shape[0]} "
            f"tokens, the model has {target.hidden} and {target.vocab}"
        )
        raise ConfigError(f"{text}; take heads that were trained beside this model", "speculation")
    return MedusaHead(tuple(_block(files, head, at, target, pack) for at in range(depth)), pack(out.float()))


def _block(files: HeadFiles, head: int, at: int, target: Target, pack: Packing) -> tuple[Matrix, Tensor]:
    published = _named(f"{head}.{at}.linear.weight")
    name = files.first_of(*published, *_named(f"blocks.{head}.layers.{at}.weight"))
    weight = files.floats(name, target.hidden, target.hidden)
    bias = name.removesuffix("weight") + "bias"
    return pack(weight), files.floats(bias, target.hidden) if bias in files.names else torch.zeros(target.hidden)


def _named(name: str) -> Iterable[str]:
    return tuple(prefix + name for prefix in PREFIXES)
