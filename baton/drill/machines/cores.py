"""The cores of one simulated machine, which its engines lend one another, as ``kernels/abi/threads.cpp`` has them.

Knows nothing of steps. Each engine has a seat: one core is its own, and it says when it computes.
"""

from __future__ import annotations

from baton.drill.loop import seeded_loop
from baton.kernels.abi.cores import LentCores

ALIVE_S = 0.5  # seconds for which an engine that says nothing more still counts as computing
UNKNOWN_S = (2**31 - 1) / 1e6  # seconds that a chunk takes of an engine that has read none yet


class CoreSeat:
    """An engine's place on ``cores``: what it has said of itself."""

    def __init__(self, cores: MachineCores) -> None:
        self._cores = cores
        self.writes = False  # whether it generates answers
        self.chunk_s = UNKNOWN_S  # seconds that it takes to read a chunk of prompts
        self._at: float | None = None  # when it last said that it computes; None: it rests
        self._computing = self._gone = False

    @property
    def lent(self) -> LentCores:
        """Returns the functions by which a step loop says what it needs."""
        return LentCores(self._begin_role, self.rest, self._tell_chunk, self.prompts_beside)

    @property
    def busy(self) -> bool:
        """Returns whether others take it for one that computes."""
        if self._at is None:
            return False
        return self._computing or seeded_loop().true_time() - self._at <= ALIVE_S

    @property
    def gone(self) -> bool:
        """Returns whether its engine has ended, so that another one may have its place."""
        return self._gone

    def begin(self) -> float:
        """Registers that a step begins; returns the number of cores that it has."""
        self._at, self._computing = seeded_loop().true_time(), True
        return self._cores.allowed(self)

    def end(self) -> None:
        """Registers that the step is over."""
        self._computing = False
        if self._at is not None:
            self._at = seeded_loop().true_time()

    def leave(self) -> None:
        """Registers that the engine has ended, whatever it did; its last word counts for a while."""
        self.end()
        self._gone = True

    def rest(self) -> None:
        """Registers that there is nothing to compute."""
        self._at, self._computing = None, False

    def prompts_beside(self) -> float:
        """Returns the seconds that the slowest of the others that read prompts now takes for a chunk; 0 if none
        does.
        """
        return max((seat.chunk_s for seat in self._cores.others(self) if not seat.writes), default=0.0)

    def _begin_role(self, role: str) -> None:
        self.writes = role == "decode"

    def _tell_chunk(self, seconds: float) -> None:
        self.chunk_s = seconds


class MachineCores:
    """The cores of a machine with ``count`` of them."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._seats: list[CoreSeat] = []

    def join(self) -> CoreSeat:
        """Returns a new engine's seat, in place of one whose engine has ended."""
        seat = CoreSeat(self)
        free = next((i for i, one in enumerate(self._seats) if one.gone), len(self._seats))
        self._seats[free : free + 1] = [seat]
        return seat

    def others(self, own: CoreSeat) -> list[CoreSeat]:
        """Returns the seats beside ``own`` that compute."""
        return [seat for seat in self._seats if seat is not own and seat.busy]

    def allowed(self, own: CoreSeat) -> int:
        """Returns the cores of ``own``: its one, and its part of those that nobody else wants."""
        others = self.others(own)
        mine = self._seats.index(own)
        spare, engines = max(0, self._count - 1 - len(others)), 1 + len(others)
        earlier = sum(
            seat.writes > own.writes or (seat.writes == own.writes and self._seats.index(seat) < mine)
            for seat in others
        )
        return min(self._count, 1 + spare // engines + (earlier < spare % engines))
