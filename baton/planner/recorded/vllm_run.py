"""Recorded vLLM runs: a folder with requests.jsonl, meta.json and config.json (LLMServingSim's layout).

Knows nothing of simulation. The engine's settings come from meta.json (``engine_kwargs``, else the resolved
config), the hardware from config.json; if the engine's count of KV blocks wasn't recorded, it is computed from the
memory beside the weights. Requests without times (refused, cut off) are left out and counted.
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from baton.planner.costs.data_sheets import accelerators
from baton.planner.costs.model_shape import ModelShape
from baton.planner.costs.operators import RankLink
from baton.planner.recorded.vllm_engine import VllmSettings
from baton.protos.errors import ConfigError
from baton.protos.json import Json, JsonValue
from baton.protos.nouns import BLOCK_TOKENS

GIB = 1 << 30  # bytes
VLLM_SHARE = 0.9  # of a device's memory, unless it was told
NEEDED = ("output_toks", "queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts")


class RecordedRequest(msgspec.Struct, frozen=True):
    """Holds one answered request.

    Times are seconds on the engine's clock; ``arrival_time``, if known, on the client's.
    """

    input_toks: int
    output_toks: int
    queued_ts: float
    scheduled_ts: float
    first_token_ts: float
    last_token_ts: float
    arrival_time: float | None = None


class VllmRun(msgspec.Struct, frozen=True):
    """Holds a recorded run and what it ran on. ``link`` is None for one rank.

    ``left_out`` counts requests without times.
    """

    model: str
    tp: int
    requests: tuple[RecordedRequest, ...]
    meta: Json
    instance: Json
    link: RankLink | None
    left_out: int = 0

    def setting(self, name: str, section: str = "") -> JsonValue:
        """Returns a setting of the engine, as given or as it resolved it in ``section``; None if the run doesn't
        say.
        """
        asked = (self.meta.get("engine_kwargs") or {}).get(name)
        resolved = self.meta.get("resolved_config") or {}
        return asked if asked is not None else (resolved.get(section) or {}).get(name)


def load_run(folder: str) -> VllmRun:
    """Returns the run in ``folder``. Raises ConfigError naming the file, and the line if there is one."""
    home = Path(folder)
    meta, config = _json(home / "meta.json"), _json(home / "config.json")
    requests, left_out = _requests(home / "requests.jsonl")
    try:
        instance = config["nodes"][0]["instances"][0]
        run = VllmRun(str(meta["model"]), 1, requests, meta, instance, None, left_out)
        _require_one_engine(run, config)
        tp = run.setting("tensor_parallel_size", "parallel_config") or instance.get("tp_size") or 1
        tp = _count("tensor_parallel_size", tp)
        link = RankLink(float(config["link_bw"]) * 1e9, float(config["link_latency"]) * 1e-9) if tp > 1 else None
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{home}: meta.json or config.json lacks {error}", "run") from error
    return msgspec.structs.replace(run, tp=tp, link=link)


def _require_one_engine(run: VllmRun, config: Json) -> None:
    engines = sum(len(node["instances"]) for node in config["nodes"])
    for field, value, alone in (
        ("instances", engines, 1),
        ("data_parallel_size", run.setting("data_parallel_size", "parallel_config") or 1, 1),
        ("pipeline_parallel_size", run.setting("pipeline_parallel_size", "parallel_config") or 1, 1),
        ("pd_type", run.instance.get("pd_type"), None),
    ):
        if value != alone:
            raise ConfigError(f"the run has {field} {value}; only runs of one engine can be given back", "run")


def settings_of(run: VllmRun, shape: ModelShape) -> VllmSettings:
    """Returns the settings of the run's engine, with KV pages of 16 tokens, less the block that vLLM keeps for
    itself.

    Raises ConfigError.
    """
    try:
        return _settings(run, shape)
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"what meta.json says of the engine can't be read: {error}", "run") from error


def _settings(run: VllmRun, shape: ModelShape) -> VllmSettings:
    cache = run.meta.get("kv_cache") or {}
    blocks = cache.get("num_gpu_blocks") or run.setting("num_gpu_blocks", "cache_config") or _fitting(run, shape)
    size = cache.get("block_size") or run.setting("block_size", "cache_config") or BLOCK_TOKENS
    seqs = run.setting("max_num_seqs", "scheduler_config") or 256
    tokens = run.setting("max_num_batched_tokens", "scheduler_config") or 2048
    caching = cache.get("enable_prefix_caching", run.setting("enable_prefix_caching", "cache_config"))
    return VllmSettings(
        pages=_count("num_gpu_blocks", blocks) * _count("block_size", size) // BLOCK_TOKENS - 1,
        max_num_seqs=_count("max_num_seqs", seqs),
        max_num_batched_tokens=_count("max_num_batched_tokens", tokens),
        reserve_full_isl=_yes(run.setting("scheduler_reserve_full_isl", "scheduler_config")),
        async_scheduling=_yes(run.setting("async_scheduling", "scheduler_config")),
        prefix_caching=_yes(caching),
    )


def _count(name: str, value: JsonValue) -> int:
    if int(value) < 1:
        raise ConfigError(f"the run has {name} {value}; it must be 1 or more", "run")
    return int(value)


def _yes(value: object) -> bool:
    """vLLM's defaults, where nothing is said."""
    return True if value is None else bool(value)


