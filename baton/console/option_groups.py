"""Groups of options: a command takes a frozen dataclass in place of each of its options.

Knows nothing of what an option means. typer makes a command's options from its signature alone; ``with_groups``
writes that signature, and builds the groups from what the user gave.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import wraps
from typing import get_type_hints

Command = Callable[..., None]


def with_groups(command: Command) -> Command:
    """Returns ``command`` for typer, with the fields of a dataclass in place of each parameter of that type.

    A field is annotated as a parameter of a typer command: ``Annotated[type, typer.Option(...)]``. Options stand in
    the help in the order of parameters and fields. Raises ValueError if two have one name.
    """
    own = inspect.signature(command, eval_str=True).parameters
    kinds: dict[str, type] = {name: found.annotation for name, found in own.items()}
    groups = {name: kind for name, kind in kinds.items() if is_dataclass(kind)}

    @wraps(command)
    def run(**given: object) -> None:
        made = {name: _group(kind, given) for name, kind in groups.items()}
        command(**{name: given[name] for name in own if name not in made}, **made)

    every = list(_parameters(own, groups))
    run.__signature__ = inspect.Signature(every)  # type: ignore[attr-defined]
    run.__annotations__ = {found.name: found.annotation for found in every}
    return run


def _group(kind: type, given: Mapping[str, object]) -> object:
    return kind(**{field.name: given[field.name] for field in fields(kind)})


def _parameters(own: Mapping[str, inspect.Parameter], groups: Mapping[str, type]) -> Iterator[inspect.Parameter]:
    for name, found in own.items():
        if name not in groups:
            yield found.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            continue
        hints = get_type_hints(groups[name], include_extras=True)
        for field in fields(groups[name]):
            default = _default(field)
            yield inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[field.name]
            )


def _default(field: Field[object]) -> object:
    return inspect.Parameter.empty if field.default is MISSING else field.default
