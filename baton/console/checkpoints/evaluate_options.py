"""The options of `baton evaluate`, in groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import typer

Many = list[str] | None
Name = str | None
Settings = Mapping[str, object]


def _option(text: str, *names: str) -> typer.models.OptionInfo:
    found: typer.models.OptionInfo = typer.Option(*names, help=text, show_default=False)
    return found


@dataclass(frozen=True)
class QuestionOptions:
    """Says what the model is asked, and which reference is asked the same."""

    against: Annotated[Name, _option("The reference: a folder, a hub id or a URL")] = None
    text: Annotated[Name, _option("Documents to be judged on, form feeds between (its heldout.txt)")] = None
    documents: Annotated[int | None, typer.Option(min=1, help="The first so many; all unless told")] = None
    tasks: Annotated[
        Many, _option("JSONL of prompt and answers, or math, code, extraction; again for more (all three)")
    ] = None
    only: Annotated[Many, _option("loss, paths, needle or tasks; again for more (all)")] = None
    prompts: Annotated[int, typer.Option(min=1, help="Greedy answers of the reference to follow")] = 32
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each of them")] = 64
    needle: Annotated[list[int] | None, _option("Tokens around a needle; again for more (256 512 1024)")] = None


@dataclass(frozen=True)
class ModelOptions:
    """Says how this engine runs the model that is judged."""

    quantization: Annotated[str, typer.Option(help="MODEL's weights rounded on load: none, int8, int4")] = "none"
    quantization_override: Annotated[
        Many, _option("PATTERN=SCHEME: other layers' scheme, as worker.quantization_overrides; again for more")
    ] = None
    kv_cache_dtype: Annotated[
        str, typer.Option(help="MODEL's KV: auto, float32, bf16, int8, fp8; several for --sweep: auto,fp8")
    ] = "auto"
    kv_selection: Annotated[
        str, typer.Option(help="What MODEL sees: all, sinks:64,window:4096, snapkv:1024, h2o:1024")
    ] = "all"
    dtype: Annotated[str, typer.Option(help="MODEL's floats: auto, float32, bfloat16, float16")] = "auto"
    activations: Annotated[
        str, typer.Option(help="Beside quantized weights: auto, bf16, fp8; several for --sweep: auto,bf16")
    ] = "auto"

    def settings(self, threads: int | None) -> Settings:
        """Returns the fields of EngineConfig that the options set, without the overrides by layer."""
        names = ("quantization", "kv_cache_dtype", "dtype", "kv_selection", "activations")
        return {name: getattr(self, name) for name in names} | {"threads": threads}


@dataclass(frozen=True)
class ReferenceOptions:
    """Says how this engine runs the reference, and on how many cores it runs both."""

    against_quantization: Annotated[str, typer.Option(help="The same of the reference")] = "none"
    against_kv_cache_dtype: Annotated[str, typer.Option(help="The same of the reference")] = "auto"
    against_dtype: Annotated[str, typer.Option(help="The same of the reference")] = "auto"
    threads: Annotated[int | None, typer.Option(min=1, help="Of the engine; default: one per core")] = None

    @property
    def settings(self) -> Settings:
        """Returns the fields of EngineConfig that the options set."""
        names = ("quantization", "kv_cache_dtype", "dtype")
        return {name: getattr(self, f"against_{name}") for name in names} | {"threads": self.threads}


@dataclass(frozen=True)
class ServerOptions:
    """Says how to ask a server, if a model is a URL."""

    tokenizer: Annotated[Name, _option("Folder with the tokenizer of what a server serves")] = None
    model_name: Annotated[str, typer.Option(help="The name that requests to a server carry")] = ""
    key: Annotated[str, typer.Option(help="API key for a server", envvar="BATON_API_KEY")] = ""


@dataclass(frozen=True)
class VerdictOptions:
    """Says what becomes of the figures: tolerances, a sweep, a plot, a file."""

    fail_above: Annotated[
        Many,
        _option("1% (of loss) or NAME=SHARE: loss, kl, disagreement, divergence, needle, tasks; again for more"),
    ] = None
    sweep: Annotated[bool, typer.Option("--sweep", help="Size, speed and loss of every scheme on this machine")] = (
        False
    )
    also: Annotated[Many, _option("Another checkpoint of the model, for --sweep; again for more")] = None
    plot: Annotated[Name, _option("Draw the sweep's frontier into this .png or .svg (needs matplotlib)")] = None
    json: Annotated[Name, _option("Write the result there; - prints it")] = None
