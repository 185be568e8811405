"""Measures what a linear layer of 1 to 16 rows takes beside a single row, and beside another build of the library.

Each weight form multiplies the matrices of a decode step, as often as there are layers, so that weights come from
memory. Rounds take all forms and numbers of rows in turn; ratios are within a round, medians over rounds. Knows
nothing of attention or of engines.

    python -m bench.linear_rows [--size 150M] [--forms int8,bf16] [--rows 1,2,3,4,5,6,7,8] [--rounds 15]
    python -m bench.linear_rows --against OTHER.so     (what ``baton.kernels.abi.build`` made of another checkout)

``--cpu`` computes on one thread and counts its CPU time: for a machine with other work, where no core is ours.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from baton.bench.engine.models import SIZES
from baton.bench.rows import median, paired
from baton.kernels.abi import native
from baton.kernels.linear import packed
from baton.kernels.linear.cpu import ARGUMENTS, prepared
from baton.kernels.linear.packed import PackedWeight

LAYERS = 6  # of a model: more than the caches hold
GROUP = 128

Pack = Callable[[torch.Tensor], PackedWeight]
Calls = list[Callable[[], None]]


def _e4m3(weight: torch.Tensor) -> PackedWeight:
    scale = weight.abs().amax(1) / 448
    return packed.pack_e4m3((weight / scale[:, None]).to(torch.float8_e4m3fn), scale, packed.E4M3_A16)


FORMS: dict[str, Pack] = {
    "bf16": packed.pack_bf16,
    "int8": lambda w: packed.quantize(w, 8, 0),
    "int4": lambda w: packed.quantize(w, 4, GROUP),
    "int8 weight-only": lambda w: packed.quantize(w, 8, 0).with_bf16_rows(),
    "int8 g128 weight-only": lambda w: packed.quantize(w, 8, GROUP).with_bf16_rows(),
    "int4 weight-only": lambda w: packed.quantize(w, 4, GROUP).with_bf16_rows(),
    "e4m3 weight-only": _e4m3,
}


def shapes(size: str) -> list[tuple[int, int]]:
    """Returns (outputs, inputs) of one layer's matrices, as the step runs them."""
    s = SIZES[size]
    hidden, wide = s["hidden_size"], s["intermediate_size"]
    kv = hidden // s["num_attention_heads"] * s["num_key_value_heads"]
    return [(hidden + 2 * kv, hidden), (hidden, hidden), (2 * wide, hidden), (hidden, wide)]


def weights(size: str, pack: Pack) -> list[PackedWeight]:
    """Returns the matrices of LAYERS layers with random weights."""
    made = [pack(torch.randn(shape)) for shape in shapes(size)]
    return [one if not layer else _copied(one) for layer in range(LAYERS) for one in made]


def _copied(weight: PackedWeight) -> PackedWeight:
    return packed.own_rows(weight, [(0, weight.n)])


def calls(library: ctypes.CDLL, made: list[PackedWeight], rows: int) -> Calls:
    """Returns one call per matrix, of ``rows`` rows."""
    function = native.declare(library, "linear", *ARGUMENTS)
    x = {weight.k: torch.randn(rows, weight.k) for weight in made}
    out = {weight.n: torch.empty(rows, weight.n) for weight in made}
    return [prepared(function, x[weight.k], weight, out[weight.n]) for weight in made]


def seconds(timed: Calls, clock: Callable[[], float]) -> float:
    """Returns the seconds that all calls take, one after the other."""
    began = clock()
    for call in timed:
        call()
    return clock() - began


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="150M")
    parser.add_argument("--forms", default="int8,bf16")
    parser.add_argument("--rows", default="1,2,3,4,5,6,7,8")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--against", type=Path)
    args = parser.parse_args()
    own = native.library()
    assert own is not None, "there is no native library"
    libraries = [own] if args.against is None else [own, native.load(args.against)]
    for library in libraries:
        library.baton_set_threads(ctypes.c_int32(1 if args.cpu else args.threads))
    clock = time.thread_time if args.cpu else time.perf_counter
    forms, counts = args.forms.split(","), [int(rows) for rows in args.rows.split(",")]
    made = {form: weights(args.size, FORMS[form]) for form in {*forms, "bf16"}}
    timed = {
        (form, rows, at): calls(library, made[form], rows)
        for form in made
        for rows in counts
        for at, library in enumerate(libraries)
    }
    took: dict[tuple[str, int, int], list[float]] = {key: [] for key in timed}
    for _ in range(args.rounds + 1):
        for key, all_calls in timed.items():
            took[key].append(seconds(all_calls, clock))
    took = {key: found[1:] for key, found in took.items()}
    shown = Table("form", "rows", "ms", "GB/s", f"x of {counts[0]} rows", "x of bf16", "x of the other", box=None)
    for form in forms:
        size = sum(weight.nbytes for weight in made[form])
        for rows in counts:
            mine = took[form, rows, 0]
            beside = f"{paired(mine, took[form, rows, 1]):.3f}" if len(libraries) > 1 else ""
            shown.add_row(
                *(form, str(rows), f"{median(mine) * 1e3:.2f}", f"{size / median(mine) / 1e9:.1f}"),
                f"{paired(mine, took[form, counts[0], 0]):.2f}",
                f"{paired(mine, took['bf16', rows, 0]):.2f}",
                beside,
            )
    Console(width=116).print(shown)


if __name__ == "__main__":
    main()
