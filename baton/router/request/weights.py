"""The version of the weights that a call is answered on: one for all of its choices, from the first token to the
last.

Knows nothing of workers' links, queues or policies. Under one model name two versions can be served at once, while
a checkpoint or a quantization is rolled out: an answer that began on one is never continued on the other.

free ──hold──> held by the placed choices ──fix (a token was emitted)──> fixed for the rest of the call; when the
last hold ends before any token, the pin is free again.
"""

from __future__ import annotations

from typing import NamedTuple

from baton.kv.layout.tables import MARK
from baton.protos.nouns import WorkerInfo


class WeightsId(NamedTuple):
    """Identifies a version of the weights that decide an answer: their fingerprint, quantization included, and the
    fidelity of the KV cache, without what only says how it is divided among pages.
    """

    fingerprint: str
    fidelity: str

    def __str__(self) -> str:
        return f"{self.fingerprint[:12]} with {self.fidelity} KV"


def weights_of(info: WorkerInfo) -> WeightsId:
    """Returns the version of weights, and KV fidelity, that decode worker ``info`` answers with."""
    return WeightsId(info.fingerprint, info.layout.fidelity.removesuffix(MARK))


class PinShare:
    """Holds one placed choice's share of a pin until ``close``."""

    def __init__(self, pin: WeightsPin) -> None:
        self._pin: WeightsPin | None = pin

    def close(self) -> None:
        """Ends the choice's share of the pin. Idempotent."""
        pin, self._pin = self._pin, None
        if pin is not None:
            pin.let_go()


class WeightsPin:
    """Pins one call to one version of the weights; ``weights`` is None while any may answer."""

    def __init__(self) -> None:
        self.weights: WeightsId | None = None
        self.fixed = False
        self._holders = 0

    def allows(self, info: WorkerInfo) -> bool:
        """Returns whether the call may be answered by decode worker ``info``."""
        return self.weights is None or self.weights == weights_of(info)

    def hold(self, weights: WeightsId) -> PinShare:
        """Pins the call to ``weights`` until the returned share is closed, or for good once fixed."""
        assert self.weights in (None, weights)
        self.weights = weights
        self._holders += 1
        return PinShare(self)

    def fix(self) -> None:
        """Pins the call for good to the weights held now, because a part of its answer is emitted. Idempotent."""
        self.fixed = self.weights is not None

    def let_go(self) -> None:
        """Ends one share; the last one unpins the call unless it is fixed. Called by PinShare only."""
        self._holders -= 1
        if not self._holders and not self.fixed:
            self.weights = None
