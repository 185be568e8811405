"""Computes an encoder's ops for whole texts, by torch and the native matrix product.

Knows nothing of plans or pages. Activations are float32, whatever the weights are, and those of a text don't depend
on the other texts of a call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.program import rope
from baton.engine.program.ops import Activate, Classify, EmbedText, FullAttention, LayerNorm, Linear
from baton.engine.program.program import Program
from baton.kernels.activate.reference import ACTIVATIONS
from baton.kernels.linear.cpu import linear
from baton.kernels.linear.packed import PackedWeight
from baton.kernels.linear.torch_op import parts
from baton.kernels.registry import torch_ops
from baton.kernels.rope_append.reference import rotate
from baton.kernels.step.structs import LINEAR_F32

Registers = dict[str, Tensor]
EncoderOp = Callable[[Registers, Sequence[Tensor]], None]


class EncoderOps:
    """Computes an encoder's program with its weights."""

    def __init__(self, program: Program, weights: Mapping[str, Any]) -> None:
        self._program, self._weights = program, weights
        self._ropes = [rope.frequencies(of, program.head_dim, program.max_position) for of in program.ropes]
        self._steps: list[EncoderOp] = [_BINDERS[type(op)](self, op) for op in program.ops]

    def run(self, texts: Sequence[Tensor]) -> Registers:
        """Returns the registers after the last op, float32, for texts of token ids (int64).

        ``x`` has the hidden states of all tokens, one text after the other; ``score`` one row per text, if the
        program has a classifier.
        """
        registers: Registers = {}
        for step in self._steps:
            step(registers, texts)
        return registers

    def _float(self, name: str | None) -> Tensor | None:
        return None if name is None else self._weights[name].float()

    def _embed(self, op: EmbedText) -> EncoderOp:
        words = self._weights[op.words]
        places, types = (None if name is None else self._weights[name] for name in (op.places, op.types))

        def step(registers: Registers, texts: Sequence[Tensor]) -> None:
            tokens = torch.cat(list(texts))
            found = words[tokens % len(words)].float()
            if types is not None:
                found = found + types[tokens // len(words)].float()
            if places is not None:
                at = torch.cat([torch.arange(len(text)) for text in texts]) + op.first
                found = found + places[at].float()
            registers[op.out] = found

        return step

    def _layer_norm(self, op: LayerNorm) -> EncoderOp:
        weight, bias = self._float(op.weight), self._float(op.bias)
        assert weight is not None

        def step(registers: Registers, texts: Sequence[Tensor]) -> None:
            if op.delta is not None:
                registers[op.x] = registers[op.x] + registers[op.delta]
            registers[op.out] = F.layer_norm(registers[op.x], weight.shape, weight, bias, op.eps)

        return step

    def _linear(self, op: Linear) -> EncoderOp:
        weight, bias = self._weights[op.weight], self._float(op.bias)
        if isinstance(weight, PackedWeight) and weight.kind == LINEAR_F32:
            of = parts(weight)
            return lambda registers, texts: registers.update(
                {op.out: torch_ops().linear(registers[op.x], *of, bias)}
            )
        weight = weight if isinstance(weight, PackedWeight) else weight.float()
        return lambda registers, texts: registers.update({op.out: linear(registers[op.x], weight, bias)})

    def _attend(self, op: FullAttention) -> EncoderOp:
        heads, rope_angles = self._program.heads, None if op.rope is None else self._ropes[op.rope]

        def attend(qkv: Tensor) -> Tensor:
            q, k, v = qkv.unflatten(1, (3, heads, -1)).unbind(1)
            if rope_angles is not None:
                cos, sin = rope.tables(torch.arange(len(q)), *rope_angles, torch.float32)
                q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            mask = _near(len(q), op.window) if 0 < op.window < len(q) else None
            q, k, v = (each.transpose(0, 1)[None] for each in (q, k, v))
            found = F.scaled_dot_product_attention(q, k, v, mask)
            return found[0].transpose(0, 1).flatten(1)

        def step(registers: Registers, texts: Sequence[Tensor]) -> None:
            rows = registers[op.qkv].split([len(text) for text in texts])
            registers[op.out] = torch.cat([attend(each) for each in rows])

        return step

    def _activate(self, op: Activate) -> EncoderOp:
        activation = ACTIVATIONS[op.activation]

        def activate(rows: Tensor) -> Tensor:
            if not op.gated:
                return activation(rows)
            x, gate = rows.chunk(2, -1)
            return activation(x) * gate

        def step(registers: Registers, texts: Sequence[Tensor]) -> None:
            # text by text, because torch computes the last few numbers of a call in another way than the others
            rows = registers[op.x].split([len(text) for text in texts])
            registers[op.out] = torch.cat([activate(each) for each in rows])

        return step

    def _classify(self, op: Classify) -> EncoderOp:
        dense, bias, norm = self._float(op.dense), self._float(op.dense_bias), self._float(op.norm)
        out, out_bias = self._float(op.out), self._float(op.out_bias)
        assert dense is not None
        assert out is not None

        def score(states: Tensor) -> Tensor:
            found = F.linear(states.mean(0) if op.mean else states[0], dense, bias)
            found = ACTIVATIONS[op.activation](found)
            if norm is not None:
                found = F.layer_norm(found, norm.shape, norm, None, op.eps)
            return F.linear(found, out, out_bias)

        def step(registers: Registers, texts: Sequence[Tensor]) -> None:
            rows = registers[op.x].split([len(text) for text in texts])
            registers["score"] = torch.stack([score(each) for each in rows])

        return step


def _near(length: int, window: int) -> Tensor:
    """Returns which keys each query sees, bool (length, length): those within ``window`` tokens on either side."""
    at = torch.arange(length)
    return (at[:, None] - at).abs() <= window


_BINDERS: dict[type, Callable[[EncoderOps, Any], EncoderOp]] = {
    EmbedText: EncoderOps._embed,
    LayerNorm: EncoderOps._layer_norm,
    Linear: EncoderOps._linear,
    FullAttention: EncoderOps._attend,
    Activate: EncoderOps._activate,
    Classify: EncoderOps._classify,
}
