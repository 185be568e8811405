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

from baton.console.checkpoints.evaluate_options import (
    Many,
    ModelOptions,
    Name,
    QuestionOptions,
    ReferenceOptions,
    ServerOptions,
    Settings,
    VerdictOptions,
)
from baton.console.option_groups import with_groups
from baton.console.output import guarded, print_table, results, write_json
from baton.gguf_files.folder import folder_of, is_gguf
from baton.process.output_files import require_place, require_plot
from baton.protos.errors import ConfigError

if TYPE_CHECKING:
    from baton.evaluate.evaluation import Questions
    from baton.evaluate.figures import Figure
    from baton.evaluate.subject import Subject
    from baton.evaluate.sweep import SweepRow

ABOVE = 3  # the exit code of a verdict, told from 1 (it couldn't be measured) and 2 (flags)
HELDOUT = "heldout.txt"  # a model's own text to be judged on, where its folder has one


@with_groups
def evaluate_command(
    model: Annotated[str, typer.Argument(help="A model's folder or hub id, or a server's URL (OpenAI's API)")],
    asked: QuestionOptions,
    own: ModelOptions,
    other: ReferenceOptions,
    server: ServerOptions,
    verdict: VerdictOptions,
) -> None:
    """Judge a checkpoint or a server: loss, agreement with a reference, retrieval, tasks; with a verdict."""
    from baton.evaluate.figures import require_measured, tolerances

    def run() -> int:
        require_place(None if verdict.json == "-" else verdict.json, verdict.plot)
        if verdict.plot is not None:
            _require_plot(verdict.plot, verdict.sweep)
        allowed = tolerances(verdict.fail_above or ())
        texts = _texts(model, asked)
        if verdict.sweep:
            _require_swept(asked, own, other, verdict)
            return _sweep(model, texts, own, other.threads, verdict)
        _require_compared(asked, other, verdict)
        questions = _questions(texts, asked)
        require_measured(allowed, questions.parts, asked.against is not None)
        tokenizer = server.tokenizer or _folder(model) or _folder(asked.against)
        opened = _Opener(tokenizer, server.model_name, server.key)
        with Console(stderr=True, highlight=False).status("loading") as status:
            subject = opened(model, {**own.settings(other.threads), **_overrides(own.quantization_override)})
            reference = opened(asked.against, other.settings) if asked.against else None
            found = _judge(questions, subject, reference, allowed, status.update)
        return _show(model, asked.against, found, verdict.json)

    raise typer.Exit(guarded(run))


def _questions(texts: Sequence[str], asked: QuestionOptions) -> Questions:
    from baton.evaluate.evaluation import PARTS, Questions
    from baton.evaluate.tasks_file import own_sets, read_tasks

    parts = tuple(asked.only or PARTS)
    if unknown := set(parts) - set(PARTS):
        raise ConfigError(f"--only {', '.join(sorted(unknown))}: use {', '.join(PARTS)}", "only")
    sets = {name: tuple(read_tasks(name)) for name in asked.tasks or own_sets()} if "tasks" in parts else {}
    lengths = tuple(asked.needle or ())
    return Questions(tuple(texts), sets, parts, asked.prompts, answer_tokens=asked.tokens, needle_lengths=lengths)


def _texts(model: str, asked: QuestionOptions) -> list[str]:
    from baton.evaluate.text import read_documents

    folders = [folder for folder in (_folder(model), _folder(asked.against)) if folder]
    own = next((Path(folder) / HELDOUT for folder in folders if (Path(folder) / HELDOUT).exists()), None)
    path = Path(asked.text) if asked.text else own
    if path is None and set(asked.only or ["loss"]) != {"tasks"}:
        raise ConfigError(f"--text is needed: a text to be judged on (no {HELDOUT} beside the model)", "text")
    return read_documents(path, asked.documents) if path else []


def _folder(model: Name) -> Name:
    if not model or _is_url(model):
        return None
    if is_gguf(model) and Path(model).is_file():
        return str(folder_of(model))
    return model if Path(model).is_dir() else None


def _overrides(overrides: Many) -> Settings:
    if not overrides:
        return {}
    found = dict(each.rpartition("=")[::2] for each in overrides)
    if not all(found):
        wrong = next(each for each in overrides if "=" not in each or each.startswith("="))
        text = f"--quantization-override {wrong!r}: write PATTERN=SCHEME, as *.down_proj=int8"
        raise ConfigError(text, "quantization_override")
    return {"quantization_overrides": found}


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
        print_table(figure_table(found))
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


def _require_swept(asked: QuestionOptions, own: ModelOptions, other: ReferenceOptions, of: VerdictOptions) -> None:
    """Raises ConfigError naming the flags that a sweep would pass over: it measures the loss of every scheme, with
    all KV, and gives no verdict.
    """
    plain = QuestionOptions()
    flags = {
        "quantization": own.quantization != "none", "quantization-override": bool(own.quantization_override),
        "kv-selection": own.kv_selection != "all", "dtype": own.dtype != "auto",
        "against": asked.against is not None, **_of_reference(other),
        "only": bool(asked.only), "tasks": bool(asked.tasks), "needle": bool(asked.needle),
        "prompts": asked.prompts != plain.prompts, "tokens": asked.tokens != plain.tokens,
        "fail-above": bool(of.fail_above),
    }  # fmt: skip
    if given := _given(flags):
        raise ConfigError(f"--sweep measures every scheme beside bfloat16; leave out {given}", "sweep")


def _require_compared(asked: QuestionOptions, other: ReferenceOptions, of: VerdictOptions) -> None:
    """Raises ConfigError naming the flags that would be passed over, because they are of a sweep or a reference."""
    if of.also:
        raise ConfigError(f"--also {of.also[0]}: it is measured by a --sweep; add that, or judge it alone", "also")
    if asked.against is None and "paths" in (asked.only or ()):
        raise ConfigError("--only paths: paths compare two sides: add --against", "only")
    if asked.against is None and (given := _given(_of_reference(other))):
        raise ConfigError(f"{given}: there is no reference; name it with --against", "against")


def _of_reference(other: ReferenceOptions) -> dict[str, bool]:
    """Returns which flags say something of a reference."""
    plain = ReferenceOptions()
    names = ("against_quantization", "against_kv_cache_dtype", "against_dtype")
    return {name.replace("_", "-"): getattr(other, name) != getattr(plain, name) for name in names}


def _given(flags: Mapping[str, bool]) -> str:
    return ", ".join(f"--{flag}" for flag, is_given in flags.items() if is_given)


def _require_plot(plot: str, sweep: bool) -> None:
    if not sweep:
        raise ConfigError("--plot draws what a --sweep measured; add it", "plot")
    require_plot(plot)


def _sweep(model: str, texts: Sequence[str], own: ModelOptions, threads: int | None, result: VerdictOptions) -> int:
    from baton.evaluate.frontier import draw
    from baton.evaluate.recommend import recommended
    from baton.evaluate.sweep import schemes, sweep

    if _is_url(model):
        raise ConfigError("--sweep measures checkpoints on this machine; give a model's folder", "sweep")
    with Console(stderr=True, highlight=False).status("loading") as status:
        kvs, activations = own.kv_cache_dtype.split(","), own.activations.split(",")
        asked = schemes(model, result.also or (), kvs, threads=threads, activations=activations)
        found = list(sweep(asked, texts, status.update))
    if result.plot is not None:
        draw(found, result.plot)
    advice = recommended(found)
    if not write_json(result.json, {"model": model, **msgspec.to_builtins({"rows": found, "recommended": advice})}):
        out = results()
        print_table(sweep_table(found))
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