def _fitting(run: VllmRun, shape: ModelShape) -> int:
    """Blocks of 16 in what memory leaves beside the weights; vLLM takes its share of all of a device's."""
    memory, device = run.instance.get("npu_mem") or {}, run.meta.get("hardware") or {}
    sheet = accelerators().get(str(run.instance.get("hardware", "")).lower())
    try:
        size = memory.get("mem_size")
        total = float(size) * GIB if size else float(device.get("device_total_memory_bytes") or 0)
        total = total or (sheet.memory if sheet else 0.0)
        share = memory.get("mem_util") or run.setting("gpu_memory_utilization", "cache_config") or VLLM_SHARE
        room = total * float(share) - shape.weight_bytes / run.tp
    except (TypeError, ValueError) as error:
        raise ConfigError(f"config.json: npu_mem: {error}", "run") from error
    if not total:
        raise ConfigError("without kv_cache.num_gpu_blocks in meta.json, config.json needs npu_mem.mem_size", "run")
    narrow = "fp8" in str(run.setting("kv_cache_dtype") or "")
    per_token = shape.kv_bytes_per_token / (shape.bytes_per_value if narrow else 1)
    blocks = int(room / (per_token / run.tp * BLOCK_TOKENS))
    if blocks < 2:
        raise ConfigError(f"{shape.name} on {run.tp} ranks leaves no memory for KV there", "run")
    return blocks


def _requests(file: Path) -> tuple[tuple[RecordedRequest, ...], int]:
    """Returns the requests that were answered, and how many were not."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"a run needs {file}: {error}", "run") from error
    found = [_request(file, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    answered = tuple(one for one in found if one is not None)
    if not answered:
        raise ConfigError(f"{file} holds no request that was answered", "run")
    return answered, len(found) - len(answered)


def _request(file: Path, number: int, line: str) -> RecordedRequest | None:
    try:
        fields = msgspec.json.decode(line, type=Json)
        if any(name in fields and fields[name] is None for name in NEEDED) or fields.get("output_toks") == 0:
            return None
        found = msgspec.convert(fields, RecordedRequest)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{file} line {number}: {error}", "run") from error
    if found.input_toks < 1 or found.output_toks < 1:
        raise ConfigError(f"{file} line {number}: input_toks and output_toks must be 1 or more", "run")
    return found


def _json(file: Path) -> Json:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"a run needs {file}: {error}", "run") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file} must hold an object", "run")
    return found
