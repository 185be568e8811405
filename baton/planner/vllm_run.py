"""A recorded vLLM run: a folder with requests.jsonl, meta.json and config.json (LLMServingSim's layout).

Knows nothing of simulation. What the engine was told comes from meta.json, the hardware from config.json; when the
engine's count of KV blocks wasn't recorded, it is what memory leaves beside the weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from baton.planner.model_shape import ModelShape
from baton.planner.operators import Link
from baton.planner.vllm_engine import VllmSettings
from baton.protos.errors import ConfigError
from baton.protos.nouns import BLOCK_TOKENS

GIB = 1 << 30


class Recorded(msgspec.Struct, frozen=True):
    """One request of a run. ``arrival_time`` is on the client's clock, the others on the engine's, in seconds."""

    request_id: str
    input_toks: int
    output_toks: int
    arrival_time: float
    queued_ts: float
    scheduled_ts: float
    first_token_ts: float
    last_token_ts: float


class VllmRun(msgspec.Struct, frozen=True):
    """The run and what it ran on. ``link`` is None on one rank, or where the folder doesn't say."""

    model: str
    tp: int
    requests: tuple[Recorded, ...]
    meta: dict[str, Any]
    instance: dict[str, Any]
    link: Link | None


def load_run(folder: str) -> VllmRun:
    """Read a run's folder. Raises ConfigError naming the file, and the line where there is one."""
    home = Path(folder)
    meta, config = _json(home / "meta.json"), _json(home / "config.json")
    try:
        instance = config["nodes"][0]["instances"][0]
        model, tp = str(meta["model"]), int(meta["engine_kwargs"].get("tensor_parallel_size") or 1)
        _require_one_engine(meta["engine_kwargs"], instance)
        link = Link(float(config["link_bw"]) * 1e9, float(config["link_latency"]) * 1e-9) if tp > 1 else None
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ConfigError(f"{home}: meta.json or config.json lacks {error}", "run") from error
    return VllmRun(model, tp, _requests(home / "requests.jsonl"), meta, instance, link)


def _require_one_engine(asked: dict[str, Any], instance: dict[str, Any]) -> None:
    for field, value, alone in (
        ("data_parallel_size", asked.get("data_parallel_size") or 1, 1),
        ("pipeline_parallel_size", asked.get("pipeline_parallel_size") or 1, 1),
        ("pd_type", instance.get("pd_type"), None),
    ):
        if value != alone:
            raise ConfigError(f"the run has {field} {value}; only runs of one engine can be given back", "run")


def settings_of(run: VllmRun, shape: ModelShape) -> VllmSettings:
    """The engine's settings. vLLM keeps the first of its blocks for itself."""
    asked = run.meta["engine_kwargs"]
    resolved = run.meta.get("resolved_config") or {}
    scheduler, cache = resolved.get("scheduler_config") or {}, run.meta.get("kv_cache") or {}
    blocks = int(cache.get("num_gpu_blocks") or _blocks_that_fit(run, shape))
    return VllmSettings(
        pages=blocks * int(cache.get("block_size") or BLOCK_TOKENS) // BLOCK_TOKENS - 1,
        max_num_seqs=int(asked.get("max_num_seqs") or 256),
        max_num_batched_tokens=int(asked.get("max_num_batched_tokens") or 2048),
        reserve_full_isl=bool(scheduler.get("scheduler_reserve_full_isl", True)),
        async_scheduling=bool(scheduler.get("async_scheduling", True)),
        prefix_caching=bool(cache.get("enable_prefix_caching", True)),
    )


def _blocks_that_fit(run: VllmRun, shape: ModelShape) -> int:
    memory = run.instance.get("npu_mem") or {}
    try:
        room = float(memory["mem_size"]) * GIB * float(memory["mem_util"]) - shape.weight_bytes / run.tp
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"without kv_cache.num_gpu_blocks in meta.json, config.json needs {error}", "run"
        ) from error
    blocks = int(room / (shape.kv_bytes_per_token / run.tp * BLOCK_TOKENS))
    if blocks < 2:
        raise ConfigError(f"{shape.name} on {run.tp} ranks leaves no memory for KV there", "run")
    return blocks


def _requests(file: Path) -> tuple[Recorded, ...]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"a run needs {file}: {error}", "run") from error
    found = [_request(file, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise ConfigError(f"{file} holds no request", "run")
    return tuple(found)


def _request(file: Path, number: int, line: str) -> Recorded:
    try:
        found = msgspec.json.decode(line, type=Recorded)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{file} line {number}: {error}", "run") from error
    if found.input_toks < 1 or found.output_toks < 1:
        raise ConfigError(f"{file} line {number}: input_toks and output_toks must be 1 or more", "run")
    return found


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"a run needs {file}: {error}", "run") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file} must hold an object", "run")
    return found
