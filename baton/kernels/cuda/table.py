"""Writes docs/cuda.md: which forms of each op compile, ran on the SIMT shim, and ran on a GPU. Torch-free.

The facts come from files: ``forms.json`` names the forms that an op's suite covers and the kernels of each,
``bits.json`` those of them whose rows may have other bits in company than alone, ``ledger.json`` the sources that
nvcc compiled and their kernels, ``ran.json`` those with which the suites passed on the shim and the kernels that
these launched (``make cuda-check ARGS=--write`` writes it), bench/results/gpu.json the same of a GPU
(bench/gpu.py), and ``page.md`` the text above the table. A form none of whose runs launched each of its kernels has
not run, whatever passed.

    python -m baton.kernels.cuda.table             writes the page
    python -m baton.kernels.cuda.table --check     exit status 1 if a record is of other sources than these
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from baton.kernels.abi.build import KERNELS
from baton.kernels.cuda import build, ledger

HERE = Path(__file__).parent
FORMS, BITS, RAN, WORDS = (HERE / "records" / name for name in ("forms.json", "bits.json", "ran.json", "page.md"))
PAGE = KERNELS.parents[1] / "docs" / "cuda.md"  # the page that the table stands in
# What bench/gpu.py found on a GPU; missing where it has not run.
ON_GPU = KERNELS.parents[1] / "bench" / "results" / "gpu.json"
NOWHERE = "**No kernel on this page has run on a GPU.** No speed is claimed of any."
NOT_LISTED = "(no suite on the shim yet)"
RIGHT = ("checks", "shapes")  # the parts of bench/gpu.py whose rows say whether results were right
# Forms that dispatch takes on a card at large shapes alone, for which the suite is too small; and how the names of
# bench/gpu.py's rows end that have such shapes.
LARGE = {
    ("linear", "many rows by wgmma: bf16, W8A8, fp8 e4m3"): ("bf16 M=2048", "int8 M=2048", "fp8 e4m3 M=2048"),
    ("linear", "W4A8"): ("int4 g128 M=2048",),
}


def keys() -> dict[str, str]:
    """Returns the hash of each op's present sources."""
    return {op: build.source_key(op) for op in build.ops()}


def mark_run(launched: Iterable[str], ops: Collection[str] = ()) -> None:
    """Records that the suites of the ops in ``forms.json``, or of ``ops`` alone, passed on the shim with the
    present sources, and which kernels they ``launched``, each as "op kernel".
    """
    earlier, forms = _read(RAN), _read(FORMS)
    found = {
        op: earlier[op] if ops and op not in ops else {"sources": key, "launched": of_op(launched, op)}
        for op, key in keys().items()
        if op in forms and (not ops or op in ops or op in earlier)
    }
    RAN.write_text(json.dumps(found, indent=1) + "\n")


def of_op(launched: Iterable[str], op: str) -> list[str]:
    """Returns the kernels of ``op`` among those ``launched``, sorted."""
    return sorted(kernel for of, _, kernel in (each.partition(" ") for each in launched) if of == op)


def rows() -> list[tuple[str, str, str, str, str, str]]:
    """Returns the table's rows: op, form, which bits are promised, and "yes" or "no" for compiles, ran on the shim,
    ran on a GPU.
    """
    forms: dict[str, dict[str, list[str]]] = _read(FORMS)
    bits: dict[str, dict[str, str]] = _read(BITS)
    compiled, ran = _read(ledger.LEDGER).get("sources", {}), _read(RAN)
    found = []
    for op, key in keys().items():
        compiles = "yes" if compiled.get(op) == key else "no"
        on_shim = ran.get(op, {})
        kept = bits.get(op, {})
        for form in forms.get(op, [NOT_LISTED]):
            all_launched = not unlaunched(op, form, on_shim.get("launched", ()))
            simt = "yes" if on_shim.get("sources") == key and all_launched else "no"
            gpu = "yes" if ran_on_gpu(op, form, key) else "no"
            found += [(op, form, kept.get(form, kept.get("*", "yes")), compiles, simt, gpu)]
    return found


def unlaunched(op: str, form: str, launched: Iterable[str]) -> list[str]:
    """Returns the kernels of ``form`` that are not among those ``launched``."""
    patterns, compiled = _read(FORMS).get(op, {}).get(form, ()), _read(ledger.LEDGER).get("kernels", {}).get(op, ())
    wanted = [kernel for kernel in compiled if any(fnmatchcase(kernel, pattern) for pattern in patterns)]
    return sorted(set(wanted) - set(launched))


