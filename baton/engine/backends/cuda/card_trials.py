"""Tries a whole card: the step's trial for each kind of weights, and single ops; the results are kept in a file.

Knows nothing of checkpoints or of who asks. A record is of one card, driver and set of kernel sources: for another
there is none.
"""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

import msgspec
import torch

from baton.engine.backends.cuda.ahead_trial import ahead_off
from baton.engine.backends.cuda.device_ops import ON_A_CARD, ON_THE_SHIM, TrialSizes
from baton.engine.backends.cuda.gpu import Gpu
from baton.engine.backends.cuda.op_trials import OpTrial, Tell, try_ops
from baton.engine.backends.cuda.runner import AT_ONCE, BY_GRAPH, CudaRunner
from baton.engine.backends.cuda.trial import one_layer, random_weights, spec_of, trial
from baton.engine.backends.native.program import Weights
from baton.engine.backends.native.runner import NativeRunner
from baton.engine.plan import ModelSpec
from baton.engine.program import ops as p
from baton.engine.program.program import Program, Rope
from baton.kernels.abi.build import cache_dir
from baton.kernels.cuda.build import prebuilt_name
from baton.kernels.cuda.library import CudaLibrary
from baton.protos.nouns import LayerGroup

KINDS: dict[str, torch.dtype | tuple[int, int]] = {"bf16": torch.bfloat16, "int8": (8, 0), "int4": (4, 32)}
HEADS, ON_SHIM_HEADS = (8, 2, 128), (4, 2, 16)  # query heads, KV heads, head size


class CardTrials(msgspec.Struct, frozen=True):
    """Holds what was measured on a card, at Unix seconds ``at``.

    ``steps`` has by kind of weights what was wrong with the step, "" for nothing; ``at_once`` the same of the step
    by the megakernel, and ``ahead`` of steps that are submitted before the one in front was looked at.
    """

    card: str
    at: float
    steps: dict[str, str]
    ops: tuple[OpTrial, ...]
    at_once: dict[str, str] = {}
    ahead: dict[str, str] = {}


def run_trials(gpu: Gpu, library: CudaLibrary, shim: bool = False, tell: Tell = lambda _: None) -> CardTrials:
    """Returns the trials of this machine's card, or of the shim. ``tell`` is called with the name of each before it
    runs, so that one that hangs is known. Raises DeviceError where a launch fails.
    """
    sizes: TrialSizes = ON_THE_SHIM if shim else ON_A_CARD
    ops = try_ops(library, "cpu" if shim else "cuda", sizes, tell)
    steps, ahead = dict[str, str](), dict[str, str]()
    for kind, weights in KINDS.items():
        tell(f"the step with {kind} weights")
        steps[kind] = _step(library, weights, shim, BY_GRAPH)
        tell(f"steps planned ahead with {kind} weights")
        ahead[kind] = _ahead(library, weights, shim)
    return CardTrials(gpu.name, time.time(), steps, tuple(ops), ahead=ahead)


def with_megakernel(
    found: CardTrials, library: CudaLibrary, shim: bool = False, tell: Tell = lambda _: None
) -> CardTrials:
    """Returns ``found`` with what was wrong with steps by the megakernel. Its blocks wait for one another, so what
    is wrong may be that it doesn't end: keep ``found`` before.
    """
    tried = {}
    for kind, weights in KINDS.items():
        tell(f"the megakernel with {kind} weights")
        tried[kind] = _step(library, weights, shim, AT_ONCE)
    return msgspec.structs.replace(found, at_once=tried)


def kind_name(kind: torch.dtype | tuple[int, int]) -> str:
    """Returns the name by which a record has a kind of weights, whatever their groups; "" if it has none."""
    if isinstance(kind, torch.dtype):
        return "bf16" if kind == torch.bfloat16 else ""
    return {8: "int8", 4: "int4"}.get(kind[0], "")


def save_record(found: CardTrials, gpu: Gpu) -> Path:
    """Writes the record and returns its path. Raises OSError."""
    path = _path(gpu)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(found)))
    return path


def load_record(gpu: Gpu) -> CardTrials | None:
    """Returns the record of ``gpu`` with the present kernels; None if there is none that can be read."""
    try:
        return msgspec.json.decode(_path(gpu).read_bytes(), type=CardTrials)
    except (OSError, msgspec.MsgspecError):
        return None


def _path(gpu: Gpu) -> Path:
    key = hashlib.sha256(f"{gpu.name} {gpu.capability} {gpu.driver} {prebuilt_name()}".encode()).hexdigest()[:16]
    return cache_dir() / "cuda" / "trials" / f"{key}.json"


def _step(library: CudaLibrary, kind: torch.dtype | tuple[int, int], shim: bool, how: int) -> str:
    program, made = usual_attention(*(ON_SHIM_HEADS if shim else HEADS)), list[CudaRunner]()

    def on_gpu(spec: ModelSpec, program: Program, weights: Weights) -> CudaRunner:
        made.append(CudaRunner(spec, program, weights, library, how=how))
        return made[-1]

    try:
        weights = {"w": random_weights(one_layer(program), kind, 1)["o"]}
        return trial(program, weights, "bfloat16", NativeRunner, on_gpu, long=not shim)
    finally:
        for runner in made:
            runner.close()


def _ahead(library: CudaLibrary, kind: torch.dtype | tuple[int, int], shim: bool) -> str:
    program = one_layer(usual_attention(*(ON_SHIM_HEADS if shim else HEADS)))
    made = CudaRunner(spec_of(program, "bfloat16"), program, random_weights(program, kind, 1), library)
    try:
        return ahead_off(made)
    finally:
        made.close()


def usual_attention(heads: int, kv_heads: int, head_dim: int) -> Program:
    """Returns a program of which the trial takes the attention and the kind of its matrix."""
    ops = (
        p.RopeAppend("qkv", 0, None, None, 1e-6, "q"),
        p.PagedAttention("q", 0, 0, "out"),
        p.Linear("x", "w", None, "y"),
    )
    group = LayerGroup("full", ("k", "v"), 1, kv_heads, head_dim)
    return Program(ops, (), (group,), Rope("default", 1e4, {}), heads, kv_heads, head_dim, 64, 512)
