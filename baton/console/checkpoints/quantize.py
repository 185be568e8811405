"""`baton quantize`: a quantized checkpoint from a plain one, in a form that this engine and others load.

Knows nothing of how weights are rounded; it reads flags and shows progress.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from baton.console.option_groups import with_groups
from baton.console.output import guarded
from baton.protos.errors import ConfigError

if TYPE_CHECKING:
    from baton.quantize.schemes import Recipe
    from baton.quantize.source import Source


# Forms of experts that transformers loads, for whoever asks for another.
LOADED = "it does those of rtn, gptq and awq, symmetric, and of fp8 and mxfp4, all as compressed-tensors"


@dataclass(frozen=True)
class MethodOptions:
    """Says how weights are rounded: method, bits, group size."""

    method: Annotated[str, typer.Option(help="rtn, gptq, awq, smoothquant, nf4, fp8 or mxfp4")] = "gptq"
    bits: Annotated[int | None, typer.Option(help="4 or 8, of rtn, gptq and awq", show_default="4")] = None
    group: Annotated[
        int | None,
        typer.Option(help="Inputs that share a scale, of rtn, gptq and awq; 0: a whole row", show_default="128"),
    ] = None


@dataclass(frozen=True)
class CalibrationOptions:
    """Names the text that a method reads, and how much of it."""

    calibration: Annotated[
        str | None,
        typer.Option(
            help="Text for gptq, awq and smoothquant: .jsonl of text or messages, or documents between form feeds; "
            "self: the model writes it",
            show_default=False,
        ),
    ] = None
    samples: Annotated[int, typer.Option(min=1, help="Pieces of that text")] = 128
    tokens: Annotated[int, typer.Option(min=16, help="Tokens of each")] = 512


@dataclass(frozen=True)
class FormOptions:
    """Says in which form the rounded weights are stored."""

    asymmetric: Annotated[
        bool | None,
        typer.Option(
            "--asymmetric/--symmetric",
            help="Groups have zero points of their own, or the middle of the range; awq has them unless told, "
            "or unless a model has experts",
            show_default=False,
        ),
    ] = None
    act_order: Annotated[bool, typer.Option(help="gptq takes inputs by falling weight")] = True
    regroup: Annotated[
        bool, typer.Option("--regroup", help="gptq's groups follow that order (desc_act), else they are neighbours")
    ] = False
    kv_cache_dtype: Annotated[
        str, typer.Option(help="fp8: write scales for such KV, found over the text (compressed-tensors)")
    ] = ""
    format: Annotated[
        str, typer.Option(help="gptq, awq, compressed-tensors or mxfp4, where the method has a choice")
    ] = ""


@with_groups
def quantize_command(
    model: Annotated[str, typer.Argument(help="A plain model's folder or hub id")],
    out: Annotated[str, typer.Option(help="A new folder; one that was left half done is gone on with")],
    method: MethodOptions,
    calibration: CalibrationOptions,
    form: FormOptions,
    threads: Annotated[int | None, typer.Option(min=1, help="Default: one per core")] = None,
) -> None:
    """Quantize a checkpoint, layer by layer; a run that was stopped goes on with the same command."""

    def run() -> int:
        import torch

        from baton.quantize.layers import has_experts
        from baton.quantize.source import Source

        _recipe(method, form).checked()  # before a model is looked for
        if threads:
            torch.set_num_threads(threads)
        source = Source(model)
        experts = has_experts(source.program)
        return _quantize(source, _recipe(method, form, experts).checked(experts), calibration, Path(out))

    raise typer.Exit(guarded(run))


def _recipe(of: MethodOptions, form: FormOptions, experts: bool = False) -> Recipe:
    """Returns what the flags ask for. ``experts`` says whether the model has any, of which others read no zero
    points.
    """
    from baton.quantize.schemes import Recipe, grid_of

    asymmetric = of.method == "awq" and not experts if form.asymmetric is None else form.asymmetric
    bits, group = grid_of(of.method, of.bits, of.group)
    rest = (form.act_order, form.regroup, form.format, form.kv_cache_dtype)
    return Recipe(of.method, bits, group, not asymmetric, *rest)


def _quantize(source: Source, recipe: Recipe, calibration: CalibrationOptions, out: Path) -> int:
    from baton.quantize.calibration import FEW
    from baton.quantize.layers import has_experts
    from baton.quantize.run import quantize, require_possible

    console = Console(stderr=True, highlight=False)
    require_possible(source, recipe, out)  # before a text is written or read
    text = _text(source, recipe, calibration)
    if 0 < len(text) < FEW:
        few = f"[yellow]only {len(text)} samples of {calibration.tokens} tokens:[/]"
        console.print(f"{few} give more text for a better checkpoint")
    if recipe.hides_experts and has_experts(source.program):
        console.print(f"[yellow]transformers doesn't load experts as {recipe.format} of this method:[/] {LOADED}")
    with _progress(console) as progress:
        task = progress.add_task(f"{recipe.method}, layers", total=None)
        quantize(source, recipe, text, out, lambda done, of: progress.update(task, completed=done, total=of))
    plain, made = (_gigabytes(folder) for folder in (source.directory, out))
    judge = f"baton evaluate {out} --against {source.directory}"
    console.print(f"{out}: {made:.3g} GB of {plain:.3g} GB. Judge it: {judge}", soft_wrap=True, markup=False)
    return 0


def _text(source: Source, recipe: Recipe, asked: CalibrationOptions) -> list[list[int]]:
    from baton.quantize.calibration import read_samples
    from baton.quantize.schemes import needs_text

    if not needs_text(recipe):
        return []
    if asked.tokens > source.program.max_position:
        text = f"--tokens {asked.tokens}: the model was made for contexts of {source.program.max_position}"
        raise ConfigError(f"{text}; use fewer", "tokens")
    if asked.calibration is None:
        what = "--kv-cache-dtype" if recipe.kv_cache_dtype else recipe.method
        text = f"{what} reads text: give --calibration FILE, or --calibration self"
        raise ConfigError(text, "calibration")
    return read_samples(source.directory, asked.calibration, asked.samples, asked.tokens)


def _progress(console: Console) -> Progress:
    """A bar with the time left, which is estimated over all layers: they are alike."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    return Progress(TextColumn("{task.description}"), *columns, console=console, speed_estimate_period=1e9)


def _gigabytes(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors")) / 1e9
