"""The weights that a call is answered on: one set for all of its choices, from the first token to the last.

Knows nothing of workers' links, queues or policies. Under one model name two sets can be served at once, while a
checkpoint or a quantization is rolled out: an answer that began on one set is never continued on another.

    free ──hold──> held by the placed choices ──fix (something was written)──> fixed for the rest of the call
      ^                     │
      └── the last hold ends┘   nothing was written yet: the call may begin anew on any weights
"""

from __future__ import annotations

from typing import NamedTuple

from baton.protos.nouns import WorkerInfo


class WeightsId(NamedTuple):
    """Identifies what decides an answer besides the request: the weights, quantization included, and KV's
    fidelity.
    """

    fingerprint: str
    fidelity: str

    def __str__(self) -> str:
        return f"{self.fingerprint[:12]} with {self.fidelity} KV"


def weights_of(info: WorkerInfo) -> WeightsId:
    """Returns what decides the tokens that decode worker ``info`` writes."""
    return WeightsId(info.fingerprint, info.layout.fidelity)


class PinShare:
    """Holds a placed choice's part in a pin. ``close`` ends it; calling it again does nothing."""

    def __init__(self, pin: WeightsPin) -> None:
        self._pin: WeightsPin | None = pin

    def close(self) -> None:
        """Ends the choice's part in the pin."""
        pin, self._pin = self._pin, None
        if pin is not None:
            pin.let_go()


class WeightsPin:
    """Pins one call to one set of weights: None while any will do."""

    def __init__(self) -> None:
        self.weights: WeightsId | None = None
        self.fixed = False
        self._holders = 0

    def allows(self, info: WorkerInfo) -> bool:
        """Returns whether the call may be answered by ``info``."""
        return self.weights is None or self.weights == weights_of(info)

    def hold(self, weights: WeightsId) -> PinShare:
        """Pins the call to ``weights`` while the returned hold lasts."""
        assert self.weights in (None, weights)
        self.weights = weights
        self._holders += 1
        return PinShare(self)

    def fix(self) -> None:
        """Pins the call for good, because a part of its answer is known. Idempotent."""
        self.fixed = self.weights is not None

    def let_go(self) -> None:
        """Ends one hold (called by Hold alone)."""
        self._holders -= 1
        if not self._holders and not self.fixed:
            self.weights = None
