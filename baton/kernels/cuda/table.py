"""docs/cuda.md: which op, in which form, compiles, ran on the SIMT shim, ran on a GPU. Torch-free.

Knows nothing of how any of it is found out: ``forms.json`` names the forms that an op's suite covers,
``ledger.json`` what nvcc compiled, ``ran.json`` by which sources the suites passed on the shim (``make cuda-check
ARGS=--write`` writes it), ``page.md`` the words above the table.

    python -m baton.kernels.cuda.table    writes the page
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from baton.kernels.abi.build import KERNELS
from baton.kernels.cuda import build, ledger

HERE = Path(__file__).parent
FORMS, RAN, WORDS = HERE / "forms.json", HERE / "ran.json", HERE / "page.md"
PAGE = KERNELS.parents[1] / "docs" / "cuda.md"
NOT_LISTED = "(no suite on the shim yet)"


def source_key(op: str) -> str:
    """Of everything that the op's kernels are made of."""
    own = sorted(path for path in (KERNELS / op).iterdir() if path.suffix in (".cu", ".cuh", ".h"))
    shared = sorted((*(KERNELS / "cuda").glob("*.cuh"), KERNELS / "abi" / "paged.h"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in (*own, *shared))).hexdigest()[:16]


def mark_run() -> None:
    """Note that the suites of the ops that list forms passed on the shim, by the sources as they are."""
    RAN.write_text(json.dumps({op: source_key(op) for op in build.ops() if op in _read(FORMS)}, indent=1) + "\n")


def rows() -> list[tuple[str, str, str, str, str]]:
    """op, form, compiles, ran on the shim, ran on a GPU."""
    forms: dict[str, list[str]] = _read(FORMS)
    compiled, ran = _read(ledger.LEDGER).get("kernels", {}), _read(RAN)
    found = []
    for op in build.ops():
        state = "yes" if op in compiled else "no", "yes" if ran.get(op) == source_key(op) else "no"
        found += [(op, form, *state, "no") for form in forms.get(op, [NOT_LISTED])]
    return found


def text() -> str:
    """The page."""
    return WORDS.read_text() + "".join(f"| {' | '.join(row)} |\n" for row in rows())


def current() -> bool:
    """Whether the page is as it would be written; so it is where there is none, outside of a checkout."""
    return not PAGE.parent.is_dir() or (PAGE.exists() and PAGE.read_text() == text())


def _read(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else {}


if __name__ == "__main__":
    PAGE.write_text(text())
