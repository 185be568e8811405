"""The demo model served by one prefill and one decode worker on one card, their KV over cuda_ipc.

Knows nothing of kernels. A cluster of its own is started and taken down; what it says is in its log, and so is
whether KV went from card to card or, where an engine could not share its pages there, by the host's.
"""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.cuda.rows import Row, absent

REQUESTS, TOKENS = 16, 128
PROMPT = "The river comes down from the hills and "


def served(device: str = "cuda", transport: str = "cuda_ipc") -> Iterator[Row]:
    """Answers a second of a burst of requests, and that they say what one alone says."""
    from baton.launch.fleet import Fleet

    began = time.monotonic()
    worker = {"device": device, "kv_transport": transport}
    with Fleet(cluster={"prefill": 1, "decode": 1}, worker=worker) as fleet:
        yield Row(part="served", name="start to ready", value=round(time.monotonic() - began, 1), unit="s")
        yield _asked(fleet.url, transport)
        logs = sorted(fleet.files.logs.glob("*.log"))
        yield way(logs, transport)


def _asked(url: str, transport: str) -> Row:
    alone = [_answer(url, seed) for seed in range(2)]
    begin = time.perf_counter()
    with ThreadPoolExecutor(REQUESTS) as pool:
        answers = list(pool.map(lambda seed: _answer(url, seed), range(REQUESTS)))
    seconds = time.perf_counter() - begin
    same = sum(mine == theirs for mine, theirs in zip(answers, alone, strict=False))
    return Row(
        part="served",
        name=f"1P1D over {transport}, {REQUESTS} at once",
        value=round(REQUESTS * TOKENS / seconds, 1),
        unit="tok/s",
        said="" if same == len(alone) else "an answer in company differs from the same one alone",
    )


def way(logs: Sequence[Path], transport: str) -> Row:
    """Returns a row on how KV travelled, from the workers' logs: the preflight's rate, and what kept KV off the
    card.
    """
    said = "\n".join(path.read_text(errors="replace") for path in logs)
    name = f"KV over {transport}, as the preflight measured it"
    found = re.search(rf"KV to \S+: {transport}, ([\d.]+) GB/s, ([\d.]+) ms", said)
    if found is None:
        return absent("served", name, f"no worker's log says that KV goes by {transport}")
    why = re.search(r"[^\n]*(?:are not shared|not from the card|pages are not pinned)[^\n]*", said)
    note = why[0].strip() if why else f"a small frame takes {found[2]} ms"
    return Row(part="served", name=name, value=float(found[1]), unit="GB/s", said=note)


def _answer(url: str, number: int) -> str:
    body = {
        "model": "demo",
        "prompt": f"{PROMPT}{number}",
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return str(json.load(response)["choices"][0]["text"])
