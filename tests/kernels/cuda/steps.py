"""Layers, batches and the shim's library for tests of whole steps on it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from baton.engine.backends.cuda import trial as trials
from baton.engine.backends.cuda.runner import CudaRunner
from baton.engine.backends.native.runner import NativeRunner
from baton.engine.plan import SampleSpec, SequenceStep, StepPlan
from baton.engine.program import ops as p
from baton.engine.program.program import Program, Rope
from baton.kernels.cuda import build
from baton.kernels.cuda.library import CudaLibrary
from baton.kernels.paged_attention.stored import read_layer
from baton.protos.nouns import LayerGroup, Sampling
from tests.kernels.compilers import needs_compiler

STEP_OPS = (
    "cascade_attention",
    "collective",
    "dense",
    "embedding",
    "linear",
    "lm_head",
    "lora",
    "megakernel",
    "moe",
    "paged_attention",
    "prompt_attention",
    "rms_norm",
    "rope_append",
    "step",
    "swiglu",
)
Kind = tuple[int, int] | torch.dtype
DRAWN = Sampling(temperature=0.9, top_p=0.9, seed=5, repetition_penalty=1.2, presence_penalty=0.3)


@needs_compiler()
def simt(extra: tuple[str, ...] = ()) -> CudaLibrary:
    return CudaLibrary(build.simt(STEP_OPS, extra))


def model(heads: int = 4, kv_heads: int = 2, head_dim: int = 32, **rest: Any) -> Program:
    """Its attention is all that counts: the trial makes its own layer of it."""
    group = LayerGroup("full", ("k", "v"), 1, kv_heads, head_dim)
    norms: tuple[str | None, str | None] = ("qn", "kn") if rest.pop("norms", False) else (None, None)
    ops = (
        p.RopeAppend("qkv", 0, *norms, 1e-6, "q"),
        p.PagedAttention("q", 0, rest.pop("window", 0), "out"),
        p.Linear("x", "w", None, "y"),
    )
    return Program(ops, (), (group,), Rope("default", 1e4, {}), heads, kv_heads, head_dim, 64, 512)


def steps(vocab: int, lengths: list[int], sampling: Sampling | None = None, first: int = 0) -> Iterator[StepPlan]:
    """Prompts at once, then a decode of each at a time, of given tokens whatever was chosen."""
    rng = np.random.default_rng(9)
    tokens = [rng.integers(0, vocab, 200).tolist() for _ in lengths]
    tables = np.array_split(rng.permutation(trials.PAGES), len(lengths))
    done = [0] * len(lengths)
    while True:
        items = []
        for i, (at, most) in enumerate(zip(done, lengths, strict=True)):
            end = max(at + 1, most)
            spec = None
            if sampling is not None:
                spec = SampleSpec(sampling, 0, end, tokens[i][:end], most)
            items.append(SequenceStep(first + i, tokens[i][at:end], at, tables[i].tolist(), spec, pool=True))
            done[i] = end
        yield StepPlan(tuple(items))


def pages_agree(cpu: NativeRunner, gpu: CudaRunner, plan: StepPlan) -> bool:
    """Returns whether the host's pages, to which each step writes back, are the same for both runners."""
    program, layout = gpu._program.program, gpu.spec.layout
    mine = gpu._memory.view(trials.PAGES, -1)
    for item in plan.items:
        count = item.start + len(item.tokens)
        pages = torch.tensor(item.pages)[: -(-count // 16)]
        both = [
            read_layer(memory, pages, 0, 1, program.kv_heads, program.head_dim, layout.dtype)
            for memory in (cpu._memory, mine)
        ]
        for want, have in zip(*both, strict=True):
            if not float((have[:count] - want[:count]).norm() / want[:count].norm()) < 1e-2:
                return False
    return True
