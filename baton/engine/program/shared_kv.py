"""Says which layer keeps the K and V that each layer reads, where a model's last layers have none of their own.

Knows nothing of tensors. Pages hold owners' K and V alone, so that memory, handoffs and prefix hits carry nothing
for the others.
"""

from __future__ import annotations

from collections.abc import Sequence


def owners(windows: Sequence[int], shared: int) -> tuple[int, ...] | None:
    """Returns, for each layer, the layer whose K and V it reads: its own, or for the last ``shared`` layers that of
    the last layer before them with the same window.

    ``windows`` has each layer's attention window. Returns None if there is no such layer.
    """
    first = len(windows) - shared
    last = {window: layer for layer, window in enumerate(windows[:first])}
    if first < 1 or not set(windows) <= set(last):
        return None
    return tuple(layer if layer < first else last[window] for layer, window in enumerate(windows))


def owners_slots(windows: Sequence[int], of: Sequence[int]) -> tuple[int, ...]:
    """Returns the slot in a page of the K and V that each layer reads, given ``of``, the result of ``owners``.

    Slots count through groups of owners by rising window, layers in order within a group.
    """
    order = sorted(set(of), key=lambda layer: (windows[layer], layer))
    return tuple(order.index(owner) for owner in of)
