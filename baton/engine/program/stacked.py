"""Finds one expert's matrix in a tensor that holds all experts', as gpt-oss checkpoints have them.

Knows nothing of files. A weight's source names such a part: ``TENSOR[3]`` is expert 3's, ``TENSOR[3,even]`` and
``TENSOR[3,odd]`` every other one of its outputs, from 0 or 1 on. Matrices lie with inputs first, (experts, inputs,
outputs), and are turned over; biases are (experts, outputs).
"""

from __future__ import annotations

import re
from typing import NamedTuple

from torch import Tensor

from baton.protos.errors import CheckpointError

PART = re.compile(r"^(?P<tensor>.+)\[(?P<expert>\d+)(?:,(?P<half>even|odd))?\]")
HALVES = {None: slice(None), "even": slice(0, None, 2), "odd": slice(1, None, 2)}


class ExpertPart(NamedTuple):
    """Names an expert and which of its outputs are meant."""

    expert: int
    outputs: slice

    def of(self, tensor: Tensor, error: CheckpointError) -> Tensor:
        """Returns the part of all experts' ``tensor``, outputs first; raises ``error`` where it isn't there."""
        if tensor.dim() not in (2, 3) or self.expert >= len(tensor):
            raise error
        own = tensor[self.expert]
        return (own.T if own.dim() == 2 else own)[self.outputs]


def part_of(source: str) -> tuple[str, ExpertPart | None]:
    """Returns a source's tensor, and which part of it is meant; None for all of it."""
    found = PART.fullmatch(source)
    if found is None:
        return source, None
    return found["tensor"], ExpertPart(int(found["expert"]), HALVES[found["half"]])
