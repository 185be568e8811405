"""Measures what a linear layer of 1 to 16 rows takes beside a single row, and beside another build of the library.

Each weight form multiplies the matrices of a decode step, in as many copies as no cache holds. A form's rounds take
it, bfloat16 and reading in turn; ratios are within a round, medians over rounds. Two ceilings stand beside a single
row: "of reading" is what its bytes take when they are read where they lie, by as many calls and threads, and "of
memory" what they would take in one long stream. Knows nothing of attention or of engines.

    python -m bench.linear_rows [--size 150M] [--forms int8,bf16 | every] [--rows 1,2,3,4,5,6,7,8] [--rounds 15]
    python -m bench.linear_rows --against OTHER.so     (what ``baton.kernels.abi.build`` made of another checkout)

``--cpu`` computes on one thread and counts its CPU time: for a machine with other work, where no core is ours.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from baton.bench.engine.memory import MemoryRead
from baton.bench.engine.models import SIZES
from baton.bench.rows import median, paired
from baton.kernels.abi import native
from baton.kernels.abi.native import I64, P
from baton.kernels.linear import packed
from baton.kernels.linear.codes import E2M1_TWICE, Codes
from baton.kernels.linear.cpu import ARGUMENTS, prepared
from baton.kernels.linear.integers import Integers, Part, ScaledFloats, packed_of
from baton.kernels.linear.packed import PackedWeight
from baton.quantize.grids import NF4

FAR = 200 << 20  # bytes of matrices, at least: more than the caches hold
GROUP = 128

Pack = Callable[[torch.Tensor], PackedWeight]
Calls = list[Callable[[], object]]


def _packed(part: Part) -> PackedWeight:
    found = packed_of([part])
    assert found is not None
    return found


def _integers(bits: int, group: int, mins: bool = False, **more: Any) -> Pack:
    """Integers with scales as checkpoints have them, any float16 numbers; speed doesn't depend on them."""

    def pack(weight: torch.Tensor) -> PackedWeight:
        n, k = weight.shape
        q = torch.randint(-(1 << (bits - 1)), 1 << (bits - 1), (n, k), dtype=torch.int8)
        scales = torch.rand(n, -(-k // group) if group else 1).mul_(1e-3).add_(1e-4)
        return _packed(Integers(q, bits, group, scales, 7.3 * scales if mins else None, **more))

    return pack


def _codes(table: Sequence[float], group: int) -> Pack:
    def pack(weight: torch.Tensor) -> PackedWeight:
        n, k = weight.shape
        codes = torch.randint(0, 16, (n, k), dtype=torch.uint8)
        return _packed(Codes(codes, torch.tensor(table, dtype=torch.float32), group, torch.rand(n, -(-k // group))))

    return pack


def _e4m3(group: int = 0, rows: float | None = None) -> Pack:
    def pack(weight: torch.Tensor) -> PackedWeight:
        narrow = (weight / weight.abs().amax(1, keepdim=True) * 448).to(torch.float8_e4m3fn)
        scales = torch.rand(len(weight), -(-weight.shape[1] // group) if group else 1)
        found = _packed(ScaledFloats(narrow, scales, group, rows))
        return found if rows is None else found.with_published_rows()

    return pack


OWN: dict[str, Pack] = {
    "bf16": packed.pack_bf16,
    "int8": lambda w: packed.quantize(w, 8, 0),
    "int8 g32": _integers(8, 32),  # Q8_0
    "int8 g32 mins": _integers(8, 32, mins=True),  # Q5_1, Q5_K
    "int8 g16": _integers(8, 16),  # Q6_K
    "int8 g128": lambda w: packed.quantize(w, 8, GROUP),
    "int8 outliers": _integers(8, 0, outliers=6.0),  # LLM.int8
    "int4": lambda w: packed.quantize(w, 4, GROUP),
    "int4 g32": lambda w: packed.quantize(w, 4, 32),
    "int4 g128 stored": _integers(4, GROUP),  # GPTQ, AWQ, compressed-tensors
    "int4 g128 mins": _integers(4, GROUP, mins=True),
    "int4 g32 stored": _integers(4, 32),  # Q4_0
    "int4 g32 mins": _integers(4, 32, mins=True),  # Q4_1, Q4_K
    "nf4": _codes(NF4, 64),
    "mxfp4": _codes(E2M1_TWICE, 32),
    "nvfp4": _codes(E2M1_TWICE, 16),
    "e4m3 rows": _e4m3(rows=0.0),
    "e4m3 rows g128": _e4m3(GROUP, 0.0),
}
WEIGHT_ONLY: dict[str, Pack] = {
    f"{form} weight-only": lambda weight, pack=pack: pack(weight).with_bf16_rows()  # type: ignore[misc]
    for form, pack in OWN.items()
    if form != "bf16" and not form.startswith("e4m3")
}
FORMS = {**OWN, **WEIGHT_ONLY, "e4m3 weight-only": _e4m3(), "e4m3 g128 weight-only": _e4m3(GROUP)}
EVERY = "every"  # form of FORMS


def shapes(size: str) -> list[tuple[int, int]]:
    """Returns (outputs, inputs) of one layer's matrices, as the step runs them."""
    s = SIZES[size]
    hidden, wide = s["hidden_size"], s["intermediate_size"]
    kv = hidden // s["num_attention_heads"] * s["num_key_value_heads"]
    return [(hidden + 2 * kv, hidden), (hidden, hidden), (2 * wide, hidden), (hidden, wide)]


def weights(size: str, pack: Pack) -> list[PackedWeight]:
    """Returns the matrices of as many layers as take FAR bytes, with random weights."""
    made = [pack(torch.randn(shape)) for shape in shapes(size)]
    layers = -(-FAR // sum(one.nbytes for one in made))
    return [one if not layer else _copied(one) for layer in range(layers) for one in made]


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


class Reading:
    """Reads the bytes of matrices where they lie, a call for each, with the threads that multiply them."""

    def __init__(self, made: list[PackedWeight]) -> None:
        read = native.function("ceiling_read", P, I64)
        self._calls: Calls = [partial(read, one.data.data_ptr(), one.data.nbytes) for one in made]
        self._share = sum(one.nbytes for one in made) / sum(one.data.nbytes for one in made)

    def seconds(self, clock: Callable[[], float]) -> float:
        """Returns the seconds of reading all of them; scales count as so many more bytes."""
        return seconds(self._calls, clock) * self._share


class Form:
    """A form's matrices, the calls by number of rows and library, and what they took, round by round."""

    def __init__(self, name: str, size: str, counts: Sequence[int], libraries: Sequence[ctypes.CDLL]) -> None:
        self.name = name
        self.made = weights(size, FORMS[name])
        self.nbytes = sum(one.nbytes for one in self.made)
        self._calls = {
            (rows, at): calls(library, self.made, rows) for rows in counts for at, library in enumerate(libraries)
        }
        self.took: dict[tuple[int, int], list[float]] = {key: [] for key in self._calls}

    def round(self, clock: Callable[[], float]) -> None:
        """Takes the time of each call once."""
        for key, timed in self._calls.items():
            self.took[key].append(seconds(timed, clock) / self.nbytes)


class Measured:
    """One form beside bfloat16 and beside reading, over some rounds after a first one that counts for nothing."""

    def __init__(self, form: Form, plain: Form, rounds: int, clock: Callable[[], float], ceilings: bool) -> None:
        self._form, self._plain = form, plain
        self._read: list[float] = []
        self._stream: list[float] = []
        reading, memory = Reading(form.made), MemoryRead()
        for each in (form, plain):
            each.took = {key: [] for key in each.took}
        for _ in range(rounds + 1):
            if ceilings:
                self._read.append(reading.seconds(clock) / form.nbytes)
                self._stream.append(1 / memory.rate())
            form.round(clock)
            if plain is not form:
                plain.round(clock)

    def cells(self, rows: int, first: int, libraries: int) -> list[str]:
        """Returns a line of the table."""
        form = self._form
        mine = form.took[rows, 0][1:]
        ceilings = [self._read[1:], self._stream[1:]] if rows == 1 and self._read else []
        shares = [f"{paired(ceiling, mine):.2f}" for ceiling in ceilings] or ["", ""]
        weight = form.nbytes / self._plain.nbytes * self._per_layer()
        return [
            *(form.name, str(rows), f"{1 / median(mine) / 1e9:.1f}", *shares),
            f"{paired(mine, form.took[first, 0][1:]):.2f}",
            f"{paired(mine, self._plain.took[rows, 0][1:]) * weight:.2f}",
            f"{paired(mine, form.took[rows, 1][1:]):.3f}" if libraries > 1 else "",
        ]

    def _per_layer(self) -> float:
        """Returns how many layers of bfloat16 stand beside one of the form's."""
        return len(self._plain.made) / len(self._form.made)


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
    names, counts = args.forms.split(","), [int(rows) for rows in args.rows.split(",")]
    plain = Form("bf16", args.size, counts, libraries)
    columns = (
        "form",
        "rows",
        "GB/s",
        "of reading",
        "of memory",
        f"x of {counts[0]} rows",
        "x of bf16",
        "x of the other",
    )
    shown = Table(*columns, box=None)
    for name in FORMS if names == [EVERY] else names:
        form = plain if name == "bf16" else Form(name, args.size, counts, libraries)
        found = Measured(form, plain, args.rounds, clock, not args.cpu)
        for rows in counts:
            shown.add_row(*found.cells(rows, counts[0], len(libraries)))
    Console(width=116).print(shown)


if __name__ == "__main__":
    main()
