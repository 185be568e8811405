"""Makes commands refuse nan and infinities for options that take a number.

Knows nothing of what an option means. Python reads both as floats, no bound of a range refuses nan, and what a
command computes of either is never what somebody asked for.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from typing import get_args, get_origin

import typer
from typer.models import OptionInfo


def require_finite(app: typer.Typer) -> None:
    """Makes each option of ``app``'s commands that takes a float refuse what isn't finite, by the option's name.

    Call it when all commands are registered.
    """
    for command in _commands(app):
        signature = inspect.signature(command, eval_str=True)
        command.__signature__ = signature  # type: ignore[attr-defined]  # else typer evaluates it to other options
        command.__annotations__ = {found.name: found.annotation for found in signature.parameters.values()}
        for found in signature.parameters.values():
            for info in _options(found):
                if info.callback is None:
                    info.callback = finite


def finite(value: float | None) -> float | None:
    """Returns an option's value. Raises BadParameter, which names the option, for nan and infinities."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is no finite number")
    return value


def _commands(app: typer.Typer) -> Iterator[Callable[..., object]]:
    for command in (*app.registered_commands, app.registered_callback):
        if command is not None and command.callback is not None:
            yield command.callback
    for group in app.registered_groups:
        if group.typer_instance is not None:
            yield from _commands(group.typer_instance)


def _options(found: inspect.Parameter) -> Iterator[OptionInfo]:
    """Yields what describes a parameter that takes one float."""
    kind, *said = get_args(found.annotation) if hasattr(found.annotation, "__metadata__") else (found.annotation,)
    takes = {kind} if get_origin(kind) is None else set(get_args(kind))
    if float in takes:
        yield from (one for one in (*said, found.default) if isinstance(one, OptionInfo))
