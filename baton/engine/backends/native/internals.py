"""Gives speculators access to a native runner's model: states between layers, embeddings, and fewer layers.

Knows nothing of who drafts. A step is run in stretches of ops that end where a state is to be read, which changes
nothing else; without taps it is run as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.engine.backends.native.program import NativeProgram
from baton.engine.backends.span_ops import SEQUENCE_OPS
from baton.engine.plan import ModelSpec, Runner, StepPlan, StepResult
from baton.engine.program.ops import Embedding, LmHead, PredictStreams
from baton.engine.program.program import Program
from baton.engine.program.shallow import first_ops, shallow
from baton.kernels.rms_norm.reference import rms_norm
from baton.kv.layout.page import layout_for
from baton.protos.errors import ConfigError

Stretches = tuple[tuple[int, int], ...]


class NativeInternals:
    """Implements ``Internals`` for a native runner. ``make`` makes a runner of another program on the same
    weights.
    """

    def __init__(
        self, spec: ModelSpec, native: NativeProgram, make: Callable[[Program, ModelSpec], Runner]
    ) -> None:
        self._spec, self._native, self._make = spec, native, make
        self.layers, self.hidden = native.program.layers, native.hidden
        self._taps: tuple[int, ...] = ()
        self._ends: dict[int, int] = {}  # by layer: the number of ops after which its input can be read
        self._every_row = False
        self._cut: tuple[Stretches, Stretches] = (), ()
        self._read: dict[int, Tensor] = {}

    def tap(self, layers: Sequence[int], every_row: bool) -> None:
        """Has later steps return the hidden states before ``layers`` (see ``Internals``). Raises ConfigError for a
        layer without.
        """
        if layers and any(isinstance(op, PredictStreams) for op in self._native.ops):
            text = "speculation: states between layers aren't known for a model with several residual streams"
            raise ConfigError(f"{text}; use prompt_lookup or another that reads none", "speculation")
        ends = {layer: at + 1 for layer, at in enumerate(first_ops(self._native.program))}
        ends[self.layers] = len(self._native.ops)
        if any(layer not in ends for layer in layers):
            text = f"states before layers {tuple(layers)} are wanted, the model has {self.layers} that can be read"
            raise ConfigError(f"speculation: {text}", "speculation")
        self._taps, self._every_row = tuple(layers), every_row
        self._ends = {layer: ends[layer] for layer in layers}
        self._cut = (), ()

    def embeddings(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Returns the rows of the embedding table for ``tokens``, float32 (tokens, hidden)."""
        op = next(op for op in self._native.ops if isinstance(op, Embedding))
        rows = self._native.tables[op.weight][torch.tensor(list(tokens), dtype=torch.long)]
        found: NDArray[np.float32] = (rows.float() * op.scale).numpy()
        return found

    def shallow(self, layers: int) -> Runner:
        """Returns a runner of ``layers`` of the model's layers on the same weights; 0 means half of them. Raises
        ConfigError if that can't be done.
        """
        if (found := next((op for op in self._native.ops if isinstance(op, SEQUENCE_OPS)), None)) is not None:
            text = f"speculation self: it isn't known for a model with {type(found).__name__}; use another"
            raise ConfigError(text, "speculation")
        program, own = shallow(self._native.program, layers or max(2, self.layers // 2)), self._spec.layout
        layout = layout_for(own.dtype, program.groups, fidelity=own.fidelity)
        return self._make(program, msgspec.structs.replace(self._spec, layout=layout))

    # ---- in a step -----------------------------------------------------------------------------------

    @property
    def reads(self) -> bool:
        """Returns whether states are read in a step."""
        return bool(self._taps)

    def stretches(self, whole: Stretches) -> Stretches:
        """Returns ``whole``, ranges of ops, also cut after the ops at which states are read."""
        if not self._taps:
            return whole
        if self._cut[0] != whole or not self._cut[1]:
            ends = sorted(set(self._ends.values()))
            self._cut = whole, tuple(part for begin, end in whole for part in _parts(begin, end, ends))
        return self._cut[1]

    def passed(self, end: int, arena: Tensor, rows: int) -> None:
        """Copies the states that can be read after the first ``end`` ops were run, for a step of ``rows`` rows."""
        for layer, at in self._ends.items():
            if at == end:
                self._read[layer] = self._state(layer, arena, rows)

    def with_states(self, result: StepResult, plan: StepPlan) -> StepResult:
        """Returns ``result`` with the states that were read in the step of ``plan``, by sequence."""
        if not self._read:
            return result
        joined = torch.cat([self._read[layer] for layer in self._taps], -1).numpy()
        self._read = {}
        states, at = dict[int, NDArray[np.float32]](), 0
        for item in plan.items:
            end = at + len(item.tokens)
            wanted = len(item.tokens) if self._every_row else len(item.asks)
            if wanted:
                states[item.seq] = joined[end - wanted : end]
            at = end
        return msgspec.structs.replace(result, states=states)

    def _state(self, layer: int, arena: Tensor, rows: int) -> Tensor:
        x = self._native.register(arena, rows, "x")
        if layer < self.layers:
            return x.clone()
        head = self._native.ops[-1]
        assert isinstance(head, LmHead)
        delta = self._native.register(arena, rows, head.delta)
        found = rms_norm(x.clone(), delta, self._native.vectors[head.norm], head.eps)[1]
        return self._native.head_biases.after_norm(found) / head.scale


def _parts(begin: int, end: int, ends: Sequence[int]) -> list[tuple[int, int]]:
    edges = [begin, *(at for at in ends if begin < at < end), end]
    return list(pairwise(edges))
