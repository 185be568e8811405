"""Copies sequences' recurrent states out of their pages before a native step, and into other pages after it.

Knows nothing of states' contents. A step that failed has changed no page of state, so that it can be run again.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from baton.engine.backends.native.span_structs import StatesStruct
from baton.engine.plan import SequenceStep, StepPlan
from baton.protos.errors import BatonError


class StateRoom(NamedTuple):
    """Holds where a step finds its items' states, and where it leaves them, (sequences, bytes of a state) uint8
    each; both may be one.
    """

    before: Tensor
    after: Tensor


class StepStates:
    """The recurrent states of one step's items, to which ``struct`` points while this object lives.

    ``memory`` (pages, page bytes) uint8 has all pages. If ``room`` is given, the step finds the states there,
    because other processes run some of it.
    """

    def __init__(self, plan: StepPlan, memory: Tensor, struct: StatesStruct, room: StateRoom | None = None) -> None:
        self._memory, self._to = memory, torch.tensor(_targets(plan), dtype=torch.int64)
        begun = [at for at, item in enumerate(plan.items) if item.state_from is not None]
        pages = torch.tensor([page for at in begun for page in _source(plan.items[at])], dtype=torch.int64)
        size = len(self._to) // len(plan.items) * memory.shape[1]
        found = memory.index_select(0, pages).view(len(begun), size)
        if len(begun) < len(plan.items):
            whole = torch.zeros((len(plan.items), size), dtype=torch.uint8)
            whole[begun] = found
            found = whole
        self._found = found
        self._after: Tensor | None = None
        if room is None:
            struct.at, struct.bytes = found.data_ptr(), found.shape[1]
        else:
            before, self._after = (each[: len(plan.items)] for each in room)
            before.copy_(found[:, : before.shape[1]])

    def finish(self) -> None:
        """Writes the states after the step to the pages that the plan names."""
        if self._after is not None:
            self._found[:, : self._after.shape[1]] = self._after
        self._memory.index_copy_(0, self._to, self._found.view(len(self._to), -1))


def _source(item: SequenceStep) -> list[int]:
    return list(item.state_from or ())


def _targets(plan: StepPlan) -> list[int]:
    if not all(item.state_to for item in plan.items):
        raise BatonError("a model with recurrent state was asked for a step without pages for it")
    return [page for item in plan.items for page in item.state_to]
