"""A simulated model whose KV is floats, so that workers of several dtypes and wire codecs serve it together.

A half-byte of the paced engine's rows is one number, far enough from its neighbours that no rounding to another
dtype and no codec makes it another half-byte. So the answer is the same everywhere, and a page that is late or
foreign gives a wrong token as ever. A worker that takes in nothing lossy also holds each number that it reads
against what its dtype makes of it: one that went through a codec, or a narrower dtype, is another. Knows nothing of
schedulers or leases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from baton.drill.language.oracle import ROW_BYTES
from baton.drill.models.runner import SimulatedRunner, Timing, places
from baton.drill.scenario import PageKind
from baton.engine.backends.paced.adapters import PacedAdapters
from baton.engine.backends.paced.runner import rows_after
from baton.engine.plan import SequenceStep
from baton.kv.layout.bridge import codec_of, with_codec
from baton.kv.layout.codecs import from_float32, to_float32
from baton.kv.layout.page import layout_for
from baton.protos.nouns import BLOCK_TOKENS, KvLayout, LayerGroup

LAYERS, HEADS, HEAD_DIM = 2, 2, 8  # numbers of a token: two for each byte of its row
# The plane of values is coded token by token, so that it may be coded again behind other tokens.
GROUP = LayerGroup("full", ("v",), LAYERS, HEADS, HEAD_DIM)
LOWEST, NEAR = 8, 2.0**-12  # numbers are -8 to 7, and a little more, which a narrower dtype drops


def float_layout(kind: PageKind) -> KvLayout:
    """Returns the layout of a worker's pages of 16 tokens."""
    return with_codec(layout_for(kind.dtype, (GROUP,)), kind.codec)


class FloatRunner(SimulatedRunner):
    """The paced runner over pages of floats, as ``kind`` has them. ``violated`` is told of numbers that aren't
    exact where they must be.
    """

    def __init__(
        self,
        name: str,
        kind: PageKind,
        violated: Callable[[str], None],
        timing: Timing,
        adapters: PacedAdapters | None,
    ) -> None:
        super().__init__(name, timing, adapters)
        self.spec = msgspec.structs.replace(self.spec, layout=float_layout(kind))
        self._dtype, self._violated = kind.dtype, violated
        exact = from_float32(((np.arange(16) - LOWEST) * (1 + NEAR)).astype(np.float32), kind.dtype)
        self._exact = None if codec_of(self.spec.layout) else exact
        self._codes = exact
        self._memory = np.empty((0, LAYERS, BLOCK_TOKENS, HEADS * HEAD_DIM), exact.dtype)

    def bind(self, buffer: memoryview, pages: int) -> None:
        """Uses ``buffer`` as the KV pages."""
        size = self.spec.layout.page_bytes // self._codes.itemsize
        numbers = np.frombuffer(buffer, self._codes.dtype, count=pages * size)
        self._memory = numbers.reshape(pages, LAYERS, BLOCK_TOKENS, -1)
        self._rows = np.empty((pages, 0, 0), np.uint8)  # what the base class counts pages by

    def _states(self, item: SequenceStep) -> NDArray[np.float32]:
        rows = self._between(item.pages, item.start, item.start + len(item.tokens))
        return (rows / 255 - 0.5).astype(np.float32)

    def _write(self, item: SequenceStep) -> None:
        start, end = item.start, item.start + len(item.tokens)
        before = self._between(item.pages, start - 1, start).tobytes() if start else item.adapter.encode()
        rows = np.frombuffer(b"".join(rows_after(before, item.tokens, start, ROW_BYTES)), np.uint8)
        halves = np.stack((rows >> 4, rows & 15), 1).reshape(end - start, LAYERS, -1)
        pages, rows_in = places(item.pages, start, end)
        self._memory[pages, :, rows_in] = self._codes[halves]

    def _read(self, pages: Sequence[int], tokens: int) -> Iterable[memoryview]:
        yield self._between(pages, 0, tokens).data

    def _between(self, table: Sequence[int], begin: int, end: int) -> NDArray[np.uint8]:
        """Returns the rows of positions ``begin`` … ``end`` - 1, (tokens, ROW_BYTES)."""
        pages, rows_in = places(table, begin, end)
        found = self._memory[pages, :, rows_in].reshape(end - begin, -1)
        numbers = to_float32(np.ascontiguousarray(found).data.cast("B"), self._dtype).reshape(found.shape)
        halves = np.clip(np.rint(np.nan_to_num(numbers)) + LOWEST, 0, 15).astype(np.uint8)
        if self._exact is not None and not np.array_equal(self._exact[halves], found):
            self._violated(f"{self.spec.layout.fidelity} pages hold KV that was less exact")
        return halves[:, ::2] << 4 | halves[:, 1::2]
