"""Says what a backend offers for the LoRA adapters that its steps name. Knows nothing of files or tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Protocol

from baton.engine.adapters.base import AdapterBase
from baton.engine.adapters.packed import PackedAdapter


class AdapterHost(Protocol):
    """Holds the LoRA adapters that a runner's steps may name. ``base`` describes the model, which adapters must
    fit.
    """

    base: AdapterBase

    def hold(self, adapter: str, packed: PackedAdapter) -> None:
        """Applies ``packed`` to sequences that name ``adapter``, from the next step on; its memory must stay valid
        until ``drop``.
        """
        deque(self.holding(adapter, packed), maxlen=0)

    def holding(self, adapter: str, packed: PackedAdapter) -> Iterator[None]:
        """Does what ``hold`` does in short pieces, between which steps without ``adapter`` may run; sequences may
        name it from the end on.
        """

    def drop(self, adapter: str) -> None:
        """Forgets an adapter that no sequence names any more."""
