"""vLLM's CPU build as servers on this machine: one that reads and writes, or one of each with KV over NIXL.

Started with the settings that its documentation recommends for CPUs: threads bound to cores, space for KV set,
tcmalloc and OpenMP preloaded, torch.compile on. A split pair has half of the cores each, and a request goes as
vLLM's own example of a proxy sends it: one token from the server that reads, then the rest from the one that
writes, which fetches the KV. Knows nothing of measuring.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from baton.launch.ports import HOST, free_ports
from bench.peers.vllm_environment import NIXL_DELAY, VERSION, VllmEnvironment
from bench.serving.client import Ask, Event, answered, body_of, completions, streamed

MODEL, CONTEXT, SEQUENCES = "m", 2048, 64
UP_S, GRACE_S = 900.0, 20.0  # seconds to compile and start, and to end
KV_GIGABYTES, DELAY_US = "1", 1000  # of each server; between two looks of NIXL's progress thread
AGGREGATED = f"vLLM {VERSION}"
SPLIT = f"vLLM {VERSION} 1P1D (NIXL, progress thread every {DELAY_US} us)"
FETCH = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
         "remote_host": None, "remote_port": None}  # fmt: skip


@contextlib.contextmanager
def aggregated(found: VllmEnvironment, model: Path, dtype: str, log: Path) -> Iterator[Ask]:
    """Runs one server on all cores while entered; yields what asks it. Raises RuntimeError."""
    (port,) = free_ports(1)
    with _server(found, model, dtype, port, _cores(), log):
        _await_up([(port, log)])
        yield completions(port, MODEL)


@contextlib.contextmanager
def split(found: VllmEnvironment, model: Path, dtype: str, log: Path) -> Iterator[Ask]:
    """Runs a server that reads and one that writes while entered; yields what asks both. Raises RuntimeError."""
    reads, writes, *channels = free_ports(4)
    cores = _cores()
    half = max(1, len(cores) // 2)
    parts = (("kv_producer", reads, cores[:half]), ("kv_consumer", writes, cores[half:] or cores))
    with contextlib.ExitStack() as up:
        logs = []
        for (role, port, own), channel in zip(parts, channels, strict=True):
            logs.append((port, log.with_suffix(f".{role}.log")))
            up.enter_context(_server(found, model, dtype, port, own, logs[-1][1], _nixl(role), _side(channel)))
        _await_up(logs)
        yield through_both(reads, writes)


def through_both(reads: int, writes: int) -> Ask:
    """Returns what asks a split pair: the server at port ``reads`` first, then the one at ``writes``."""

    async def ask(prompt: list[int], tokens: int) -> AsyncIterator[Event]:
        headers, body = f"x-request-id: {uuid.uuid4()}\r\n", body_of(MODEL, prompt, tokens)
        first = body | {"max_tokens": 1, "stream": False, "kv_transfer_params": FETCH}
        told = await answered(reads, first, headers)
        asked = body | {"kv_transfer_params": told["kv_transfer_params"]}
        async for event in streamed(writes, asked, headers):
            yield event

    return ask


@contextlib.contextmanager
def _server(
    found: VllmEnvironment,
    model: Path,
    dtype: str,
    port: int,
    cores: Sequence[int],
    log: Path,
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[None]:
    command = [
        found.python, "-m", "vllm.entrypoints.cli.main", "serve", model.resolve(), "--host", HOST, "--port", port,
        "--served-model-name", MODEL, "--dtype", dtype, "--max-model-len", CONTEXT, "--max-num-seqs", SEQUENCES,
        "--no-enable-prefix-caching", *options,
    ]  # fmt: skip
    surroundings = os.environ | _environment(found, cores) | dict(environment or {})
    with open(log, "w") as written:
        process = subprocess.Popen(
            [str(part) for part in command],
            stdout=written,
            stderr=written,
            env=surroundings,
            start_new_session=True,
        )
    try:
        yield
    finally:
        _end(process)


def _environment(found: VllmEnvironment, cores: Sequence[int]) -> dict[str, str]:
    home = found.python.parents[1]
    own = {"HOME": str(home / "home"), "VLLM_CACHE_ROOT": str(home / "cache")}
    (home / "home").mkdir(exist_ok=True)
    bound = {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)), "VLLM_CPU_KVCACHE_SPACE": KV_GIGABYTES}
    quiet = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_HOST_IP": HOST, "GLOO_SOCKET_IFNAME": "lo"}
    return own | bound | quiet | {"LD_PRELOAD": ":".join(map(str, found.preload)), "PYTHONHASHSEED": "0"}


def _nixl(role: str) -> tuple[str, str]:
    """The options of a server that hands KV over; ``role`` is kv_producer or kv_consumer."""
    extra = {"num_threads": 4}
    told = {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"}
    return "--kv-transfer-config", json.dumps(
        told | {"kv_load_failure_policy": "fail", "kv_connector_extra_config": extra}
    )


def _side(channel: int) -> dict[str, str]:
    side = {"VLLM_NIXL_SIDE_CHANNEL_HOST": HOST, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(channel)}
    return side | {"UCX_NET_DEVICES": "lo", "UCX_TLS": "tcp,posix,sysv,cma,self", NIXL_DELAY: str(DELAY_US)}


def _cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def _await_up(servers: Sequence[tuple[int, Path]]) -> None:
    deadline = time.monotonic() + UP_S
    for port, log in servers:
        while not _answers(port):
            if "Traceback" in log.read_text(errors="replace") or time.monotonic() > deadline:
                raise RuntimeError(f"vLLM did not come up; it said why in {log}: {_last_error(log)}")
            time.sleep(0.5)


def _answers(port: int) -> bool:
    with contextlib.suppress(urllib.error.URLError, OSError):
        with urllib.request.urlopen(f"http://{HOST}:{port}/health", timeout=2) as response:
            return bool(response.status == 200)
    return False


def _last_error(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if "Error" in line]
    return lines[-1][-300:] if lines else "it named no error"


def _end(process: subprocess.Popen[Any]) -> None:
    """Ends a server and all that it started, which are one session."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
