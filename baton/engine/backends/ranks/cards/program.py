"""Compiles a rank's share of a program for a card: registers of the rank's own columns, and meetings between them.

Knows nothing of processes or of where other ranks are. On a CPU ranks fill one register together; on cards each has
a copy of its own, and a meeting copies the others' columns into it.
"""

from __future__ import annotations

from baton.engine.backends.cuda.program import CudaProgram
from baton.engine.backends.native.program import Weights
from baton.engine.backends.ranks.program import GATHER
from baton.engine.program import ops as p
from baton.engine.program.rank_program import RankProgram
from baton.kernels.cuda.library import CudaLibrary
from baton.kernels.step import structs


class CardProgram(CudaProgram):
    """One rank's share ``own`` of a program, with the rank's weights in memory of ``device`` until ``close``."""

    def __init__(self, own: RankProgram, weights: Weights, device: CudaLibrary) -> None:
        self.own = own
        super().__init__(own.program, weights, device)
        first, end = own.own_kv
        self.struct.kv_heads = end - first  # the card's pages have no others

    def _compiled(self, op: p.Op) -> structs.Op:
        return self._meeting(op) if isinstance(op, p.Meet) else super()._compiled(op)

    def _meeting(self, op: p.Meet) -> structs.Op:
        part = self.own.parts[op.x]
        return structs.Op(
            kind=GATHER,
            input=self.registers[op.x],
            output=self._register(op.out, self.own.widths[part.whole]),
            delta=part.first,
            layer=part.width,
            window=part.by_rows,
        )
