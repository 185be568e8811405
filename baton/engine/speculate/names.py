"""Maps the names in the setting ``speculation`` to speculators. Knows nothing of how these work.

A new one is a file in this folder with a class that implements ``Speculator``, and a line in ``SPECULATORS``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from baton.engine.speculate import forced, lookahead, prompt_lookup, suffix
from baton.engine.speculate.draft import Speculator
from baton.protos.errors import ConfigError

NONE, AUTO = "none", "auto"
# Each is made with the names of all speculators in use.
SPECULATORS: dict[str, Callable[[tuple[str, ...]], Speculator]] = {
    prompt_lookup.NAME: lambda beside: prompt_lookup.PromptLookup(),
    suffix.NAME: lambda beside: suffix.Suffix(own=prompt_lookup.NAME not in beside),
    forced.NAME: lambda beside: forced.ForcedDrafts(),
    lookahead.NAME: lambda beside: lookahead.Lookahead(),
}
# Prefixes of speculators with weights of their own, before a directory or a hub id.
DRAFT, MEDUSA, EAGLE3 = "draft:", "medusa:", "eagle3:"
SELF = "self"  # the target's own layers; their number may follow, "self:8"
OF_FILES = (DRAFT, MEDUSA, EAGLE3)
AUTO_NAMES = (prompt_lookup.NAME, suffix.NAME, forced.NAME)  # of speculators that need no second model


def speculator_names(asked: str) -> tuple[str, ...]:
    """Returns the names in ``asked``, which are joined by "+", with "auto" expanded; empty for "none". Raises
    ConfigError for an unknown one.
    """
    names = [name for part in _parts(asked) for name in (AUTO_NAMES if part == AUTO else (part,))]
    for name in names:
        if name not in SPECULATORS and not _is_made_of_a_model(name):
            choices = ", ".join((NONE, AUTO, *SPECULATORS, SELF, f"{DRAFT}MODEL", f"{MEDUSA}PATH", f"{EAGLE3}PATH"))
            text = f"speculation {name!r} isn't known; choose from {choices}, or join several by +"
            raise ConfigError(text, "speculation")
    return tuple(dict.fromkeys(names))


def self_layers(name: str) -> int | None:
    """Returns the number of layers N in "self:N", 0 for "self"; None if ``name`` is another speculator's."""
    head, _, count = name.partition(":")
    if head != SELF or (count and not (count.isascii() and count.isdigit())):
        return None
    return int(count or 0)


def without_auto(asked: str) -> str:
    """Returns ``asked`` without "auto", which asks for nothing where drafts can't be taken."""
    return "+".join(part for part in _parts(asked) if part != AUTO) or NONE


def _parts(asked: str) -> list[str]:
    return [] if asked == NONE else asked.split("+")


def _is_made_of_a_model(name: str) -> bool:
    return self_layers(name) is not None or any(name.startswith(of) and name != of for of in OF_FILES)


def loads_files(asked: str) -> bool:
    """Returns whether a speculator of ``asked`` has weights of its own, whose loading takes as long as they are
    large.
    """
    return any(part.startswith(OF_FILES) for part in _parts(asked))


def model_of(name: str) -> str:
    """Returns the directory or hub id in the name of a speculator that has weights of its own; "" in another's."""
    return next((name.removeprefix(of) for of in OF_FILES if name.startswith(of)), "")


def placed(asked: str) -> str:
    """Returns ``asked`` with its directories made absolute, for a process with another working directory. Raises
    ConfigError for an unknown name.
    """
    speculator_names(asked)
    return "+".join(_placed(part) for part in _parts(asked)) or NONE


def _placed(name: str) -> str:
    of = next((of for of in OF_FILES if name.startswith(of)), "")
    path = Path(name.removeprefix(of)).expanduser()
    return f"{of}{path.resolve()}" if of and path.is_dir() else name


def speculators(asked: str, load: Callable[[str], Speculator] | None = None) -> tuple[Speculator, ...]:
    """Returns the speculators that ``asked`` names; none for "none". ``load`` makes those that need a model. Raises
    ConfigError.
    """
    names = speculator_names(asked)
    return tuple(_made(name, names, load) for name in names)


def _made(name: str, names: tuple[str, ...], load: Callable[[str], Speculator] | None) -> Speculator:
    if name in SPECULATORS:
        return SPECULATORS[name](names)
    if load is None:
        raise ConfigError(f"speculation {name}: no model can be loaded here", "speculation")
    return load(name)
