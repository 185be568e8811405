"""Our clusters of one machine that are measured: who reads and writes by one worker, or by two."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from baton.launch.fleet import Fleet
from bench.serving.client import Ask, completions

MODEL = "m"
COLOCATED, SPLIT, LENT = "colocated", "1P1D, own cores", "1P1D, lent cores"
PATIENT: dict[str, object] = {"stall_s": 120.0}  # on a slow machine a step of a whole prompt takes seconds
KINDS: dict[str, dict[str, object]] = {
    COLOCATED: {"prefill": 0, "decode": 1, "colocated": True},
    SPLIT: {"prefill": 1, "decode": 1, "lend_cores": False},
    LENT: {"prefill": 1, "decode": 1},
}


@contextlib.contextmanager
def serving(kind: str, model: Path, dtype: str, pace_s: float | None = None) -> Iterator[Ask]:
    """Runs the cluster of ``kind`` while entered; yields what asks it. A split one hands every prompt over.

    ``pace_s`` is ``worker.pace_beside_prompts_s``, None for its default.
    """
    model_of = {"model": str(model.resolve()), "model_name": MODEL, "dtype": dtype, "kv_memory_bytes": 1 << 30}
    pace: dict[str, object] = {} if pace_s is None else {"pace_beside_prompts_s": pace_s}
    router = PATIENT | ({"local_prefill_max_tokens": 0} if kind != COLOCATED else {})
    with Fleet(cluster=KINDS[kind], worker=model_of | PATIENT | pace, router=router) as fleet:
        yield completions(fleet.port, MODEL)
