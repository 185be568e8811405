"""Makes the runner on the engine's own CUDA kernels, where they can be had and do.

Knows nothing of checkpoints. Where there is no library, or the kernels don't answer as the CPU's do in a trial on
this very card, ``kernels_or_none`` and ``on_kernels`` return None, and why is in the log: the engine then runs
torch's ops on the GPU. On the SIMT shim (tests) nothing is tried: the shim is no other device.
"""

from __future__ import annotations

import logging
import os

import torch
from torch import Tensor

from baton.engine.backends.cuda.runner import AT_ONCE, BY_GRAPH, PLAIN, CudaRunner
from baton.engine.backends.cuda.trial import trial
from baton.engine.backends.native.program import Weights
from baton.engine.backends.native.runner import NativeRunner
from baton.engine.plan import ModelSpec
from baton.engine.program.program import Program
from baton.kernels.abi import native
from baton.kernels.abi.build import BuildError
from baton.kernels.cuda.library import CudaLibrary, device, on_shim
from baton.protos.errors import ConfigError
from baton.protos.nouns import EngineWork

log = logging.getLogger("baton.engine")

TORCH = "the GPU runs torch's ops, not the engine's own kernels"
MOST_HEAD_DIM = 256
SHARED_ENV = "BATON_SHARED_PREFIXES"


def kernels_or_none() -> CudaLibrary | None:
    """Returns the library, prebuilt or built now, or None where there is none, which the log says."""
    try:
        return device()
    except BuildError as error:
        log.warning("%s: %s", TORCH, error)
        return None


def lacking(program: Program, kv_dtype: str) -> str:
    """Returns in words what ``program`` asks that no kernel does; empty where there is nothing."""
    if program.forms:
        return f"this architecture needs {', '.join(program.forms)}, which no CUDA kernel computes yet"
    if kv_dtype == "float32":
        return "attention reads KV as bf16, int8 or fp8, and this is float32"
    step = 8 if kv_dtype == "bfloat16" else 16
    if program.head_dim % step or program.head_dim > MOST_HEAD_DIM:
        wanted = f"a head size that is a multiple of {step}, up to {MOST_HEAD_DIM}"
        return f"attention over {kv_dtype} KV needs {wanted}, and this is {program.head_dim}"
    return ""


def on_kernels(
    spec: ModelSpec,
    program: Program,
    weights: Weights,
    found: CudaLibrary,
    work: EngineWork | None = None,
    plain: bool = False,
    mega: bool = False,
) -> CudaRunner | None:
    """Returns a runner on the CUDA kernels, or None where they don't do, which the log says.

    ``plain`` runs without graphs, ``mega`` small batches by the megakernel. Weights lie on the host. Raises
    ConfigError where the megakernel is asked for and has no form for an op.
    """
    how = AT_ONCE if mega and not plain else BY_GRAPH
    if (
        said := lacking(program, spec.layout.dtype)
        or wide_experts(program, weights)
        or _tried(spec, program, weights, found, how)
    ):
        log.warning("%s: %s", TORCH, said)
        return None
    least = shared_least()
    made = CudaRunner(spec, program, weights, found, work=work, how=PLAIN if plain else how)
    if how == AT_ONCE and (said := made.misfit()):
        made.close()
        raise ConfigError(f"cuda_step is mega, and the megakernel has no form for {said}; use graph", "cuda_step")
    made.share(least)
    made.shares = True
    return made


def wide_experts(program: Program, weights: Weights) -> str:
    """Returns in words which weights no kernel for experts takes; empty where there are none."""
    found = (weights[name] for op in program.experts for name in (op.gate_up, op.down))
    if all(isinstance(weight, Tensor) and weight.dtype == torch.bfloat16 for weight in found):
        return ""
    return "experts on a GPU are bf16, and these are not"


def shared_least() -> int:
    """Returns from how many common tokens on sequences are attended together, 0 for never. Raises
    ConfigError.
    """
    text = os.environ.get(SHARED_ENV) or "0"
    if not text.isdecimal() or int(text) > 1 << 30:
        raise ConfigError(
            f"{SHARED_ENV} is {text!r}; give a number of tokens, or unset it to share nothing", SHARED_ENV
        )
    return int(text)


def _tried(spec: ModelSpec, program: Program, weights: Weights, found: CudaLibrary, how: int) -> str:
    if on_shim():
        return ""
    if native.library() is None:
        return "there are no native CPU kernels to try them against: install a C++ compiler"
    made: list[CudaRunner] = []

    def on_gpu(spec: ModelSpec, program: Program, weights: Weights) -> CudaRunner:
        made.append(CudaRunner(spec, program, weights, found))
        if how == AT_ONCE and not made[-1].misfit():
            made[-1].how = AT_ONCE
        return made[-1]

    try:
        return trial(program, weights, spec.layout.dtype, NativeRunner, on_gpu)
    finally:
        for runner in made:
            runner.close()
