"""Says what serving on a card requires of torch and the model, and whether our own kernels may serve there.

Knows nothing of memory or weights.
"""

from __future__ import annotations

import logging

import torch

from baton.engine.backends.cuda.gpu import Gpu, without_kernels
from baton.engine.backends.cuda.load import TORCH
from baton.engine.backends.span_ops import SPAN_OPS
from baton.engine.program.config import ModelConfig
from baton.engine.program.program import Program
from baton.protos.errors import ConfigError

log = logging.getLogger("baton.engine")


def require_cuda_ops(model: ModelConfig, planned: Program) -> None:
    """Checks that a GPU computes every op of ``planned``, the program of ``model``. Raises ConfigError."""
    lacking = sorted({type(op).__name__ for op in planned.ops if isinstance(op, SPAN_OPS)})
    if lacking:
        text = (
            f"device cuda: {model.model_type} needs {', '.join(lacking)}, which no GPU kernel computes yet; use cpu"
        )
        raise ConfigError(text, "device")


def takes_kernels(gpu: Gpu) -> bool:
    """Returns whether the engine's own kernels may run on ``gpu``; if not, the log says why."""
    if said := without_kernels(gpu):
        log.warning("%s: %s", TORCH, said)
    return not said


def require_torch_cuda() -> None:
    """Checks that this torch can use the GPU. Raises ConfigError."""
    if torch.version.cuda is None:
        text = "device cuda: this torch is built without CUDA; install the CUDA build of its version, or use cpu"
        raise ConfigError(text, "device")
    if not torch.cuda.is_available():
        text = f"device cuda: torch (CUDA {torch.version.cuda}) can't use the GPU; update the driver, or use cpu"
        raise ConfigError(text, "device")
