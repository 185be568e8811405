"""A simulated model of two layers, whose ranks may be on two hosts: each holds the pages of one layer.

Layer 0 holds the paced engine's rows, layer 1 the rows beside them. Where there is another host, layer 1 is read
from its memory alone, so that a token is right only if that host has what it must. The product's own books say
which of its pages are current. Knows nothing of processes or connections.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from baton.drill.language.oracle import ROW_BYTES
from baton.drill.models.pages import side_row
from baton.drill.models.runner import SimulatedRunner, Timing, places
from baton.engine.abilities import Mirror
from baton.engine.backends.paced.adapters import PacedAdapters
from baton.engine.backends.paced.runner import choose, rows_after
from baton.engine.backends.ranks.host_pages import HostPages
from baton.engine.plan import SampledToken, SequenceStep, StepPlan, StepResult
from baton.kv.layout.extents import Part, part_of
from baton.kv.layout.page import layout_for
from baton.kv.memory.host_pages import PageMemory
from baton.protos.nouns import BLOCK_TOKENS, LayerGroup

LAYERS = 2
LAYOUT = layout_for("uint8", (LayerGroup("full", ("state",), LAYERS, 1, ROW_BYTES),), fidelity="paced")
PARTS: tuple[Part, ...] = tuple(part_of(LAYOUT, {layer: (0, 1)}) for layer in range(LAYERS))


class HostsRunner(SimulatedRunner):
    """The paced runner of the model; with ``divided`` there is another host, whose pages are ``far``."""

    far: PageMemory | None = None

    def __init__(
        self,
        name: str,
        divided: bool,
        timing: Timing,
        adapters: PacedAdapters | None,
    ) -> None:
        super().__init__(name, timing, adapters)
        self.spec = msgspec.structs.replace(self.spec, layout=LAYOUT)
        self._divided = divided
        self._layers: list[NDArray[np.uint8]] = []
        self._held: HostPages | None = None

    def bind(self, buffer: memoryview, pages: int) -> None:
        """Uses ``buffer`` as the lead's KV pages, and makes as many on the other host."""
        lead = _layers_of(buffer, pages)
        self._rows = lead[0]
        self._layers = [lead[0], lead[1]]
        if self._divided:
            self.far = PageMemory.create(pages, LAYOUT.page_bytes)
            self._lead, self._far = lead[1], _layers_of(self.far.view(), pages)[1]
            self._layers[1] = self._far
            self._held = HostPages(PARTS, pages, LAYOUT.page_bytes, 1, self._show, self._bring)

    @property
    def mirror(self) -> Mirror | None:
        """Returns what is to be told of pages that come in parts to each host; None if there is one host."""
        return self._held

    def run(self, plan: StepPlan) -> StepResult:
        """Runs a step once the other host has what it reads."""
        missing = [] if self._held is None else self._held.show(plan.items)
        found = super().run(plan)
        if self._held is not None:
            self._held.ran(plan.items, missing)
        return found

    def _show(self, host: int, pages: Sequence[int], part: Part) -> None:
        self._far[pages] = self._lead[pages]

    def _bring(self, pages: Sequence[int], parts: tuple[Part, ...]) -> None:
        self._lead[pages] = self._far[pages]

    def _advance(self, item: SequenceStep) -> Iterator[SampledToken]:
        self._write(item)
        known = item.start + len(item.tokens) - len(item.verify)
        for length, spec in enumerate(item.asks, known):
            digest = xxhash.xxh3_64()
            for layer in self._layers:
                digest.update(_read(layer, item.pages, 0, length))
            yield choose(item.seq, digest, spec, self.spec.vocab_size)

    def _write(self, item: SequenceStep) -> None:
        start, end = item.start, item.start + len(item.tokens)
        before = _read(self._layers[0], item.pages, start - 1, start) if start else item.adapter.encode()
        rows = list(rows_after(before, item.tokens, start, ROW_BYTES))
        beside = [side_row(row, 1) for row in rows]
        at = places(item.pages, start, end)
        self._layers[0][at] = _rows_of(rows)
        self._layers[1][at] = _rows_of(beside)
        if self._held is not None:
            self._lead[at] = _rows_of(beside)  # as ranks send what they write to the lead's host


def _layers_of(buffer: memoryview, pages: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Returns views of the rows of each layer, (pages, 16, ROW_BYTES)."""
    whole = np.frombuffer(buffer, np.uint8, count=pages * LAYOUT.page_bytes)
    shaped = whole.reshape(pages, LAYERS, BLOCK_TOKENS, ROW_BYTES)
    return shaped[:, 0], shaped[:, 1]


def _rows_of(rows: Sequence[bytes]) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(rows), np.uint8).reshape(-1, ROW_BYTES)


def _read(layer: NDArray[np.uint8], table: Sequence[int], begin: int, end: int) -> bytes:
    return bytes(layer[places(table, begin, end)].tobytes())