def ran_on_gpu(op: str, form: str, key: str) -> bool:
    """Returns whether ``form`` was right on a GPU with the sources of hash ``key``: the op's suite passed there,
    tests and shapes that were right launched each of its kernels, and, where the suite is too small for the form,
    every large shape of it was right.
    """
    done = [row for row in _read(ON_GPU).get("rows", []) if row["against"] == key]
    suite = any((row["part"], row["name"], row["value"]) == ("checks", op, 1) for row in done)
    shapes = [row for row in done if row["part"] == "shapes"]
    large = all(_all_right(shapes, ending) for ending in LARGE.get((op, form), ()))
    return suite and large and not unlaunched(op, form, launched_on_gpu(op, key))


def launched_on_gpu(op: str, key: str) -> set[str]:
    """Returns the kernels of ``op`` that tests and shapes launched on a GPU that were right, with the sources of
    hash ``key``.
    """
    done = _read(ON_GPU).get("rows", [])
    right = [row for row in done if row["against"] == key and row["value"] == 1 and row["part"] in RIGHT]
    return {kernel for row in right for kernel in row.get("launched", ())}


def _all_right(shapes: list[dict[str, Any]], ending: str) -> bool:
    found = [row["value"] == 1 for row in shapes if row["name"].endswith(f" {ending}")]
    return bool(found) and all(found)


def launches() -> list[tuple[str, str, str, str]]:
    """Returns a row for each op: how many kernels its library has, how many the suites launched on the shim and on
    a GPU, and the names of those that neither did.
    """
    compiled, ran, found = _read(ledger.LEDGER).get("kernels", {}), _read(RAN), []
    for op, key in keys().items():
        every = set(compiled.get(op, ()))
        mine = ran.get(op, {})
        shim = every & set(mine.get("launched", ()) if mine.get("sources") == key else ())
        gpu = every & launched_on_gpu(op, key)
        left = ", ".join(f"`{kernel}`" for kernel in sorted(every - shim - gpu))
        found.append((op, f"{len(shim)} of {len(every)}", f"{len(gpu)} of {len(every)}", left))
    return found


def gpu_sentence() -> str:
    """Returns the sentence of docs/cuda.md on where kernels have run."""
    if not any(row[-1] == "yes" for row in rows()):
        return NOWHERE
    run = _read(ON_GPU)
    return (
        f"GPU, yes: the op's suite passed on {run['machine']} by these very sources (commit {run['commit']}, "
        f"{run['date']}). **No other kernel on this page has run on a GPU.**"
    )


def text() -> str:
    """Returns the text of docs/cuda.md, made from the records."""
    counted = "".join(f"| {' | '.join(row)} |\n" for row in launches())
    words = WORDS.read_text().replace("<!-- gpu -->", gpu_sentence()).replace("<!-- launches -->\n", counted)
    return words + "".join(f"| {' | '.join(row)} |\n" for row in rows())


def current() -> bool:
    """Returns whether docs/cuda.md is up to date; True outside of a checkout, which has none."""
    return not PAGE.parent.is_dir() or (PAGE.exists() and PAGE.read_text() == text())


def stale() -> list[str]:
    """Returns a message for each record of sources other than the present ones: compilations, suites, the page."""
    compiled, ran, forms, now = _read(ledger.LEDGER).get("sources", {}), _read(RAN), _read(FORMS), keys()
    said = [f"{op}: what was compiled were other sources" for op in now if compiled.get(op) != now[op]]
    other = [op for op in now if op in forms and ran.get(op, {}).get("sources") != now[op]]
    said += [f"{op}: its suite ran on other sources" for op in other]
    if not current():
        said.append(f"{PAGE.name} is not of these records: python -m baton.kernels.cuda.table writes it")
    return said


def check() -> int:
    """Prints what is stale; returns exit status 1 if anything is, else 0. Needs no compiler."""
    found = stale()
    for line in found:
        print(f"cuda: {line}", file=sys.stderr)
    if found:
        print("where sources changed: make cuda-check ARGS=--write", file=sys.stderr)
    return bool(found)


def _read(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else {}


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        sys.exit(check())
    else:
        PAGE.write_text(text())
