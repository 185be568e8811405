"""Finds one expert's matrix in a tensor that holds all experts, as in gpt-oss checkpoints.

Knows nothing of files. A weight's source names such a part: ``TENSOR[3]`` is expert 3's matrix, ``TENSOR[3,even]``
and ``TENSOR[3,odd]`` are every other one of its outputs, from 0 or 1 on, ``TENSOR[3,first]`` and ``TENSOR[3,last]``
one half of them. Tensors are stored as (experts, inputs, outputs), and parts are transposed, unless the part ends
in ``,rows``: then they are (experts, outputs, inputs). Biases are (experts, outputs).
"""

from __future__ import annotations

import re
from typing import NamedTuple

from torch import Tensor

from baton.protos.errors import CheckpointError

PART = re.compile(r"^(?P<tensor>.+)\[(?P<expert>\d+)(?:,(?P<half>even|odd|first|last))?(?P<rows>,rows)?\]")

EXPERT = re.compile(r"^(?P<at>.+\.experts)\.(?P<expert>\d+)\.(?P<part>gate|up|down)_proj\.weight")
TENSORS = {"gate": ("gate_up_proj", ",first"), "up": ("gate_up_proj", ",last"), "down": ("down_proj", "")}

# Tensors of all experts: gpt-oss' and Llama 4's, whose module is named ``experts``, and Granite's.
STACKED = re.compile(
    r"^(?P<at>.+?)(?:\.experts)?\.(?P<part>gate_up_proj|down_proj|input_linear\.weight|output_linear\.weight)"
    r"(?P<bias>_bias)?"
)
DOWN = ("down_proj", "output_linear.weight")
UP_HALVES = ("odd", "last")


def stacked_source(name: str) -> str | None:
    """Returns the source of an expert's matrix in a file that stacks all experts in one tensor; None if ``name`` is
    no expert's.
    """
    found = EXPERT.fullmatch(name)
    if found is None:
        return None
    tensor, half = TENSORS[found["part"]]
    return f"{found['at']}.{tensor}[{found['expert']}{half},rows]"


def own_source(source: str) -> str | None:
    """Returns the name of an expert's matrix or bias in a file that gives each expert tensors of its own; None if
    ``source`` is no part of a tensor that holds all experts.

    These are the names that llm-compressor writes: ``….experts.3.gate_proj.weight``.
    """
    tensor, part = part_of(source)
    found = None if part is None else STACKED.fullmatch(tensor)
    if part is None or found is None:
        return None
    kind = "down" if found["part"] in DOWN else "up" if part.half in UP_HALVES else "gate"
    return f"{found['at']}.experts.{part.expert}.{kind}_proj.{'bias' if found['bias'] else 'weight'}"


class ExpertPart(NamedTuple):
    """Names an expert and some of its outputs."""

    expert: int
    half: str | None = None  # "even", "odd", "first" or "last"; None for all
    rows: bool = False  # matrices are stored with outputs first

    def of(self, tensor: Tensor, error: CheckpointError) -> Tensor:
        """Returns this part of ``tensor``, which holds all experts, as (outputs, inputs) or (outputs,). Raises
        ``error`` if the tensor lacks it.
        """
        if tensor.dim() not in (2, 3) or self.expert >= len(tensor):
            raise error
        own = tensor[self.expert]
        outputs = own.T if own.dim() == 2 and not self.rows else own
        return outputs[self.outputs(len(outputs))]

    def outputs(self, count: int) -> slice:
        """Returns the slice of an expert's ``count`` outputs that the part names."""
        middle = count // 2
        halves = {"even": slice(0, None, 2), "odd": slice(1, None, 2), "first": slice(middle)}
        return slice(None) if self.half is None else halves.get(self.half, slice(middle, None))


def part_of(source: str) -> tuple[str, ExpertPart | None]:
    """Returns the name of a source's tensor, and the part of it that is meant; None for the whole tensor."""
    found = PART.fullmatch(source)
    if found is None:
        return source, None
    return found["tensor"], ExpertPart(int(found["expert"]), found["half"], found["rows"] is not None)
