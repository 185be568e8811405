"""Makes the runner on the engine's own CUDA kernels, if they are available and suitable.

Knows nothing of checkpoints. If there is no library, or the kernels' results differ from the CPU's in a trial on
this GPU, ``kernels_or_none`` and ``on_kernels`` return None, with the reason in the log: the engine then runs
torch's ops on the GPU. On the SIMT shim (tests) there is no trial, because the shim runs on the CPU.
"""

from __future__ import annotations

import logging
import os

import torch
from torch import Tensor

from baton.engine.adapters.base import AdapterBase
from baton.engine.backends.cuda.ahead_trial import ahead_off
from baton.engine.backends.cuda.card_trials import kind_name, load_record
from baton.engine.backends.cuda.gpu import require
from baton.engine.backends.cuda.product_choice import matrices_of, names_by_row
from baton.engine.backends.cuda.products import apply_choices, choices_on
from baton.engine.backends.cuda.runner import AT_ONCE, BY_GRAPH, PLAIN, CudaRunner
from baton.engine.backends.cuda.trial import kind_of, one_layer, random_weights, spec_of, trial
from baton.engine.backends.native.program import Weights
from baton.engine.backends.native.runner import NativeRunner
from baton.engine.config import CudaStep
from baton.engine.plan import ModelSpec
from baton.engine.program.program import Program
from baton.kernels.abi import native
from baton.kernels.abi.build import BuildError
from baton.kernels.cuda.library import CudaLibrary, DeviceError, device, on_shim
from baton.protos.errors import ConfigError
from baton.protos.measurements import EngineWork

log = logging.getLogger("baton.engine")

TORCH = "the GPU runs torch's ops, not the engine's own kernels"
MOST_HEAD_DIM = 256  # numbers of a head that the kernels take at most
SHARED_ENV = "BATON_SHARED_PREFIXES"


def kernels_or_none() -> CudaLibrary | None:
    """Returns the kernel library, prebuilt or built now; None if there is none, with the reason in the log."""
    try:
        return device()
    except BuildError as error:
        log.warning("%s: %s", TORCH, error)
        return None


def lacking(program: Program, kv_dtype: str) -> str:
    """Returns what ``program`` needs that no CUDA kernel computes, in words; empty if there is nothing."""
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
    cuda_step: CudaStep = "graph",
    adapters: AdapterBase | None = None,
) -> CudaRunner | None:
    """Returns a runner on the CUDA kernels, or None if they can't run the model, with the reason in the log.

    bf16 matrices lie row by row, and cuBLASLt multiplies many rows by them, where a trial on the card found that
    faster, unless the megakernel may run, which reads panels. ``plain`` runs without CUDA graphs. By ``cuda_step``,
    small batches go by the megakernel ("mega") or not ("graph"); "auto" compares both before traffic if `baton
    doctor --gpu` found the megakernel right on this card. ``weights`` are in host memory. ``adapters`` has the
    requirements on adapters, if the program is adaptable. Raises ConfigError for "mega" if the megakernel has no
    form for an op.
    """
    how = AT_ONCE if cuda_step == "mega" and not plain else BY_GRAPH
    if (
        said := lacking(program, spec.layout.dtype)
        or wide_experts(program, weights)
        or tried(spec, program, weights, found, how)
    ):
        log.warning("%s: %s", TORCH, said)
        return None
    least = shared_least()
    compares = cuda_step == "auto" and not (plain or least or adapters) and is_right_at_once(program, weights)
    by_row = frozenset() if compares or how == AT_ONCE else rows_taken(program, weights, found)
    how = PLAIN if plain else how
    made = CudaRunner(spec, program, weights, found, work=work, how=how, adapters=adapters, by_row=by_row)
    if how == AT_ONCE and (said := made.misfit()):
        made.close()
        raise ConfigError(f"cuda_step is mega, and the megakernel has no form for {said}; use graph", "cuda_step")
    made.share(least)
    made.shares = True
    if said := "" if on_shim() else tried_ahead(spec, program, weights, found, how):
        made.async_steps = None
        log.warning("steps are planned one after another: %s", said)
    made.warms = not on_shim()
    if compares and not made.misfit():
        said = megakernel_off(spec, program, weights, found)
        made.compares = not said
        if said:
            log.warning("small steps go by graph: by the megakernel, %s", said)
    return made


