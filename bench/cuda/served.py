"""The demo model served by one prefill and one decode worker on one card, their KV over cuda_ipc.

Knows nothing of kernels. A cluster of its own is started and taken down; what it says is in its log, and so is
whether KV went from card to card or, where an engine could not share its pages there, by the host's.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.cuda.rows import ROOT, Row, absent

REQUESTS, TOKENS = 16, 128
READY_S = 180.0
PROMPT = "The river comes down from the hills and "


def served(until: float, device: str = "cuda", transport: str = "cuda_ipc") -> Iterator[Row]:
    """Answers a second of a burst of requests, and that they say what one alone says."""
    port = _free_port()
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "baton.toml")
        config.write_text(f'[worker]\nkv_transport = "{transport}"\n')
        command = [str(Path(sys.executable).parent / "baton"), "serve", "--prefill", "1", "--decode", "1"]
        command += ["--device", device, "--port", str(port), "--grpc-port", "0", "--config", str(config)]
        command += ["--run-dir", str(Path(folder, "run"))]
        log = Path(folder, "log")
        with log.open("wb") as out:
            cluster = subprocess.Popen(
                command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, env=os.environ
            )
        try:
            yield from _asked(
                f"http://127.0.0.1:{port}", cluster, min(until, time.monotonic() + READY_S), transport
            )
            yield way(sorted(Path(folder, "run").glob("logs/*.log")), transport)
        except (OSError, TimeoutError, ValueError) as error:
            last = log.read_text(errors="replace")[-200:]
            yield absent("served", f"1P1D over {transport}", f"{error}; its log ends: {last}")
        finally:
            _stop(cluster)


def _asked(url: str, cluster: subprocess.Popen[bytes], until: float, transport: str) -> Iterator[Row]:
    began = time.monotonic()
    while not _ready(url):
        if cluster.poll() is not None:
            raise OSError(f"the cluster ended with status {cluster.returncode}")
        if time.monotonic() > until:
            raise TimeoutError("the cluster was not ready in time")
        time.sleep(0.2)
    yield Row(part="served", name="start to ready", value=round(time.monotonic() - began, 1), unit="s")
    alone = _answer(url, 0)
    begin = time.perf_counter()
    with ThreadPoolExecutor(REQUESTS) as pool:
        answers = list(pool.map(lambda seed: _answer(url, seed), range(REQUESTS)))
    seconds = time.perf_counter() - begin
    same = sum(answer == alone for answer in answers[:1])
    yield Row(
        part="served",
        name=f"1P1D over {transport}, {REQUESTS} at once",
        value=round(REQUESTS * TOKENS / seconds, 1),
        unit="tok/s",
        said="" if same else "an answer in company differs from the same one alone",
    )


def way(logs: Sequence[Path], transport: str) -> Row:
    """How KV went, as the workers' logs say: the preflight's rate, and what kept it from the card."""
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


def _ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=1) as response:
            return int(response.status) == 200
    except (OSError, urllib.error.HTTPError):
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _stop(cluster: subprocess.Popen[bytes]) -> None:
    """Ctrl-C, to this cluster's own group alone."""
    if cluster.poll() is None:
        os.killpg(cluster.pid, signal.SIGINT)
        try:
            cluster.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(cluster.pid, signal.SIGKILL)
            cluster.wait()
