"""Times products of bf16 matrices in panels, row by row, and by cuBLASLt, as a worker's start does.

Knows nothing of how the choice is made (engine/backends/cuda/product_choice.py), which each matrix's last row says.
"""

from __future__ import annotations

from collections.abc import Iterator

from baton.engine.backends.cuda.product_choice import Matrix, ProductTimes
from baton.engine.backends.cuda.products import library_path, open_library, try_matrix
from baton.kernels.cuda.library import DeviceError
from bench.cuda.cases import Part
from bench.cuda.clock import Call, measure
from bench.cuda.extent import used
from bench.cuda.ops import Ops
from bench.cuda.rows import Ceilings, Row, absent

SAMPLES = 12  # of a time; there are hundreds


def products(ops: Ops, top: Ceilings) -> Iterator[Row]:
    """Yields a row for each matrix and number of rows, and what a start would choose for the matrix."""
    try:
        open_library(ops.device, library_path())
    except DeviceError as error:
        if used().device == "cuda":
            yield absent("products", "cuBLASLt", f"can't be loaded from {library_path()!r}: {error}")
    for matrix in used().matrices.of:
        found = try_matrix(ops.device, used().device, matrix, _seconds, used().matrices.rows)
        yield from (_row(matrix, one) for one in found.times)
        yield Row(part="products", name=_name(matrix), value=float(found.by_row), unit="by rows", said=found.told)


def _row(matrix: Matrix, one: ProductTimes) -> Row:
    if one.by_row is None or one.panels is None:
        return Row(part="products", name=f"{_name(matrix)} M={one.rows}", said=f"WRONG: {one.told}")
    return Row(
        part="products",
        name=f"{_name(matrix)} M={one.rows}",
        value=round(one.best_by_row, 2),
        unit="us",
        against=f"panels {one.panels:.1f} us",
        ratio=round(one.panels / one.best_by_row, 4),
        said=one.told,
    )


def _name(matrix: Matrix) -> str:
    return f"bf16 {matrix.n} x {matrix.k}{' gated' if matrix.gated else ''}"


def _seconds(call: Call) -> float:
    return measure([call], SAMPLES).median


PARTS: dict[str, Part] = {"products": products}
