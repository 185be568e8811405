"""`baton evaluate`: the loss of quality that a way of serving a model causes, beside a reference; and a verdict.

Knows nothing of how it is measured; it reads flags and prints. Exit code 3: a figure is above its tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from baton.console.output import guarded, write_json
from baton.gguf_files.folder import folder_of, is_gguf
from baton.process.output_files import require_place
from baton.protos.errors import ConfigError

if TYPE_CHECKING:
    from baton.evaluate.evaluation import Questions
    from baton.evaluate.figures import Figure
    from baton.evaluate.subject import Subject
    from baton.evaluate.sweep import SweepRow

ABOVE = 3  # the exit code of a verdict, told from 1 (it couldn't be measured) and 2 (flags)
HELDOUT = "heldout.txt"  # a model's own text to be judged on, where its folder has one


def _option(text: str, *names: str) -> typer.models.OptionInfo:
    found: typer.models.OptionInfo = typer.Option(*names, help=text, show_default=False)
    return found


Many = list[str] | None
Settings = Mapping[str, object]
Name = str | None


def evaluate_command(
    model: Annotated[str, typer.Argument(help="A model's folder or hub id, or a server's URL (OpenAI's API)")],
    against: Annotated[Name, _option("The reference: a folder, a hub id or a URL")] = None,
    text: Annotated[Name, _option("Documents to be judged on, form feeds between (its heldout.txt)")] = None,
    documents: Annotated[int | None, typer.Option(min=1, help="The first so many; all unless told")] = None,
    tasks: Annotated[
        Many, _option("JSONL of prompt and answers, or math, code, extraction; again for more (all three)")
    ] = None,
    only: Annotated[Many, _option("loss, paths, needle or tasks; again for more (all)")] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Greedy answers of the reference to follow")] = 32,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each of them")] = 64,
    needle: Annotated[list[int] | None, _option("Tokens around a needle; again for more (256 512 1024)")] = None,
    quantization: Annotated[str, typer.Option(help="MODEL's weights rounded on load: none, int8, int4")] = "none",
    quantization_override: Annotated[
        Many, _option("PATTERN=SCHEME: other layers' scheme, as worker.quantization_overrides; again for more")
    ] = None,
    kv_cache_dtype: Annotated[
        str, typer.Option(help="MODEL's KV: auto, float32, bf16, int8, fp8; several for --sweep: auto,fp8")
    ] = "auto",
    kv_selection: Annotated[
        str, typer.Option(help="What MODEL sees: all, sinks:64,window:4096, snapkv:1024, h2o:1024")
    ] = "all",
    dtype: Annotated[str, typer.Option(help="MODEL's floats: auto, float32, bfloat16, float16")] = "auto",
    activations: Annotated[
        str,
        typer.Option(help="Beside quantized weights: auto, bf16, fp8; several for --sweep: auto,bf16"),
    ] = "auto",
    against_quantization: Annotated[str, typer.Option(help="The same of the reference")] = "none",
    against_kv_cache_dtype: Annotated[str, typer.Option(help="The same of the reference")] = "auto",
    against_dtype: Annotated[str, typer.Option(help="The same of the reference")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="Of the engine; default: one per core")] = None,
    tokenizer: Annotated[Name, _option("Folder with the tokenizer of what a server serves")] = None,
    model_name: Annotated[str, typer.Option(help="The name that requests to a server carry")] = "",
    key: Annotated[str, typer.Option(help="API key for a server", envvar="BATON_API_KEY")] = "",
    fail_above: Annotated[
        Many,
        _option("1% (of loss) or NAME=SHARE: loss, kl, disagreement, divergence, needle, tasks; again for more"),
    ] = None,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Size, speed and loss of every scheme on this machine")
    ] = False,
    also: Annotated[Many, _option("Another checkpoint of the model, for --sweep; again for more")] = None,
    plot: Annotated[Name, _option("Draw the sweep's frontier into this .png or .svg (needs matplotlib)")] = None,
    json: Annotated[Name, _option("Write the result there; - prints it")] = None,
) -> None:  # fmt: skip
    """Judge a checkpoint or a server: loss, agreement with a reference, retrieval, tasks; with a verdict."""
    from baton.evaluate.figures import tolerances

    own = {
        "quantization": quantization, "kv_cache_dtype": kv_cache_dtype, "dtype": dtype, "threads": threads,
        "kv_selection": kv_selection, "activations": activations,
    }  # fmt: skip
    overrides = quantization_override or []
    other = {
        "quantization": against_quantization, "kv_cache_dtype": against_kv_cache_dtype, "dtype": against_dtype,
        "threads": threads,
    }  # fmt: skip

    def run() -> int:
        require_place(None if json == "-" else json, plot)
        if plot is not None:
            _require_plot(plot, sweep)
        allowed = tolerances(fail_above or ())
        texts = _texts(model, against, text, documents, set(only or ["loss"]) != {"tasks"})
        if sweep:
            _require_swept(quantization, overrides, kv_selection, dtype, against)
            return _sweep(model, also or (), texts, (kv_cache_dtype, activations), threads, json, plot)
        asked = _questions(texts, tasks, only, prompts, tokens, needle)
        opened = _Opener(tokenizer or _folder(model) or _folder(against), model_name, key)
        with Console(stderr=True, highlight=False).status("loading") as status:
            subject = opened(model, own | ({"quantization_overrides": _pairs(overrides)} if overrides else {}))
            reference = opened(against, other) if against else None
            found = _judge(asked, subject, reference, allowed, status.update)
        return _show(model, against, found, json)

    raise typer.Exit(guarded(run))


def _questions(
    texts: Sequence[str], tasks: Many, only: Many, prompts: int, tokens: int, needle: list[int] | None
) -> Questions:
    from baton.evaluate.evaluation import PARTS, Questions
    from baton.evaluate.tasks_file import own_sets, read_tasks

    parts = tuple(only or PARTS)
    if unknown := set(parts) - set(PARTS):
        raise ConfigError(f"--only {', '.join(sorted(unknown))}: use {', '.join(PARTS)}", "only")
    sets = {name: tuple(read_tasks(name)) for name in tasks or own_sets()} if "tasks" in parts else {}
    lengths = tuple(needle or Questions().needle_lengths)
    return Questions(tuple(texts), sets, parts, prompts, answer_tokens=tokens, needle_lengths=lengths)


def _texts(model: str, against: Name, text: Name, documents: int | None, needed: bool) -> list[str]:
    from baton.evaluate.text import read_documents

    folders = [folder for folder in (_folder(model), _folder(against)) if folder]
    own = next((Path(folder) / HELDOUT for folder in folders if (Path(folder) / HELDOUT).exists()), None)
    path = Path(text) if text else own
    if path is None and needed:
        raise ConfigError(f"--text is needed: a text to be judged on (no {HELDOUT} beside the model)", "text")
    return read_documents(path, documents) if path else []


def _folder(model: Name) -> Name:
    if not model or _is_url(model):
        return None
    if is_gguf(model) and Path(model).is_file():
        return str(folder_of(model))
    return model if Path(model).is_dir() else None


def _pairs(overrides: Sequence[str]) -> dict[str, str]:
    found = dict(each.rpartition("=")[::2] for each in overrides)
    if not all(found):
        wrong = next(each for each in overrides if "=" not in each or each.startswith("="))
        text = f"--quantization-override {wrong!r}: write PATTERN=SCHEME, as *.down_proj=int8"
        raise ConfigError(text, "quantization_override")
    return found


def _is_url(model: str) -> bool:
    return model.startswith(("http://", "https://"))


class _Opener:
    """Opens what a name stands for."""

    def __init__(self, tokenizer: Name, model_name: str, key: str) -> None:
        self._tokenizer, self._model_name, self._key = tokenizer, model_name, key

    def __call__(self, name: str, settings: Settings) -> Subject:
        if _is_url(name):
            return self._served(name, settings)
        from baton.engine.config import EngineConfig
        from baton.evaluate.local import LocalSubject

        return LocalSubject(msgspec.convert({"model": name, **settings}, EngineConfig, strict=False))

    def _served(self, url: str, settings: Settings) -> Subject:
        from baton.evaluate.served import ServerSubject
        from baton.evaluate.tokenizers import tokenizer_of

        if "quantization_overrides" in settings or set(settings.values()) - {
            "none",
            "auto",
            "all",
            settings["threads"],
        }:
            raise ConfigError(f"{url} is served as it is: leave out its quantization, KV and dtype", "quantization")
        found = tokenizer_of(Path(self._tokenizer)) if self._tokenizer else None
        return ServerSubject(url, self._model_name, self._key, found)


def _judge(
    asked: Questions,
    subject: Subject,
    reference: Subject | None,
    allowed: dict[str, float],
    say: Callable[[str], None],
) -> list[Figure]:
    from baton.evaluate.evaluation import evaluate
    from baton.evaluate.figures import judged

    return judged(evaluate(asked, subject, reference, say), allowed)


def _show(model: str, against: Name, found: Sequence[Figure], json: Name) -> int:
    from baton.evaluate.figures import passes

    verdict = passes(found)
    result = {"model": model, "against": against, "passes": verdict, "figures": msgspec.to_builtins(found)}
    if not write_json(json, result):
        Console(highlight=False).print(figure_table(found))
    return 0 if verdict else ABOVE


def figure_table(found: Sequence[Figure]) -> Table:
    """Returns a terminal table of the figures, each with its 95% interval, tolerance and verdict."""
    table = Table("what", "value", "95% within", "of", "at most", box=None)
    for figure in found:
        shown = [_number(value, figure.unit) for value in (figure.value, figure.low, figure.high)]
        table.add_row(
            figure.name, f"{shown[0]} {figure.unit if figure.unit != 'share' else ''}".strip(),
            f"{shown[1]} to {shown[2]}", f"{figure.count:,}", _verdict(figure),
        )  # fmt: skip
    return table


def _verdict(figure: Figure) -> str:
    if figure.tolerance is None:
        return ""
    word = "[green]passes[/]" if figure.passes else "[red]fails[/]"
    close = "" if figure.is_sure else ", too close to be sure: judge on more text"
    return f"{_number(figure.tolerance, figure.unit)} {word}{close}"


def _number(value: float, unit: str) -> str:
    return f"{100 * value:.3g}%" if unit == "share" else f"{value:.4g}"


def _require_swept(quantization: str, overrides: Sequence[str], selection: str, dtype: str, against: Name) -> None:
    """Raises ConfigError naming the flags that a sweep would pass over: its rows have every scheme, with all KV."""
    flags = {
        "quantization": quantization != "none", "quantization-override": bool(overrides),
        "kv-selection": selection != "all", "dtype": dtype != "auto", "against": against is not None,
    }  # fmt: skip
    if given := [f"--{flag}" for flag, is_given in flags.items() if is_given]:
        raise ConfigError(f"--sweep measures every scheme beside bfloat16; leave out {', '.join(given)}", "sweep")


def _require_plot(plot: str, sweep: bool) -> None:
    from baton.evaluate.frontier import require_drawable

    if not sweep:
        raise ConfigError("--plot draws what a --sweep measured; add it", "plot")
    require_drawable(plot)


def _sweep(
    model: str, also: Sequence[str], texts: Sequence[str], forms: tuple[str, str], threads: int | None, json: Name,
    plot: Name,
) -> int:  # fmt: skip
    from baton.evaluate.frontier import draw
    from baton.evaluate.recommend import recommended
    from baton.evaluate.sweep import schemes, sweep

    if _is_url(model):
        raise ConfigError("--sweep measures checkpoints on this machine; give a model's folder", "sweep")
    with Console(stderr=True, highlight=False).status("loading") as status:
        kvs, activations = (each.split(",") for each in forms)
        asked = schemes(model, also, kvs, threads=threads, activations=activations)
        found = list(sweep(asked, texts, status.update))
    if plot is not None:
        draw(found, plot)
    advice = recommended(found)
    if not write_json(json, {"model": model, **msgspec.to_builtins({"rows": found, "recommended": advice})}):
        out = Console(highlight=False)
        out.print(sweep_table(found))
        for each in advice:
            out.print(f"{each.need}: {each.scheme}: {each.why}")
    return 0


def sweep_table(found: Sequence[SweepRow]) -> Table:
    """Returns a terminal table of a sweep's schemes: size, speeds and added loss."""
    table = Table(
        "scheme", "GB", "tok/s B=1", "tok/s B=16", "prompt tok/s", "bits/byte", "added", "95% within", box=None
    )
    for row in found:
        rates = [f"{rate:,.0f}" for rate in (row.decode_one, row.decode_many, row.prompt)]
        added = [f"{100 * share:+.3f}%" for share in (row.added, row.low, row.high)]
        within = f"{added[1]} to {added[2]}"
        table.add_row(row.scheme, f"{row.gigabytes:.4g}", *rates, f"{row.bits_per_byte:.5g}", added[0], within)
    return table
