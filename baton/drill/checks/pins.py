"""Checks that workers keep the prefixes that they were said to keep, and that routers list what is pinned.

Knows nothing of HTTP. A worker is asked what it has by its page pool, not by what it says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import msgspec

from baton.drill.scenario import PrefixPin
from baton.kv.layout import prefix
from baton.kv.pages.pool import PagePool
from baton.protos.nouns import KvLayout

EXPIRES_S = 0.5  # seconds before its time from which on a pin may be gone, by the clocks of two machines


class KeepingLife(Protocol):
    """The part of a worker's life that the checks ask."""

    @property
    def keeps(self) -> tuple[PagePool, str, KvLayout]:
        """Returns the pages, the fingerprint of the weights, and the layout of a page."""


class Kept(msgspec.Struct):
    """A pin that a client was told of. ``lives`` are those of the workers that took it, by slot.

    ``gone`` says that its client has asked to let it go, ``let_go`` that a router said so.
    """

    id: str
    asked: PrefixPin
    until: float
    tokens: Mapping[str, int]
    lives: Mapping[str, KeepingLife]
    gone: bool = False
    let_go: bool = False


class PinLedger:
    """Knows the pins that clients were told of, and finds those that are not kept or not listed.

    ``present`` gives the present life of each slot that has one.
    """

    def __init__(self, violated: Callable[[str], None], present: Callable[[], Mapping[str, KeepingLife]]) -> None:
        self._violated, self._present = violated, present
        self.pins: dict[str, Kept] = {}

    def told(self, pin: Kept) -> None:
        """Notes that a client was told of ``pin``, and checks it."""
        self.pins[pin.id] = pin
        if not pin.tokens:
            self._violated(f"pin {pin.id}: nobody keeps it, and its client was told that it is pinned")

    def look(self, now: float) -> None:
        """Reports the workers that don't keep what they were said to keep, at true time ``now``."""
        for pin in self.pins.values():
            for slot in self._keeping(pin, now):
                pool, fingerprint, layout = pin.lives[slot].keeps
                root = prefix.root(fingerprint, layout.fidelity, "", pin.asked.tenant.encode())
                wanted = prefix.block_hashes(root, pin.asked.prompt, layout.block_tokens)
                wanted = wanted[: pin.tokens[slot] // layout.block_tokens]
                if (found := pool.match(wanted)) < len(wanted):
                    self._violated(f"pin {pin.id}: {slot} has {found} of {len(wanted)} blocks that it is to keep")

    def listed(self, shown: Sequence[Mapping[str, object]], by: str, now: float) -> None:
        """Checks what router ``by`` lists at true time ``now``, while nobody is told of another pin."""
        by_id = {str(one["id"]): one for one in shown}
        for pin in self.pins.values():
            if now >= pin.until - EXPIRES_S:
                continue
            if pin.id in by_id and pin.let_go:
                self._violated(f"pin {pin.id} is listed by {by}, and was let go")
            elif pin.id not in by_id and not pin.gone:
                self._violated(f"pin {pin.id} is not listed by {by}")
            elif not pin.gone and (lost := sorted(set(self._lost(by_id[pin.id])) & set(self._keeping(pin, now)))):
                self._violated(f"pin {pin.id}: {by} takes it for lost at {lost}, which have it")

    def _lost(self, shown: Mapping[str, object]) -> Iterator[str]:
        lost = shown["lost_workers"]
        assert isinstance(lost, list)
        yield from map(str, lost)

    def _keeping(self, pin: Kept, now: float) -> Iterator[str]:
        """Yields the slots that must keep ``pin``, because the process that took it lives on."""
        if pin.gone or now >= pin.until - EXPIRES_S:
            return
        present = self._present()
        yield from (slot for slot, life in pin.lives.items() if present.get(slot) is life)
