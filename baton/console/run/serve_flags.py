"""The flags of ``baton serve``, each of which sets one key of the configuration for this run.

Knows nothing of what a key means: ``cluster/sections`` checks its value and names it in errors.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple

import typer

Setting = str | int | bool | None
Settings = dict[str, dict[str, Setting]]


class ServeFlag(NamedTuple):
    """Describes a flag of ``baton serve``, which sets ``key`` ("section.name") of the configuration.

    ``panel`` is the flag's heading in ``--help``, ``help`` its text.
    """

    name: str
    key: str
    kind: type
    panel: str
    help: str

    @property
    def parameter(self) -> inspect.Parameter:
        """Returns the flag as a keyword parameter for typer; its value is None if the flag is absent."""
        option = f"--{self.name.replace('_', '-')}"
        found = typer.Option(option, help=self.help, show_default=False, rich_help_panel=self.panel)
        annotation: Any = Annotated[self.kind | None, found]  # type: ignore[name-defined]
        return inspect.Parameter(self.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _panel(title: str, *rows: tuple[str, str, type, str]) -> tuple[ServeFlag, ...]:
    return tuple(ServeFlag(name, key, kind, title, text) for name, key, kind, text in rows)


FLAGS = (
    *_panel(
        "Model",
        ("model", "worker.model", str, "Directory, .gguf file or Hugging Face id; default: the demo model"),
        ("model_name", "worker.model_name", str, "The name clients use"),
        ("dtype", "worker.dtype", str, "auto, float32, bfloat16 or float16 (auto)"),
        ("quantization", "worker.quantization", str, "Round the weights on load: none, int8 or int4 (none)"),
        ("activations", "worker.activations", str, "Beside quantized weights: auto, bf16 or fp8 (auto)"),
        ("kv_cache_dtype", "worker.kv_cache_dtype", str, "auto, float32, bf16, fp16, int8 or fp8 (auto: as dtype)"),
        (
            "speculation", "worker.speculation", str,
            "Draft tokens: none, auto, prompt_lookup, suffix, forced, lookahead, self, draft:MODEL, "
            "medusa:PATH, eagle3:PATH, or several joined by + (auto)",
        ),
        ("max_model_len", "worker.max_model_len", int, "Cap on prompt and answer, in tokens"),
        ("seed", "worker.seed", int, "Seeds what is random; 0 takes the system's entropy"),
    ),
    *_panel(
        "Workers",
        ("prefill", "cluster.prefill", int, "Prefill workers (1)"),
        ("decode", "cluster.decode", int, "Decode workers (1)"),
        ("colocated", "cluster.colocated", bool, "Workers that do both, no handoff"),
        ("device", "worker.device", str, "cpu, cuda, auto or paced:PROFILE (cpu)"),
        ("pages", "worker.pages", int, "KV pages per worker, of worker.block_tokens tokens each (16)"),
        ("policy", "router.policy", str, "round_robin, least_loaded or cost (cost)"),
    ),
    *_panel(
        "Workers of several ranks",
        ("tp", "worker.tp", int, "Ranks of each worker: processes that share its model (1)"),
        ("prefill_tp", "cluster.prefill_tp", int, "Ranks of each prefill worker (--tp)"),
        ("decode_tp", "cluster.decode_tp", int, "Ranks of each decode worker (--tp)"),
        ("prefill_cp", "cluster.prefill_cp", int, "Ranks of each prefill worker that share a prompt's rows"),
        ("pp", "worker.pp", int, "Ranks of each worker that share its layers (1)"),
        ("prefill_pp", "cluster.prefill_pp", int, "Ranks of each prefill worker that share its layers (--pp)"),
        ("decode_pp", "cluster.decode_pp", int, "Ranks of each decode worker that share its layers (--pp)"),
        ("ep", "worker.ep", int, "Ranks of each worker that share its experts (1)"),
        ("prefill_ep", "cluster.prefill_ep", int, "Ranks of each prefill worker that share its experts (--ep)"),
        ("decode_ep", "cluster.decode_ep", int, "Ranks of each decode worker that share its experts (--ep)"),
    ),
    *_panel(
        "Addresses and access",
        ("host", "router.host", str, "Address to listen on (127.0.0.1)"),
        ("port", "router.port", int, "REST port (8000); 0 takes a free one"),
        ("grpc_port", "router.grpc_port", int, "gRPC port (8001); 0 takes a free one"),
        ("keys", "router.keys_file", str, "File of API keys (baton keys add); default: none asked for"),
        ("insecure", "router.insecure", bool, "Listen on a routable address without auth"),
        ("tls", "tls.dir", str, "Folder of certificates (made there if missing): mutual TLS on every port"),
    ),
    *_panel(
        "Where it runs, and what it uses",
        ("redis", "redis.url", str, "An existing Redis, redis://… or unix://…; default: a private one"),
        ("ray_address", "ray.address", str, "An existing Ray cluster; default: a private one"),
        ("otlp", "telemetry.otlp_endpoint", str, "host:port that takes spans (OTLP over gRPC)"),
        ("run_dir", "cluster.run_dir", str, "Where sockets and logs go; default: a new temporary directory"),
    ),
)  # fmt: skip


def settings_of(given: Mapping[str, Setting]) -> Settings:
    """Returns section -> key -> value of the flags in ``given``, which maps a flag's name to its value (None if
    absent).
    """
    found: Settings = {}
    for flag in FLAGS:
        section, _, key = flag.key.partition(".")
        found.setdefault(section, {})[key] = given[flag.name]
    return found


def flagged(command: Callable[..., None]) -> Callable[..., None]:
    """Returns ``command``, which takes keyword arguments, with a signature from which typer makes every flag of
    FLAGS.
    """
    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.kind is not p.VAR_KEYWORD]
    every = [flag.parameter for flag in FLAGS] + [p.replace(kind=p.KEYWORD_ONLY) for p in own]
    command.__signature__ = inspect.Signature(every)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in every}
    return command
