"""Computes EAGLE-3's layer: takes the target's states and the next token's embedding, returns the state for the
token after.

Knows nothing of sequences' texts or of runners. Source: "EAGLE-3" (https://arxiv.org/abs/2503.01840). Published
checkpoints are read as they are: ``midlayer.*`` or ``layers.0.*``, ``fc``, ``norm``, ``lm_head``, ``d2t`` (the
target's id of a drafted token minus its own id), and ``embed_tokens`` unless the target's is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from baton.engine.program.rope import RopeTables
from baton.engine.speculate.heads.files import HeadFiles, Packing, Target
from baton.kernels.linear.cpu import linear
from baton.kernels.rms_norm.reference import rms_norm
from baton.protos.errors import ConfigError

NAME = "eagle3"
LAYERS = ("midlayer.", "layers.0.")  # how published files name the one layer
STATES = 3  # of the target that are joined: a low one, a middle one and a high one
MOST_POSITION = 1 << 18  # positions that rotary tables are made for, where config.json says less
Embed = Callable[[Sequence[int]], NDArray[np.float32]]


class Eagle3Sizes(NamedTuple):
    """Holds the layer's sizes."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int  # tokens that it can draft
    eps: float
    norms_residual: bool  # the residual is the normed state


class Rows:
    """Holds the layer's keys and values of one text's positions from ``base`` on, (2, positions, kv_heads,
    head_dim).
    """

    def __init__(self, base: int, sizes: Eagle3Sizes) -> None:
        self.base, self.count = base, 0
        self._kv = torch.empty((2, 64, sizes.kv_heads, sizes.head_dim))

    @property
    def end(self) -> int:
        """Returns the position after the last one."""
        return self.base + self.count

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Adds the keys and values (rows, kv_heads, head_dim) of the next positions."""
        end = self.count + len(keys)
        while end > self._kv.shape[1]:
            self._kv = torch.cat((self._kv, torch.empty_like(self._kv)), 1)
        self._kv[0, self.count : end], self._kv[1, self.count : end] = keys, values
        self.count = end

    def seen(self) -> tuple[Tensor, Tensor]:
        """Returns all keys and all values, each (positions, kv_heads, head_dim)."""
        return self._kv[0, : self.count], self._kv[1, : self.count]

    def cut(self, count: int) -> None:
        """Forgets all but the first ``count`` positions."""
        self.count = count

    def forget_old(self, keep: int) -> None:
        """Forgets all but the last ``keep`` positions, once there are twice as many."""
        if self.count >= 2 * keep:
            self._kv = self._kv[:, self.count - keep : self.count].clone()
            self.base, self.count = self.end - keep, keep


class LayerInput(NamedTuple):
    """Names consecutive positions of one text: ``states`` (positions, hidden) and, for each, the token that
    follows.
    """

    rows: Rows
    states: Tensor
    tokens: Sequence[int]


class Eagle3Layer:
    """Holds the weights of an EAGLE-3 checkpoint, which must fit ``target``. Raises CheckpointError or ConfigError.

    ``layers`` are the target's layers whose inputs it reads; ``ids`` maps its own token ids to the target's.
    ``embed`` looks up the target's embeddings, ``pack`` says how matrices are kept.
    """

    def __init__(self, files: HeadFiles, target: Target, embed: Embed, pack: Packing) -> None:
        self._files = files
        self.sizes = _sizes(files, target)
        self.layers = _layers(files, target)
        own = "embed_tokens.weight"
        self._embed = _table(files.floats(own, target.vocab, self.sizes.hidden)) if own in files.names else embed
        self._require_embeddings(target, own in files.names)
        self._read(target, pack)
        self.ids = _ids(files, self.sizes.vocab, target)
        rope, most = files.config.rope(), files.config.size("max_position_embeddings", MOST_POSITION)
        self._rope_angles = RopeTables((rope,), self.sizes.head_dim, most)

    def joined(self, states: Tensor) -> Tensor:
        """Returns the target's states, side by side (rows, 3 x the target's hidden size), projected to (rows,
        hidden).
        """
        return linear(states, self._fc)

    def forward(self, inputs: Sequence[LayerInput]) -> Tensor:
        """Returns the layer's output states (rows, hidden), and appends keys and values to each input's
        ``rows``.
        """
        tokens = [token for layer_input in inputs for token in layer_input.tokens]
        embedded = torch.from_numpy(self._embed(tokens))
        states = torch.cat([layer_input.states for layer_input in inputs])
        normed = self._normed(states, "hidden_norm")
        both = torch.cat((self._normed(embedded, "input_layernorm"), normed), -1)
        residual = (normed if self.sizes.norms_residual else states) + self._attended(both, inputs)
        gate, up = linear(self._normed(residual, "post_attention_layernorm"), self._gate_up).chunk(2, -1)
        return residual + linear(F.silu(gate) * up, self._down)

    def logits(self, states: Tensor) -> Tensor:
        """Returns the logits (rows, draft vocabulary) of output states of the layer."""
        return linear(self._normed(states, "norm"), self._head)

    def full(self, logits: Tensor, vocab: int) -> Tensor:
        """Returns ``logits`` by the target's token ids, (rows, vocab); tokens that can't be drafted get -inf."""
        found = torch.full((len(logits), vocab), -torch.inf)
        found[:, self.ids] = logits
        return found

    def _attended(self, both: Tensor, inputs: Sequence[LayerInput]) -> Tensor:
        s, at, found = self.sizes, 0, []
        qkv = linear(both, self._qkv).view(len(both), -1, s.head_dim)
        for layer_input in inputs:
            own = qkv[at : at + len(layer_input.tokens)]
            at += len(own)
            start = layer_input.rows.end
            [(cos, sin)] = self._rope_angles.of(torch.arange(start, start + len(own)), torch.float32)
            q, k, v = own.split((s.heads, s.kv_heads, s.kv_heads), 1)
            layer_input.rows.append(_rotated(k, cos, sin), v)
            found.append(_attention(_rotated(q, cos, sin), *layer_input.rows.seen()))
        return linear(torch.cat(found).flatten(1), self._o)

    def _normed(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, None, self._norms[name], self.sizes.eps)[1]

    def _require_embeddings(self, target: Target, own: bool) -> None:
        if not own and self.sizes.hidden != target.hidden:
            text = f"it has no embed_tokens, and the model's have {target.hidden} numbers"
            raise _foreign(self._files, f"hidden_size is {self.sizes.hidden}, {text}")

    def _read(self, target: Target, pack: Packing) -> None:
        files, s = self._files, self.sizes
        prefix = next((p for p in LAYERS if f"{p}hidden_norm.weight" in files.names), LAYERS[0])

        def matrix(name: str, rows: int, width: int) -> Tensor:
            return files.floats(f"{prefix}{name}.weight", rows, width)

        attention, inner = "self_attn.", files.config.size("intermediate_size")
        q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
        parts = [matrix(f"{attention}{n}_proj", r, 2 * s.hidden) for n, r in (("q", q), ("k", kv), ("v", kv))]
        self._qkv = pack(torch.cat(parts))
        self._o = pack(matrix(f"{attention}o_proj", s.hidden, q))
        self._gate_up = pack(torch.cat([matrix(f"mlp.{n}_proj", inner, s.hidden) for n in ("gate", "up")]))
        self._down = pack(matrix("mlp.down_proj", s.hidden, inner))
        fc = files.tensor("fc.weight")
        if tuple(fc.shape) != (s.hidden, STATES * target.hidden):
            raise _foreign(
                files, f"fc takes {fc.shape[-1]} numbers, {STATES} states of the model {target.hidden} each"
            )
        self._fc, self._head = pack(fc.float()), pack(files.floats("lm_head.weight", s.vocab, s.hidden))
        norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
        self._norms = {n: files.floats(f"{prefix}{n}.weight", s.hidden) for n in norms}
        self._norms["norm"] = files.floats("norm.weight", s.hidden)


def _sizes(files: HeadFiles, target: Target) -> Eagle3Sizes:
    config = files.config
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    config.must_be("num_hidden_layers", 1)
    config.must_be("attention_bias", False)
    if (vocab := config.size("vocab_size", target.vocab)) != target.vocab:
        raise _foreign(files, f"vocab_size is {vocab}, the model has {target.vocab} tokens")
    return Eagle3Sizes(
        hidden,
        heads,
        config.size("num_key_value_heads", heads),
        config.size("head_dim", hidden // heads),
        config.size("draft_vocab_size", vocab),
        config.number("rms_norm_eps", 1e-6),
        config.flag("norm_before_residual", False),
    )


def _layers(files: HeadFiles, target: Target) -> tuple[int, ...]:
    """Returns the target's layers whose inputs are read: as the checkpoint says, else as in the paper."""
    said = files.config.fields.get("eagle_config") or files.config.fields
    found = said.get("eagle_aux_hidden_state_layer_ids") if isinstance(said, dict) else None
    layers = tuple(found) if isinstance(found, list) else (2, target.layers // 2, target.layers - 3)
    if len(layers) != STATES or any(not isinstance(at, int) or not 0 <= at <= target.layers for at in layers):
        raise _foreign(files, f"it looks at layers {layers}, the model has {target.layers}")
    return layers


def _ids(files: HeadFiles, count: int, target: Target) -> Tensor:
    """Returns the target's id of each token that can be drafted."""
    own = torch.arange(count)
    if "d2t" in files.names:
        offsets = files.tensor("d2t")
        if tuple(offsets.shape) != (count,) or offsets.is_floating_point():
            raise files.error("d2t", f"is {offsets.dtype} {tuple(offsets.shape)}; {count} whole numbers are needed")
        own = own + offsets.long()
    if len(own) and not 0 <= int(own.min()) <= int(own.max()) < target.vocab:
        raise _foreign(files, f"d2t names tokens beyond the model's {target.vocab}")
    return own


def _foreign(files: HeadFiles, problem: str) -> ConfigError:
    text = f"speculation eagle3:{files.directory}: {problem}"
    return ConfigError(f"{text}; take heads that were trained beside this model", "speculation")


def _table(table: Tensor) -> Embed:
    return lambda tokens: table[torch.tensor(list(tokens))].numpy()


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates x (rows, heads, head_dim), halves as pairs; ``cos`` and ``sin`` (rows, 1, head_dim), sin's first half
    negated.
    """
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((high, low), -1) * sin


def _attention(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Returns (rows, heads, head_dim): the last rows of ``keys`` are q's own, and each sees those up to its own."""
    rows, heads, width = q.shape
    k, v = (x.repeat_interleave(heads // x.shape[1], 1).transpose(0, 1) for x in (keys, values))
    scores = q.transpose(0, 1) @ k.transpose(1, 2) / math.sqrt(width)
    mask = torch.ones(rows, len(keys), dtype=torch.bool).triu(len(keys) - rows + 1)
    weights = scores.masked_fill(mask, -torch.inf).softmax(-1)
    return (weights @ v).transpose(0, 1)
