"""A simulated model whose layers see windows, and whose workers keep KV in pages of different kinds.

Layer 0 holds the paced engine's rows. Layers 1 and 2, where there are any, hold XXH3-128(row, layer's number), of
which only a window is read. With pages ``own``, layers with a window have pages of their own, which are given back.
So workers of several kinds serve one model, and convert what they hand over to one another. Knows nothing of
schedulers, leases or pages of more than 16 tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from baton.drill.language.oracle import ROW_BYTES, STATE_BYTES, Sight
from baton.drill.models.runner import SimulatedRunner, Timing, places
from baton.drill.scenario import PageKind, Scenario
from baton.engine.backends.paced.adapters import PacedAdapters
from baton.engine.backends.paced.runner import choose, rows_after
from baton.engine.plan import SampledToken, SequenceStep
from baton.kv.layout.page import layout_for
from baton.kv.layout.tables import by_window
from baton.protos.nouns import BLOCK_TOKENS, KvLayout, LayerGroup, StatePlane

Rows = tuple[NDArray[np.int64], int, NDArray[np.int64]]  # indices: pages, the layer in a page, rows
WINDOWED = 2  # layers that see a window, beside one that sees all tokens


def layout_of(sight: Sight, own: bool) -> KvLayout:
    """Returns the layout of a worker's pages of 16 tokens; ``own`` is the kind's."""
    whole = LayerGroup("full", ("state",), 1, 1, ROW_BYTES, sight.window if sight.every else 0)
    windowed = LayerGroup("window", ("state",), WINDOWED, 1, ROW_BYTES, sight.window)
    groups = (whole, windowed) if sight.window and not sight.every else (whole,)
    states = (StatePlane("conv", 1, (STATE_BYTES // 4,)),) if sight.state else ()
    layout = layout_for("uint8", groups, fidelity="paced", states=states)
    return by_window(layout) if own else layout


def kind_of(scenario: Scenario, role: str, number: int, changes: int = 0) -> PageKind:
    """Returns the kind of pages of the worker slot that is number ``number`` of ``role``, after so many
    ``changes`` of its configuration.
    """
    kinds = scenario.page_kinds or (PageKind(),)
    if not kinds[0].dtype:
        return kinds[(number + (role == "decode")) % len(kinds)]
    return kinds[0] if role == "prefill" else kinds[1:][(number + changes) % (len(kinds) - 1)]


class PagedRunner(SimulatedRunner):
    """The paced runner of a model with such ``sight``, over pages of 16 tokens; ``own`` is their kind's."""

    def __init__(
        self,
        name: str,
        sight: Sight,
        own: bool,
        timing: Timing,
        adapters: PacedAdapters | None,
    ) -> None:
        super().__init__(name, timing, adapters)
        self._sight, self._layout = sight, layout_of(sight, own)
        self.spec = msgspec.structs.replace(self.spec, layout=self._layout)
        self._layers = 1 + WINDOWED if sight.window and not sight.every else 1
        self._memory: NDArray[np.uint8] = np.empty((0, 1, BLOCK_TOKENS, ROW_BYTES), np.uint8)
        self._flat: NDArray[np.uint8] = np.empty((0, self._layout.page_bytes), np.uint8)

    def bind(self, buffer: memoryview, pages: int) -> None:
        """Uses ``buffer`` as the KV pages, (pages, layers of a page, 16, ROW_BYTES) bytes."""
        rows = np.frombuffer(buffer, np.uint8, count=pages * self._layout.page_bytes)
        self._flat = rows.reshape(pages, -1)
        self._memory = rows.reshape(pages, -1, BLOCK_TOKENS, ROW_BYTES)
        self._rows = self._memory[:, 0]  # what the base class counts pages by

    def _advance(self, item: SequenceStep) -> Iterator[SampledToken]:
        state = self._write(item)
        known = item.start + len(item.tokens) - len(item.verify)
        for length, spec in enumerate(item.asks, known):
            digest, seen = xxhash.xxh3_64(), max(0, length - self._sight.window)
            digest.update(self._at(item, 0, seen if self._sight.every else 0, length))
            for layer in range(1, self._layers):
                digest.update(self._at(item, layer, seen, length))
            digest.update(state)
            yield choose(item.seq, digest, spec, self.spec.vocab_size)

    def _states(self, item: SequenceStep) -> NDArray[np.float32]:
        rows = np.frombuffer(self._at(item, 0, item.start, item.start + len(item.tokens)), np.uint8)
        return (rows.reshape(-1, ROW_BYTES) / 255 - 0.5).astype(np.float32)

    def _write(self, item: SequenceStep) -> bytes:  # type: ignore[override]
        """Writes the step's rows and state; returns the state's digest, "" without one."""
        before = self._at(item, 0, item.start - 1, item.start) if item.start else item.adapter.encode()
        fresh = list(rows_after(before, item.tokens, item.start, ROW_BYTES))
        for layer in range(self._layers):
            rows = fresh if not layer else [side_row(row, layer) for row in fresh]
            where = self._where(item, layer, item.start, item.start + len(item.tokens))
            self._memory[where] = np.frombuffer(b"".join(rows), np.uint8).reshape(-1, ROW_BYTES)
        return self._next_state(item, fresh) if self._sight.state else b""

    def _next_state(self, item: SequenceStep, rows: Sequence[bytes]) -> bytes:
        """Reads the state before the step and writes that after its ``rows``; returns that one's digest."""
        whole = b"" if item.state_from is None else self._flat[item.state_from].tobytes()[:STATE_BYTES]
        for row in rows:
            digest = xxhash.xxh3_128_digest(whole + row)
            whole = digest * (STATE_BYTES // ROW_BYTES)
        room = np.zeros((len(item.state_to), self._layout.page_bytes), np.uint8)
        room.reshape(-1)[:STATE_BYTES] = np.frombuffer(whole, np.uint8)
        self._flat[item.state_to] = room
        return whole[:ROW_BYTES]

    def _at(self, item: SequenceStep, layer: int, begin: int, end: int) -> bytes:
        """Returns the rows of ``layer`` at positions ``begin`` … ``end`` - 1."""
        return bytes(self._memory[self._where(item, layer, begin, end)].tobytes())

    def _where(self, item: SequenceStep, layer: int, begin: int, end: int) -> Rows:
        """Returns the indices of the rows of ``layer``: page, layer in the page, row."""
        apart = layer if self._layout.windows else 0  # the page table
        pages, rows = places(item.tables[apart - 1] if apart else item.pages, begin, end)
        return pages, 0 if apart else layer, rows


def side_row(row: bytes, layer: int) -> bytes:
    """Returns the row of a layer with a window beside ``row``, layer 0's."""
    return xxhash.xxh3_128_digest(row + bytes([layer]))
