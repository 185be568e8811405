"""Llama models with random weights, made in memory; an engine's speed doesn't depend on the weights' values.

Knows nothing of measuring.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from baton.engine.adapters.base import AdapterBase
from baton.engine.backends.native.runner import NativeRunner, NativeStep
from baton.engine.config import KV_NAMES
from baton.engine.models import program_for
from baton.engine.plan import ModelSpec
from baton.engine.program.config import ModelConfig
from baton.engine.program.ops import Linear, LmHead
from baton.engine.program.program import Program
from baton.engine.program.sites import adaptable, sites_of
from baton.engine.quant import on_load
from baton.kernels.linear.packed import PackedWeight, beside, pack_bf16
from baton.kv.layout.page import layout_for
from baton.protos.json import Json

SIZES: dict[str, Json] = {
    "150M": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12,
             "num_key_value_heads": 4, "vocab_size": 32000},
    "0.5B": {"hidden_size": 1280, "intermediate_size": 3456, "num_hidden_layers": 24, "num_attention_heads": 20,
             "num_key_value_heads": 4, "vocab_size": 32000},
}  # fmt: skip
EXPERTS: dict[str, Json] = {  # 8 experts, of which a token takes 2: some 170M of 400M weights
    "8x50M": {"model_type": "mixtral", "hidden_size": 768, "intermediate_size": 1792, "num_hidden_layers": 12,
              "num_attention_heads": 12, "num_key_value_heads": 4, "vocab_size": 32000, "num_local_experts": 8,
              "num_experts_per_tok": 2, "sliding_window": None},
}  # fmt: skip
CONTEXT = 8192  # tokens that the random model admits, because no bench needs a longer sequence


def random_runner(
    size: str,
    scheme: str,
    kv: str,
    by_ops: bool = False,
    native_step: NativeStep | None = None,
    max_rank: int = 0,
) -> tuple[NativeRunner, int]:
    """Returns a runner with random weights and no pages bound, and the bytes of weights that a decode step reads.

    ``size`` is one of SIZES, ``scheme`` "bf16" or a quantization on load, ``kv`` a KV dtype. ``by_ops`` and
    ``native_step`` are those of ``NativeRunner``. Adapters up to rank ``max_rank`` are supported; 0 for none.
    """
    program, weights, read = random_weights(size, scheme)
    base = None
    if max_rank:
        program = adaptable(program)
        base = AdapterBase(sites_of(program), max_rank, 1 << 30)
    layout = layout_for(KV_NAMES[kv], program.groups)
    spec = ModelSpec("random", layout, CONTEXT, program.vocab_size, ())
    return NativeRunner(spec, program, weights, by_ops=by_ops, native_step=native_step, adapters=base), read


def random_weights(size: str, scheme: str) -> tuple[Program, dict[str, Tensor | PackedWeight], int]:
    """Returns the program of ``size``, of SIZES or EXPERTS, random weights in ``scheme``, and the bytes of packed
    ones, which a decode step reads.
    """
    fields = {"model_type": "llama", "max_position_embeddings": CONTEXT} | (SIZES | EXPERTS)[size]
    program = program_for(ModelConfig(Path("random"), fields, ()))
    torch.manual_seed(0)
    return program, *_weights(program, scheme)


def _weights(program: Program, scheme: str) -> tuple[dict[str, Tensor | PackedWeight], int]:
    linear = {op.weight for op in program.ops if isinstance(op, Linear)}
    head = next(op.weight for op in program.ops if isinstance(op, LmHead))
    experts = {name: op.experts for op in program.experts for name in (op.gate_up, op.down)}
    found: dict[str, Tensor | PackedWeight] = {}
    for weight in program.weights:
        shape = (sum(part[0] for part in weight.shapes), *weight.shapes[0][1:])
        value: Any = torch.randn(shape) * 0.02 if len(shape) == 2 else torch.ones(shape)
        if weight.name in experts and scheme != "bf16":
            value = beside([_packed(one, scheme, head=False) for one in value.chunk(experts[weight.name])])
        elif weight.name in linear or weight.name == head:
            value = _packed(value, "bf16" if weight.name in program.routers else scheme, weight.name == head)
        found[weight.name] = value.bfloat16() if isinstance(value, torch.Tensor) and value.dim() == 2 else value
    return found, sum(weight.nbytes for weight in found.values() if isinstance(weight, PackedWeight))


def _packed(value: torch.Tensor, scheme: str, head: bool) -> PackedWeight:
    if scheme == "bf16":
        return pack_bf16(value)
    module = on_load(scheme)
    return module.pack_head(value) if head else module.pack(value)
