"""Which speculators a name stands for. Knows nothing of what they do.

A new one is a file here with a class that implements ``Speculator``, and a line in ``SPECULATORS``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from baton.engine.speculate import draft_model, prompt_lookup, suffix
from baton.engine.speculate.draft import Speculator
from baton.protos.errors import ConfigError

NONE, AUTO = "none", "auto"
# Each is told the names that it works beside.
SPECULATORS: dict[str, Callable[[tuple[str, ...]], Speculator]] = {
    prompt_lookup.NAME: lambda beside: prompt_lookup.PromptLookup(),
    suffix.NAME: lambda beside: suffix.Suffix(own=prompt_lookup.NAME not in beside),
}
DRAFT = f"{draft_model.NAME}:"  # a model's directory or hub id follows
AUTO_NAMES = (prompt_lookup.NAME, suffix.NAME)  # what needs no second model


def speculator_names(asked: str) -> tuple[str, ...]:
    """Returns the speculators that ``asked`` names, joined by "+". Raises ConfigError for one that isn't known."""
    if asked == NONE:
        return ()
    parts = asked.split("+")
    names = [name for part in parts for name in (AUTO_NAMES if part == AUTO else (part,))]
    for name in names:
        if name not in SPECULATORS and (not name.startswith(DRAFT) or name == DRAFT):
            choices = ", ".join((NONE, AUTO, *SPECULATORS, f"{DRAFT}MODEL"))
            text = f"speculation {name!r} isn't known; choose from {choices}, or join several by +"
            raise ConfigError(text, "speculation")
    return tuple(dict.fromkeys(names))


def placed(asked: str) -> str:
    """Returns ``asked`` with draft models' directories whole, as a process elsewhere needs them."""
    return "+".join(_placed(name) for name in speculator_names(asked)) or NONE


def _placed(name: str) -> str:
    path = Path(name.removeprefix(DRAFT)).expanduser()
    return f"{DRAFT}{path.resolve()}" if name.startswith(DRAFT) and path.is_dir() else name


def speculators(asked: str, load: Callable[[str], Speculator] | None = None) -> tuple[Speculator, ...]:
    """Makes the speculators that ``asked`` names; none for "none". ``load`` makes that of a draft model's name."""
    names = speculator_names(asked)
    return tuple(_made(name, names, load) for name in names)


def _made(name: str, names: tuple[str, ...], load: Callable[[str], Speculator] | None) -> Speculator:
    if not name.startswith(DRAFT):
        return SPECULATORS[name](names)
    if load is None:
        raise ConfigError(f"speculation {name}: no draft model can be loaded here", "speculation")
    return load(name.removeprefix(DRAFT))
