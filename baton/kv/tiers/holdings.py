"""Merges what one worker holds, in its device cache and its lower tiers, into one answer to the prefix index.

Knows nothing of Redis or of bytes. A block is announced when the first place has it and withdrawn with the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from baton.kv.tiers.stack import Tiers

Publish = Callable[[Sequence[bytes], Sequence[bytes]], None]


class Holdings:
    """Follows what this worker holds and gives (added, removed) to the function of ``announce_to``."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._device: set[bytes] = set()
        self._publish: Publish = lambda added, removed: None

    def announce_to(self, publish: Publish) -> None:
        """Announces to ``publish`` from now on; what is held already comes at once."""
        self._publish = publish
        publish([*self._device | self._tiers.hashes()], [])

    def leading(self, hashes: Sequence[bytes]) -> tuple[int, bool]:
        """Returns how many leading blocks are here, and whether some of them are only in a lower tier."""
        count = next(
            (i for i, h in enumerate(hashes) if h not in self._device and h not in self._tiers), len(hashes)
        )
        return count, any(h not in self._device for h in hashes[:count])

    def changed(self, added: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """Records blocks that joined (``added``) and left (``removed``) the device cache."""
        self._device.difference_update(removed)
        self._device.update(added)
        self._publish(added, [h for h in removed if h not in self._tiers])

    def stored(self, blocks: Iterable[bytes], gone: Iterable[bytes]) -> None:
        """Records that the tiers took ``blocks``, and that ``gone`` left the last of them."""
        self._publish(
            [h for h in blocks if h not in self._device and h in self._tiers],
            [h for h in gone if h not in self._device],
        )
