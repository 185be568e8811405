"""Merges the blocks of a worker's device cache and lower tiers into one announcement to the prefix index.

Knows nothing of Redis or of bytes. A block is announced when the first of them gets it and withdrawn when the last
has dropped it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from baton.kv.tiers.stack import Tiers

Publish = Callable[[Sequence[bytes], Sequence[bytes]], None]


class Holdings:
    """Tracks which blocks this worker has, and passes changes (added, removed) to the function given to
    ``announce_to``.
    """

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._device: set[bytes] = set()
        self._publish: Publish = lambda added, removed: None

    def __contains__(self, block: object) -> bool:
        """Returns whether ``block`` is here, on the device or in a lower tier."""
        return isinstance(block, bytes) and (block in self._device or block in self._tiers)

    def on_device(self, block: bytes) -> bool:
        """Returns whether ``block`` is in the device cache, as far as is known."""
        return block in self._device

    def announce_to(self, publish: Publish) -> None:
        """Calls ``publish`` with the blocks that are here now, and from now on with every change."""
        self._publish = publish
        publish([*self._device | self._tiers.hashes()], [])

    def leading(self, hashes: Sequence[bytes]) -> tuple[int, bool]:
        """Returns how many leading blocks of ``hashes`` are here, and whether some of them are only in a lower
        tier.
        """
        count = next(
            (i for i, h in enumerate(hashes) if h not in self._device and h not in self._tiers), len(hashes)
        )
        return count, any(h not in self._device for h in hashes[:count])

    def changed(self, added: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """Records the blocks that were ``added`` to and ``removed`` from the device cache."""
        self._device.difference_update(removed)
        self._device.update(added)
        self._publish(added, [h for h in removed if h not in self._tiers])

    def stored(self, blocks: Iterable[bytes], gone: Iterable[bytes]) -> None:
        """Records that the tiers stored ``blocks`` and no longer have those of ``gone``."""
        self._publish(
            [h for h in blocks if h not in self._device and h in self._tiers],
            [h for h in gone if h not in self._device],
        )