def megakernel_off(spec: ModelSpec, program: Program, weights: Weights, found: CudaLibrary) -> str:
    """Returns what is wrong with steps by the megakernel on the calling thread's card, run one after another or
    submitted ahead, for layers of the shape of ``program``'s; empty if nothing is, and on the shim.
    """
    return tried(spec, program, weights, found, AT_ONCE) or (
        "" if on_shim() else tried_ahead(spec, program, weights, found, AT_ONCE)
    )


def tried_ahead(spec: ModelSpec, program: Program, weights: Weights, found: CudaLibrary, how: int) -> str:
    """Returns what is wrong with steps that are submitted ahead on the calling thread's card, for layers of the
    shape of ``program``'s; empty if nothing is.
    """
    small = one_layer(program)
    of = random_weights(small, kind_of(program, weights), 1)
    made = CudaRunner(spec_of(small, spec.layout.dtype), small, of, found, how=how)
    try:
        return ahead_off(made)
    finally:
        made.close()


def rows_taken(program: Program, weights: Weights, found: CudaLibrary) -> frozenset[str]:
    """Returns the names of the bf16 weights that are to lie row by row on this process's card, by the choices that
    were kept or are found now; ``found`` is told which products go by cuBLASLt. None on the shim, whose times say
    nothing.
    """
    if on_shim():
        return frozenset()
    try:
        choices = choices_on(require(), found, matrices_of(program, weights))
    except (ConfigError, DeviceError, RuntimeError) as error:
        log.warning("products of many rows are our own: they could not be tried: %s", error)
        return frozenset()
    apply_choices(found, choices)
    return names_by_row(program, weights, choices)


def is_right_at_once(program: Program, weights: Weights) -> bool:
    """Returns whether `baton doctor --gpu` ran the megakernel on this machine's card, with these kernels and such
    weights, and found it right. A kernel whose blocks wait for one another is not tried for the first time in a
    worker, because what it would do if it were wrong is hang.
    """
    try:
        record = load_record(require())
    except ConfigError:
        return False
    return record is not None and record.at_once.get(kind_name(kind_of(program, weights))) == ""


def wide_experts(program: Program, weights: Weights) -> str:
    """Returns an error text if the program has experts whose weights no CUDA kernel takes, because they aren't
    bf16; else an empty one.
    """
    found = (weights[name] for op in program.experts for name in (op.gate_up, op.down))
    if all(isinstance(weight, Tensor) and weight.dtype == torch.bfloat16 for weight in found):
        return ""
    return "experts on a GPU are bf16, and these are not"


def shared_least() -> int:
    """Returns the number of common leading tokens from which on sequences attend to them together, 0 for never
    (from SHARED_ENV). Raises ConfigError.
    """
    text = os.environ.get(SHARED_ENV) or "0"
    if not text.isdecimal() or int(text) > 1 << 30:
        raise ConfigError(
            f"{SHARED_ENV} is {text!r}; give a number of tokens, or unset it to share nothing", SHARED_ENV
        )
    return int(text)


def tried(spec: ModelSpec, program: Program, weights: Weights, found: CudaLibrary, how: int) -> str:
    """Returns what is wrong with the kernels' results on the calling thread's card beside the CPU's, for layers of
    the shape of ``program``'s; empty if nothing is, and on the shim.
    """
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
        return trial(program, weights, spec.layout.dtype, NativeRunner, on_gpu, long=True)
    finally:
        for runner in made:
            runner.close()
