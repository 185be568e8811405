"""The estimates of docs/cuda.md: of the kernels' own tile sizes, and the table that the page has."""

from __future__ import annotations

import re

import pytest

from baton.kernels.abi.build import KERNELS
from baton.kernels.cuda import table
from baton.planner.costs.data_sheets import accelerators
from bench.cuda import paper


def constants(*files: str) -> dict[str, int]:
    """The whole numbers that the headers name."""
    text = "".join(re.sub(r"//.*", "", (KERNELS / file).read_text()) for file in files)
    return {name: int(value) for name, value in re.findall(r"\b([A-Z_]+) = (\d+)[,;]", text)}


def test_the_page_has_the_table_as_it_is_computed() -> None:
    assert paper.table() in table.WORDS.read_text()


def test_tiles_are_those_of_the_kernels() -> None:
    own = constants("linear/form.cuh", "linear/many/wide.cuh", "linear/many/prefill.cuh")
    assert paper.SKINNY.outputs == own["PLACES"]
    assert (paper.WIDE.rows, paper.WIDE.outputs) == (own["WIDE_ROWS"], own["WIDE_GROUPS"] * own["PLACES"])
    assert (paper.MANY.rows, paper.MANY.outputs) == (own["PREFILL_ROWS"], own["PREFILL_GROUPS"] * own["PLACES"])
    attention = constants("prompt_attention/groups.cuh", "cascade_attention/tiles.cuh")
    assert (attention["PAIR_ROWS"], attention["TILE_ROWS"]) == (paper.PAIR_ROWS, paper.TILE_ROWS)


@pytest.mark.parametrize(
    ("n", "m", "form", "parts"),
    [
        (4096, 64, "skinny", 1), (4096, 65, "wgmma", 8), (4096, 256, "wgmma", 4), (6144, 256, "wgmma", 2),
        (28672, 256, "wgmma", 1), (512, 128, "skinny", 1), (4096, 640, "wide", 1),
    ],
)  # fmt: skip
def test_the_form_is_the_one_that_dispatch_takes_on_132_multiprocessors(
    n: int, m: int, form: str, parts: int
) -> None:
    """The kernels themselves: tests/kernels/cuda/test_split.py."""
    assert (paper.tile_of(n, m).form, paper.parts_of(n, m)) == (form, parts)


def test_the_card_is_the_data_sheets() -> None:
    sheet = accelerators()["h100"]
    assert (sheet.memory_bytes_per_s, sheet.flops) == (paper.MEMORY, paper.FLOPS)


def test_a_step_of_one_row_takes_as_long_as_its_weights_from_memory() -> None:
    estimate = paper.product("o", 4096, 4096, 1)
    assert estimate.built.bound == "memory"
    assert estimate.built.seconds == pytest.approx(2 * 4096 * 4096 / 3.35e12, rel=0.01)


def test_no_estimate_is_below_its_floor() -> None:
    for one in paper.estimates():
        for work in filter(None, (one.built, one.planned)):
            assert work.seconds >= one.floor.seconds * 0.999
