"""Activations of MLPs without a gate. Knows nothing of the products around them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "silu": F.silu,
    "tanh": torch.tanh,
}


def activate(x: Tensor, activation: str) -> Tensor:
    """Returns ``activation``, a name of ``ACTIVATIONS``, of each number of ``x``."""
    return ACTIVATIONS[activation](x)
